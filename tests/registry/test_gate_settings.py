"""The section `gate`, through the configuration that a user writes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import yaml

from draftsmith.config import compose, load_section, write_config
from draftsmith.drift.evidence import Recorded
from draftsmith.drift.settings import DriftConfig
from draftsmith.drift.verdict import Records, drift_report
from draftsmith.errors import ConfigError
from draftsmith.registry.gate import GateEvidence, decide
from draftsmith.registry.gate_settings import (
    ALWAYS_BLOCK,
    DEFAULT_SEVERITIES,
    NOT_OVERRIDABLE,
    GateConfig,
)
from pipeline.compose import SCHEMA
from tests.registry.gate_reports import CONFIG, PAIR, TODAY, check_of, good_reports

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def composed(tmp_path):
    """The gate's and drift's sections after a round through build/config.yaml."""

    def make(override):
        params = yaml.safe_load((ROOT / "params.yaml").read_text())
        text = yaml.safe_dump({key: params[key] for key in ("groups", "recipes")})
        written = text + textwrap.dedent(override)
        (tmp_path / "params.yaml").write_text(written)
        config = compose(tmp_path / "params.yaml", ROOT / "conf", schema=SCHEMA)
        write_config(tmp_path / "config.yaml", config)
        gate = load_section(tmp_path / "config.yaml", "gate", GateConfig)
        return gate, load_section(tmp_path / "config.yaml", "drift", DriftConfig)

    return make


def test_every_check_has_a_severity_in_the_default_configuration(composed):
    gate, _ = composed("")
    assert set(gate.checks) == set(DEFAULT_SEVERITIES) - {"losslessness"}
    assert {name: gate.severity(name) for name in DEFAULT_SEVERITIES} == dict(DEFAULT_SEVERITIES)


def test_severities_and_overrides_are_configured_as_people_write_yaml(composed):
    gate, _ = composed("""
        override:
          gate.checks.better_than_prompt_lookup: block
          gate:
            require_losslessness: false
            checks: {engine_ratio: off, alpha: warn}
            overrides:
              - {check: speedup, who: Ann Lee, why: "launch: week 23", until: 2026-06-30}
        """)
    severities = {name: gate.severity(name) for name in DEFAULT_SEVERITIES}
    changed = {"better_than_prompt_lookup": "block", "engine_ratio": "off", "alpha": "warn"}
    assert severities == {**DEFAULT_SEVERITIES, **changed, "losslessness": "warn"}
    (override,) = gate.overrides
    assert (override.check, override.who, str(override.last_day)) == (
        "speedup",
        "Ann Lee",
        "2026-06-30",
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("{gate.checks.identity: off}", ["gate.checks.identity", "cannot be switched off"]),
        ("{gate.checks.quarantine: warn}", ["gate.checks.quarantine", "cannot be switched off"]),
        ("{gate.checks.losslessness: warn}", ["gate.require_losslessness"]),
        ("{gate.checks.alhpa: warn}", ["gate.checks.alhpa", "did you mean `alpha`"]),
        ("{gate.checks.alpha: on}", ["gate.checks.alpha", "`block`, `warn`, `off`"]),
        ("{gate.checks.alpha: stop}", ["gate.checks.alpha", "`block`, `warn`, `off`"]),
        ("{gate.checks.alpha: 0}", ["gate.checks.alpha"]),
        ("{gate.min_alpha: 1.5}", ["gate.min_alpha"]),
        ("{gate.min_speedup: -1.0}", ["gate.min_speedup"]),
        ("{gate.min_prompts: 1}", ["gate.min_prompts"]),
    ],
)
def test_a_severity_or_bound_that_cannot_be_meant_is_refused(composed, override, words):
    with pytest.raises(ConfigError) as raised:
        composed(f"override: {override}")
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"check": "speed_up"}, ["overrides[0].check", "did you mean `speedup`"]),
        ({"check": "identity"}, ["`identity`", "cannot be overridden"]),
        ({"check": "quarantine"}, ["`quarantine`", "cannot be overridden"]),
        ({"check": "losslessness"}, ["cannot be overridden", "gate.require_losslessness"]),
        ({"who": " "}, ["overrides[0]", "`who` is empty"]),
        ({"why": ""}, ["overrides[0]", "`why` is empty"]),
        ({"until": "next week"}, ["overrides[0]", "next week", "2026-12-31"]),
        ({"until": "2026-02-30"}, ["overrides[0]", "2026-02-30"]),
        ({"until": "20260630"}, ["overrides[0]", "20260630"]),
        ({"until": None}, ["overrides[0].until"]),
        ({"unitl": "2026-06-30"}, ["overrides[0].unitl", "did you mean `until`"]),
    ],
)
def test_an_override_that_nobody_answers_for_is_refused(composed, change, words):
    entry = {"check": "speedup", "who": "Ann", "why": "launch", "until": "2026-06-30"} | change
    with pytest.raises(ConfigError) as raised:
        composed(yaml.safe_dump({"override": {"gate": {"overrides": [entry]}}}))
    for word in words:
        assert word in str(raised.value)


def test_an_override_without_an_end_is_refused(composed):
    with pytest.raises(ConfigError, match=r"overrides\[0\]\.until"):
        composed("override: {gate.overrides: [{check: alpha, who: Ann, why: launch}]}")


def test_what_always_blocks_cannot_be_overridden_either():
    assert ALWAYS_BLOCK.keys() < NOT_OVERRIDABLE.keys() < DEFAULT_SEVERITIES.keys()


def test_settings_without_checks_and_overrides_have_the_defaults():
    gate = GateConfig(**CONFIG)
    assert {name: gate.severity(name) for name in DEFAULT_SEVERITIES} == dict(DEFAULT_SEVERITIES)


def record(pair, *, maths):
    """200 prompts in two domains; alpha of maths as told, all others the same everywhere."""
    prompts = [
        {
            "prompt_id": f"prompt-{index}",
            "domain": "maths" if index % 4 == 0 else "chat",
            "alpha": {"0.0": maths if index % 4 == 0 else 0.4 + 0.001 * (index % 7)},
        }
        for index in range(200)
    ]
    return {"draft_digest": f"draft of {pair}", "pair_digest": pair, "prompts": prompts}


@pytest.mark.parametrize(
    ("critical", "verdict", "words"),
    [
        ("[]", "promote", "blocking checks"),
        ("[chat]", "promote", "blocking checks"),
        ("[chat, maths]", "block", "maths (critical) changed by -0.060"),
        ("[meths]", "block", "meths (critical) has no eval prompt"),
    ],
)
def test_a_critical_domain_blocks_from_the_configuration_to_the_decision(
    composed, critical, verdict, words
):
    reports = good_reports()
    gate, drift = composed(f"override: {{drift: {{critical_domains: {critical}}}}}")
    champion = Recorded(
        {"version": "1", "pair_digest": "p0", "draft_digest": "draft of p0", "target_digest": "t1"},
        record("p0", maths=0.46),
    )
    reports["drift"] = drift_report(
        record(PAIR, maths=0.40), Records("t1", champion=champion), config=drift, seed=0
    )
    decision = decide(
        GateEvidence(**reports), config=gate, today=TODAY, critical_domains=drift.critical_domains
    )
    assert reports["drift"]["by_domain"]["maths"]["flag"]
    assert check_of(decision, "non_inferiority")["verdict"] == "pass"
    assert decision["verdict"] == verdict
    assert words in decision["reasons"][0]
