"""The worked plan in the documentation is what its command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.cli import app

ROOT = Path(__file__).parents[2]
NEAR = 0.05  # another version of torch may keep other tensors for a backward pass


def number(word):
    text = word.strip("(),;").replace(",", "")
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


@pytest.mark.slow
def test_the_worked_plan_is_what_its_command_prints(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")  # rich's width where there is no terminal
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    worked = page.partition("## A worked plan")[2]
    command, shown = re.findall(r"```(?:bash)?\n(.*?)```", worked, flags=re.DOTALL)[:2]
    program, *arguments = shlex.split(command.replace("\\\n", ""))
    assert program == "draftsmith"
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    for ours, theirs in zip(shown.split(), done.stdout.split(), strict=True):
        if number(ours) is None:
            assert ours == theirs
        else:
            assert number(theirs) == pytest.approx(number(ours), rel=NEAR)
