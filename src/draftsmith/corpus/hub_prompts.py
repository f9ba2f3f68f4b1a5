"""Prompts out of a `datasets` folder or a Hub dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import datasets

from draftsmith.corpus.prompts import Prompt, prompt_from
from draftsmith.corpus.settings import SourceConfig
from draftsmith.errors import CorpusError


def read_dataset(source: SourceConfig) -> Iterator[Prompt]:
    """Prompts of a `datasets` folder (`save_to_disk`) or of a Hub dataset, columns as in JSONL.

    Raises:
        CorpusError: It cannot be loaded, is empty or lacks the columns.
    """
    try:
        if Path(source.path).is_dir() and any(Path(source.path).rglob("state.json")):
            data = datasets.load_from_disk(source.path)
        else:
            data = datasets.load_dataset(source.path)
        if isinstance(data, datasets.DatasetDict):
            data = data[source.split]
    except IndexError:
        data = []  # what `datasets` makes of a saved folder without any row
    except Exception as error:
        raise CorpusError(
            f"loading the dataset {source.path}",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            expected=f"a saved dataset or a reachable Hub dataset with split {source.split}",
            remedy="save it with `save_to_disk` beside the project and name that folder",
        ) from error
    if not data:
        raise CorpusError(
            f"reading prompts from the dataset {source.path}",
            found="no row",
            expected="one `messages` or `prompt` a row",
            remedy="fill the dataset or remove the source from `corpus.sources`",
        )
    for index, row in enumerate(data):
        yield prompt_from(row, where=f"{source.path}, row {index}", domain=source.domain)
