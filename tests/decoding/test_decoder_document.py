"""What docs/decoder.md shows is run, and its tables name every parameter."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from draftsmith.decoding import Engine, SamplingParams

DOCUMENT = (Path(__file__).parents[2] / "docs" / "decoder.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def shown() -> dict:
    """The names that the examples leave behind."""
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    names: dict = {}
    with torch.random.fork_rng():
        exec(compile("\n".join(examples), "docs/decoder.md", "exec"), names)
    return names


def test_the_examples_answers_are_the_targets_own(shown, continue_greedily):
    target = shown["target"]
    target.set_attn_implementation("sdpa")
    prompts = {"a": [5, 9, 2], "c": [1, 2, 3, 4] * 40}
    want = {name: continue_greedily(target, prompt, 16) for name, prompt in prompts.items()}
    assert shown["answers"] == want


def test_the_examples_abort_returns_what_was_committed(shown):
    assert shown["left"].finish_reason == "abort"
    assert 1 <= len(shown["left"].token_ids) <= 4


def test_the_engine_of_fixed_steps_is_made_as_shown(shown):
    assert shown["engine"]._target._steps is not None


def _named(table: str) -> set[str]:
    """Names in the first column of the table whose heading begins so."""
    _, rest = DOCUMENT.split(f"| {table} |")
    rows = rest.split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_tables_name_every_parameter():
    assert _named("of a request") == {field.name for field in fields(SamplingParams)}
    of_engine = {*inspect.signature(Engine).parameters, *inspect.signature(Engine.open).parameters}
    assert _named("of the engine") == of_engine - {"self"}
