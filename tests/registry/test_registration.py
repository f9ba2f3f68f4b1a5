"""What the register stage puts into the registry."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from draftsmith.artifacts import read_json, write_json, write_text
from draftsmith.errors import EvidenceError
from draftsmith.registry.holders import fetch_holders
from draftsmith.registry.pair import DECISION_TAG
from draftsmith.registry.registration import Proposal, carry_out, register_proposal
from draftsmith.targets.settings import TargetConfig
from pipeline import drift, promote
from tests.registry.gate_reports import good_reports
from tests.registry.measurements import measurement
from tests.registry.small_pairs import digest, make_record

RECORDS = {"small": make_record("t1", "d1"), "other": make_record("t1", "d2", recipe="other")}
PACKAGES = {"draftsmith": "0.1.0", "torch": "2.13.0"}


def evaluated(record):
    entry = copy.deepcopy(good_reports()["evaluation"]["recipes"]["small"])
    entry["tau"] = {"0.0": {"mean": 1.5}}
    return entry | {"pair_digest": record.digest, "draft_digest": record.draft.digest}


@pytest.fixture
def proposal(root):
    """Two recipes of one target; `small` is the faster one."""
    benchmark = measurement(RECORDS["small"], speedup=1.5)
    benchmark["recipes"] |= measurement(RECORDS["other"], speedup=1.2)["recipes"]
    benchmark["provenance"]["packages"] = PACKAGES
    for name, record in RECORDS.items():
        folder = root / "drafts" / name
        write_json(folder / "draft.json", vars(record.draft))
    return Proposal(
        target=RECORDS["small"].target,
        evaluation={
            "corpus_digest": digest("c1"),
            "recipes": {name: evaluated(record) for name, record in RECORDS.items()},
        },
        benchmark=benchmark,
        drift={"verdict": "pass"},
        drafts=root / "drafts",
        plots=root / "plots",
        source=TargetConfig("t1", "target", None, dtype="float32", snapshot="copy"),
        quarantined={},
    )


def registered(store, proposal, root):
    return register_proposal(store, proposal, root=root, staging=root / "staging")


def test_the_fastest_recipe_is_registered_once_and_the_others_are_told_why(root, store, proposal):
    report = registered(store, proposal, root)
    assert (report["recipe"], list(report["losers"])) == ("small", ["other"])
    assert store.challenger().pair_digest == RECORDS["small"].digest
    assert registered(store, proposal, root) == report
    assert len(store.versions()) == 1


def test_a_recipe_whose_pair_is_in_quarantine_is_passed_over_and_told_so(root, store, proposal):
    first = registered(store, proposal, root)["version"]
    store.quarantine(first, "slow")
    held = fetch_holders(store, root / "pairs")
    proposal = dataclasses.replace(proposal, quarantined=held["quarantined"])
    report = registered(store, proposal, root)
    assert (report["recipe"], report["pair_digest"]) == ("other", RECORDS["other"].digest)
    assert report["losers"] == {"small": f"its pair is in quarantine, as version {first}"}
    assert report["quarantine"] is None
    assert store.challenger().pair_digest == RECORDS["other"].digest


def test_stage_drift_judges_the_pair_that_is_registered(root, store, proposal, monkeypatch):
    monkeypatch.chdir(root)
    store.quarantine(registered(store, proposal, root)["version"], "slow")
    held, target = fetch_holders(store, root / "pairs"), RECORDS["small"].target_digest
    settings = {"margin": 0.02, "confidence": 0.95, "temperature": 0.0, "min_prompts": 2}
    files = {
        "build/config.yaml": {"drift": settings | {"on_match": "reuse"}},
        "build/champion.json": held,
        "build/incumbent.json": {"incumbent": None},
        "build/start.json": {"recipes": dict.fromkeys(RECORDS, {"action": "retrain"})},
        "reports/evaluation.json": proposal.evaluation | {"target_digest": target},
        "reports/benchmark.json": proposal.benchmark,
    }
    for name, content in files.items():
        write_json(root / name, content)
    drift.main()
    judged = read_json(root / "reports/drift.json")["pair_digest"]
    proposal = dataclasses.replace(proposal, quarantined=held["quarantined"])
    assert judged == registered(store, proposal, root)["pair_digest"] == RECORDS["other"].digest


def test_a_recipe_that_changes_the_targets_output_is_passed_over(root, store, proposal):
    proposal.evaluation["recipes"]["small"]["losslessness"]["holds"] = False
    report = registered(store, proposal, root)
    assert (report["recipe"], list(report["losers"])) == ("other", ["small"])
    proposal.evaluation["recipes"]["other"]["losslessness"]["holds"] = False
    assert registered(store, proposal, root)["recipe"] == "small"  # and the gate blocks it


def test_the_evidence_says_on_what_and_with_which_packages_it_was_measured(root, store, proposal):
    version = registered(store, proposal, root)["version"]
    folder = store.fetch(store.resolve(version).pair, root / "fetched")
    held = read_json(folder / "evidence/benchmark.json")
    assert held["device"]["name"] == "NVIDIA H100"
    assert held["provenance"]["packages"] == PACKAGES
    assert held["pair_digest"] == RECORDS["small"].digest


def test_reports_of_another_draft_are_refused_before_anything_is_registered(root, store, proposal):
    proposal.benchmark["recipes"]["small"]["pair_digest"] = RECORDS["other"].digest
    with pytest.raises(EvidenceError, match="dvc repro benchmark"):
        registered(store, proposal, root)
    assert store.versions() == []


@pytest.fixture
def decision(root, store, proposal):
    version = registered(store, proposal, root)["version"]
    return {
        "verdict": "promote",
        "name": "demo",
        "version": version,
        "pair_digest": RECORDS["small"].digest,
        "champion": None,
        "checks": [],
        "reasons": ["All checks passed."],
    }


def test_a_decision_is_carried_out_once(store, decision):
    first = carry_out(store, decision, is_experiment=False)
    assert (first["promoted"], store.champion().version) == (True, decision["version"])
    assert carry_out(store, decision, is_experiment=False) == first
    assert len(store.history()) == 1


def test_an_experiment_promotes_nothing(store, decision):
    report = carry_out(store, decision, is_experiment=True)
    assert (report["promoted"], store.champion()) == (False, None)


@pytest.fixture
def stage(root, decision, monkeypatch):
    """Runs stage promote in the project with a decision."""
    monkeypatch.chdir(root)
    monkeypatch.setattr(promote, "ROOT", root)
    settings = {"name": "demo", "experiment": "draftsmith", "include_target": False}
    write_json(root / "build" / "config.yaml", {"registry": settings})
    for page in ("report.html", "report.md"):
        write_text(root / "reports" / page, "blocked")

    def run(**changes):
        write_json(root / "reports" / "decision.json", decision | changes)
        return promote.main()

    return run


def test_what_an_experiment_decides_is_nothing_that_a_promotion_may_rest_on(
    store, decision, stage, monkeypatch
):
    """Its gate may be looser than the project's, and its pair the very champion."""
    monkeypatch.setenv("DVC_EXP_NAME", "loose-gate")
    assert stage() == 0
    assert DECISION_TAG not in store.resolve(decision["version"]).tags
    monkeypatch.delenv("DVC_EXP_NAME")
    assert stage(verdict="block", reasons=["Alpha: it falls short."]) == promote.EXIT_BLOCKED
    recorded = store.resolve(decision["version"]).tags[DECISION_TAG]
    assert "falls short" in recorded
    monkeypatch.setenv("DVC_EXP_NAME", "loose-gate")
    assert stage() == 0
    assert store.resolve(decision["version"]).tags[DECISION_TAG] == recorded
    assert store.champion() is None


@pytest.mark.parametrize("change", ["champion", "tag", "quarantine"])
def test_what_changed_since_the_gate_decided_blocks(store, decision, register, change):
    match change:
        case "champion":
            store.promote(register("t1", "d9"), ["quicker than we"])
        case "tag":
            store.set_live_drift(decision["version"], "alarm")
        case "quarantine":
            store.quarantine(decision["version"], "slow")
    before = store.champion()
    report = carry_out(store, decision, is_experiment=False)
    assert not report["promoted"]
    assert f"promoting version {decision['version']}" in report["reasons"][0]
    assert store.champion() == before


def test_a_tag_that_somebody_answers_for_does_not_block(store, decision):
    store.set_live_drift(decision["version"], "alarm")
    checks = [{"name": "drift", "verdict": "overridden"}]
    assert carry_out(store, decision | {"checks": checks}, is_experiment=False)["promoted"]
