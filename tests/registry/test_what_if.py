"""How drafts age over updates of the target, and when a new one has paid for itself."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from draftsmith.artifacts import write_json, write_text
from draftsmith.cli import app
from draftsmith.drift.prediction import predicted_tau
from draftsmith.errors import EvidenceError
from draftsmith.registry.pair import PairVersion, RegisteredPair, pair_digest
from draftsmith.registry.what_if import Aged, Service, aged_drafts, outcome, retention
from tests.registry.small_pairs import SOURCE, TAGS, digest, make_files, make_record

SECTION = "registry:\n  name: demo\n  experiment: draftsmith\n  include_target: false\n"
MEASURED = {
    "draft_length": 2,
    "chain_length": 2,
    "speedup": {"mean": 1.5, "low": 1.4, "high": 1.6},
    "arms": {"gamma_0": {"tokens_per_s": 100.0}},
    "batch": [
        {"batch_size": 1, "draft_length": 2, "speedup": 1.5, "baseline_tokens_per_s": 90.0},
        {"batch_size": 8, "draft_length": 1, "speedup": 1.1, "baseline_tokens_per_s": 400.0},
    ],
}
COPYING = MEASURED | {"lookup_length": 2}
COPIED = {"share": 0.25, "survival": [0.8, 0.5, 0.4]}
SERVICE = Service(tokens_per_day=36e6, price_per_hour=2.0, training_hours=5.0)


def version(number, target, draft, alpha):
    tags = {} if alpha is None else {"alpha": str(alpha), "temperature": "0.0"}
    pair = RegisteredPair(
        "demo", str(number), f"{target}{draft}", target, draft, "small", "r", "c", live_drift=False
    )
    return PairVersion(pair, (), tags, "2026-01-01", None)


def ages(versions, incumbent=None, target=None):
    found = aged_drafts(versions, incumbent or {}, target)
    return {(draft.draft_digest, draft.updates): draft.alpha for draft in found}


def test_a_draft_that_later_targets_took_over_ages_by_their_number():
    versions = [
        version(1, "t1", "d1", 0.5),
        version(2, "t2", "d1", 0.45),
        version(3, "t3", "d2", 0.6),
        version(4, "t3", "d1", 0.4),
    ]
    assert ages(versions) == {
        ("d1", 0): 0.5,
        ("d1", 1): 0.45,
        ("d2", 0): 0.6,
        ("d1", 2): 0.4,
    }


def test_the_incumbent_test_tells_of_the_current_target_too():
    incumbent = {
        "incumbent": {"draft_digest": "d1"},
        "record": {"pair_digest": pair_digest("t2", "d1")},
        "by_temperature": {"0.0": {"proposed": 0.3}, "0.7": {"proposed": 0.2}},
    }
    versions = [version(1, "t1", "d1", 0.5)]
    assert ages(versions, incumbent, "t2") == {("d1", 0): 0.5, ("d1", 1): 0.3}
    for nothing in ({"incumbent": None}, {"record": None}, {"by_temperature": {"0.7": {}}}):
        assert ages(versions, incumbent | nothing, "t2") == {("d1", 0): 0.5}
    assert ages(versions, incumbent, "t3") == {("d1", 0): 0.5}, "it is of another target"
    registered = [*versions, version(2, "t2", "d2", 0.6)]
    assert ages(registered, incumbent, "t2")[("d1", 1)] == 0.3


def test_a_target_that_came_back_and_a_version_without_figures_tell_nothing():
    versions = [
        version(1, "t1", "d1", 0.5),
        version(2, "t2", "d2", 0.6),
        version(3, "t1", "d2", 0.2),
        version(4, "t2", "d1", None),
    ]
    assert ages(versions) == {("d1", 0): 0.5, ("d2", 0): 0.6}


def test_an_update_keeps_the_share_of_alpha_that_updates_kept():
    drafts = [Aged("d1", 0, 0.8), Aged("d1", 1, 0.4), Aged("d2", 0, 0.8), Aged("d2", 3, 0.1)]
    assert retention(drafts) == pytest.approx(0.5)
    assert retention(drafts[:1]) is None
    assert retention([Aged("d1", 0, 0.5), Aged("d1", 1, 0.0)]) < 1e-4


def test_a_new_draft_has_paid_when_it_saved_its_device_hours():
    found = outcome(MEASURED, SERVICE, fresh=0.5, aged=0.25)
    aged_speedup = 1.5 * predicted_tau(0.25, 2) / predicted_tau(0.5, 2)
    assert found.speedup == pytest.approx((1.5, aged_speedup))
    hours = [36e6 / (100 * 3600 * speedup) for speedup in found.speedup]
    assert found.device_hours_per_day == pytest.approx(tuple(hours))
    assert found.saved_per_day == pytest.approx(2.0 * (hours[1] - hours[0]))
    assert found.cost == 10.0
    assert found.break_even_days == pytest.approx(found.cost / found.saved_per_day)


def test_copies_from_the_text_do_not_age():
    found = outcome(COPYING, SERVICE, fresh=0.5, aged=0.0, copied=COPIED)
    of_copies = 1 + 0.8 + 0.5
    new, old = (0.75 * predicted_tau(alpha, 2) + 0.25 * of_copies for alpha in (0.5, 0.0))
    assert found.speedup == pytest.approx((1.5, 1.5 * old / new))
    only_copies = COPIED | {"share": 1.0}
    kept = outcome(COPYING, SERVICE, fresh=0.5, aged=0.0, copied=only_copies)
    assert kept.saved_per_day == pytest.approx(0.0)
    assert outcome(MEASURED, SERVICE, fresh=0.5, aged=0.0, copied=COPIED) == outcome(
        MEASURED, SERVICE, fresh=0.5, aged=0.0
    ), "it is measured without copies"


def test_it_never_pays_where_the_old_draft_is_as_good():
    assert outcome(MEASURED, SERVICE, fresh=0.5, aged=0.5).break_even_days is None
    slow = dataclasses.replace(SERVICE, batch_size=64)
    assert outcome(MEASURED, slow, fresh=0.5, aged=0.0).speedup == pytest.approx((1.1, 1.0))


def test_half_the_traffic_takes_twice_the_days():
    half = dataclasses.replace(SERVICE, tokens_per_day=SERVICE.tokens_per_day / 2)
    days = [outcome(MEASURED, s, fresh=0.5, aged=0.2).break_even_days for s in (SERVICE, half)]
    assert days[1] == pytest.approx(2 * days[0])


def test_a_record_without_speeds_is_refused():
    with pytest.raises(EvidenceError, match="dvc repro"):
        outcome({"draft_length": 2, "speedup": {"mean": 1.5}}, SERVICE, fresh=0.5, aged=0.2)


@pytest.fixture
def project(root, store, tmp_path):
    """A champion whose draft two targets had."""
    write_text(root / "build" / "config.yaml", SECTION)
    for target, alpha in (("t1", "0.5000"), ("t2", "0.4000")):
        draft_dir, evidence = make_files(tmp_path / "files" / target, "d1")
        write_json(evidence["benchmark.json"], COPYING)
        evidence["evaluation.json"] = draft_dir.parent / "evaluation.json"
        write_json(evidence["evaluation.json"], {"copied": {"0.0": COPIED}})
        found = store.register(
            make_record(target, "d1"),
            draft_dir,
            evidence=evidence,
            tags=TAGS | {"alpha": alpha},
            target_source=SOURCE,
        )
        store.promote(found, ["first"])
    write_json(root / "build" / "target.json", {"digest": digest("t2")})
    return root


def run(root, *arguments):
    given = ["--tokens-per-day", "36e6", "--training-hours", "5", "--price", "2"]
    return CliRunner().invoke(app, ["what-if", *given, *arguments, "--root", str(root)])


def test_the_command_prices_the_champion_by_the_registrys_history(project):
    done = run(project, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["retention"] == pytest.approx(0.8)
    assert found["alpha"] == pytest.approx([0.5, 0.4])
    assert [entry["alpha"] for entry in found["alpha_by_updates"]] == [0.5, 0.4]
    expected = outcome(COPYING, SERVICE, fresh=0.5, aged=0.4, own=0.4, copied=COPIED)
    assert found["break_even_days"] == pytest.approx(expected.break_even_days)
    later = json.loads(run(project, "--updates", "3", "--json").stdout)
    assert later["break_even_days"] < found["break_even_days"]
    shown = run(project).stdout
    assert "alpha after 1 updates, seen" in shown
    assert f"after {expected.break_even_days:.3g} days" in shown


def test_where_no_draft_was_kept_the_command_asks_for_alpha(root, store, register):
    write_text(root / "build" / "config.yaml", SECTION)
    store.promote(register("t1", "d1"), ["first"])
    done = run(root)
    assert done.exit_code == 2
    assert "--alpha" in done.stderr
    without_speeds = run(root, "--alpha", "0.2")
    assert without_speeds.exit_code == 2
    assert "dvc repro" in without_speeds.stderr
