"""The sources of prompts: reading them, and their identity by content.

Knows nothing of the target, so self-written prompts are known here by their settings alone.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.artifacts import digest_json
from draftsmith.corpus.prompts import Prompt, bundled_prompts, read_jsonl
from draftsmith.corpus.settings import SourceConfig


def read_source(source: SourceConfig) -> list[Prompt]:
    """The prompts of a source that can be read: the first `count`, or all.

    Raises:
        CorpusError: The source is missing, empty or broken; names the line or row.
    """
    match source.kind:
        case "bundled":
            return list(islice(bundled_prompts(), source.count or None))
        case "jsonl":
            lines = read_jsonl(Path(source.path), domain=source.domain)
            return list(islice(lines, source.count or None))
        case "dataset":
            # Most corpora have no such source, and the library takes seconds to import.
            from draftsmith.corpus.hub_prompts import read_dataset  # noqa: PLC0415

            return list(islice(read_dataset(source), source.count or None))
        case "self":
            raise ValueError("self-written prompts are sampled, not read")


def identity(source: SourceConfig) -> dict[str, Any]:
    """What the source contributes to a corpus, wherever it lies.

    Returns:
        Its kind, with the number of its prompts and a digest of their ids and domains in order;
        the settings of a source of kind `self`.

    Raises:
        CorpusError: As in `read_source`.
    """
    if source.kind == "self":
        return {"kind": "self", "count": source.count, "temperature": source.temperature}
    prompts = read_source(source)
    content = [[prompt.prompt_id, prompt.domain] for prompt in prompts]
    return {"kind": source.kind, "num_prompts": len(prompts), "digest": digest_json(content)}
