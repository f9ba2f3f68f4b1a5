"""Prompts: reading them from files, telling duplicates, splitting by hash.

A prompt's id is the hash of its conversation, so the split of a prompt never changes when others
are added. Needs neither `datasets` nor a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from draftsmith.artifacts import digest_json
from draftsmith.errors import CorpusError

_ID_DIGITS = 16
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends with a user turn.

    Attributes:
        messages: (role, content) in order.
        domain: Label for reports.
    """

    messages: tuple[tuple[str, str], ...]
    domain: str

    @property
    def prompt_id(self) -> str:
        """16 hex digits of the conversation's hash; domain and source do not count."""
        return digest_json([list(message) for message in self.messages])[:_ID_DIGITS]

    def as_messages(self) -> list[dict[str, str]]:
        """The form that chat templates take."""
        return [{"role": role, "content": content} for role, content in self.messages]


def user_prompt(text: str, domain: str) -> Prompt:
    """A conversation of one user turn."""
    return Prompt((("user", text),), domain)


def is_eval(prompt: Prompt, fraction: float) -> bool:
    """Whether the prompt belongs to the eval split; depends on the prompt alone."""
    return int(prompt.prompt_id, 16) < fraction * 16.0**_ID_DIGITS


def distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The first of every set of equal conversations (case and white space folded)."""
    seen: dict[tuple[str, ...], Prompt] = {}
    for prompt in prompts:
        key = tuple(" ".join(content.casefold().split()) for _, content in prompt.messages)
        seen.setdefault(key, prompt)
    return list(seen.values())


def bundled_prompts() -> list[Prompt]:
    """The prompts that come with draftsmith, by domain."""
    folder = resources.files("draftsmith.corpus") / "data"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".jsonl")), key=lambda f: f.name)
    prompts: list[Prompt] = []
    for file in files:
        rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        prompts += [prompt_from(row, where=file.name, domain="general") for row in rows]
    return prompts


def read_jsonl(path: Path, *, domain: str) -> Iterator[Prompt]:
    """Prompts of a JSONL file.

    A line is an object with `messages` or `prompt`, optionally `domain` (or `category`).

    Raises:
        CorpusError: The file is missing or empty, or a line is not a prompt; names the line.
    """
    try:
        # Not splitlines(): JSON allows other line separators inside a string.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"reading prompts from {path}",
            found=str(error),
            expected="a readable UTF-8 JSONL file",
            remedy="mend `path` of the source under `corpus.sources`",
        ) from error
    if not any(line.strip() for line in lines):
        raise CorpusError(
            f"reading prompts from {path}",
            found="an empty file",
            expected="one JSON object a line with `messages` or `prompt`",
            remedy="fill the file or remove the source from `corpus.sources`",
        )
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                data = json.loads(line)
            except ValueError as error:
                raise _bad_prompt(where, f"no JSON ({error})") from error
            yield prompt_from(data, where=where, domain=domain)


def prompt_from(data: object, *, where: str, domain: str) -> Prompt:
    """A prompt from a mapping with `messages` or `prompt`; `domain` is used when it carries none.

    Raises:
        CorpusError: It holds no conversation that ends with a user turn.
    """
    if not isinstance(data, Mapping):
        raise _bad_prompt(where, f"a {type(data).__name__}")
    label = str(data.get("domain") or data.get("category") or domain)
    text = data.get("prompt")
    if isinstance(text, str) and text.strip():
        return user_prompt(text, label)
    messages = data.get("messages")
    if not isinstance(messages, list | tuple) or not messages:
        raise _bad_prompt(where, f"keys {sorted(data)} without text")
    turns = tuple(_turn(message, where) for message in messages)
    while turns and turns[-1][0] == "assistant":
        turns = turns[:-1]
    if not turns or turns[-1][0] != "user":
        raise _bad_prompt(where, "no user turn at the end")
    return Prompt(turns, label)


def _turn(message: Any, where: str) -> tuple[str, str]:  # noqa: ANN401  user data
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise _bad_prompt(where, f"the message {str(message)[:60]!r}")
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise _bad_prompt(where, f"a {message['role']} turn without text")
    return str(message["role"]), content


def _bad_prompt(where: str, found: str) -> CorpusError:
    return CorpusError(
        f"reading a prompt ({where})",
        found=found,
        expected="`prompt`: text, or `messages`: role and content, the last one of the user",
        remedy="mend or remove the line",
    )
