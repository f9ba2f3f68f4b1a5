"""docs/gate.md is the schema of the decision: it names every check and every field."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from draftsmith.config import build
from draftsmith.registry.gate import SCHEMA
from draftsmith.registry.gate_settings import DEFAULT_SEVERITIES, GateConfig
from tests.registry.gate_reports import CONFIG, good_reports, judged

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/gate.md").read_text(encoding="utf-8")


def rows(heading):
    """First cells and second cells of the table that follows a line."""
    table = DOCUMENT.split(heading, 1)[1].split("|---", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1:3] for line in table.splitlines()[1:]]
    return [(first.strip(), second.strip()) for first, second in cells]


def test_every_check_is_listed_with_its_default_severity():
    listed = {name.strip("`"): severity for name, severity in rows("## Checks")}
    assert listed == dict(DEFAULT_SEVERITIES)
    assert list(listed) == list(DEFAULT_SEVERITIES)


def test_every_field_of_the_decision_is_documented():
    decision = judged(good_reports())
    assert {name.strip("`") for name, _ in rows("## decision.json")} == set(decision)
    fields = ", ".join(name for name, _ in rows("Every entry of `checks`"))
    assert set(re.findall(r"`(\w+)`", fields)) == set(decision["checks"][0])
    assert f"version of this format: {SCHEMA} " in DOCUMENT


def test_the_override_that_the_page_shows_is_valid():
    (shown,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    gate = yaml.load(shown, Loader=yaml.BaseLoader)["override"]["gate"]
    (override,) = build(GateConfig, CONFIG | gate, "gate").overrides
    assert override.check in DEFAULT_SEVERITIES


def test_every_key_of_the_gate_that_the_page_names_exists():
    named = set(re.findall(r"`gate\.(\w+)", DOCUMENT))
    assert named <= set(GateConfig.__dataclass_fields__)
