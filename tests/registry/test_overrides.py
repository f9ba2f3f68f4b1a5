"""Signed-off overrides, from the gate's configuration to its decision."""

from __future__ import annotations

import json
from datetime import date, timedelta

import pytest

from draftsmith.registry.checks import check
from draftsmith.registry.gate_settings import Override
from draftsmith.registry.overrides import applied, as_of
from tests.registry.gate_reports import check_of, failing, good_reports, judged, set_at

LAST_DAY = date(2026, 6, 30)
LOW_ALPHA = ("evaluation/recipes/small/alpha/0.0/low", 0.1)
NO_SPEED = ("benchmark/recipes/small/speedup/low", 0.8)


@pytest.fixture
def reports():
    return good_reports()


def override(name="alpha", *, until=LAST_DAY, who="Ann Lee", why="launch week"):
    return Override(name, who, why, str(until))


def test_a_failure_that_is_signed_off_does_not_block_through_the_last_day(reports):
    set_at(reports, *LOW_ALPHA)
    for today in (LAST_DAY - timedelta(days=90), LAST_DAY):
        decision = judged(reports, overrides=(override(),), today=today)
        found = check_of(decision, "alpha")
        assert (decision["verdict"], found["verdict"]) == ("promote", "overridden")
        assert found["override"] == {"who": "Ann Lee", "why": "launch week", "until": "2026-06-30"}
        assert found["detail"] in decision["reasons"]
        for words in ("0.100", "overridden until 2026-06-30 by Ann Lee: launch week"):
            assert words in found["detail"]
        assert found["remedy"]
        assert decision["valid_until"] == "2026-06-30"


def test_an_expired_override_blocks_again_and_the_reason_says_so(reports):
    set_at(reports, *LOW_ALPHA)
    decision = judged(reports, overrides=(override(),), today=LAST_DAY + timedelta(days=1))
    assert (decision["verdict"], failing(decision)) == ("block", ["alpha"])
    (reason,) = decision["reasons"]
    for words in ("0.100", "the override by Ann Lee (launch week) expired on 2026-06-30"):
        assert words in reason
    assert decision["valid_until"] is None


def test_an_override_covers_its_own_check_only(reports):
    set_at(reports, *LOW_ALPHA)
    set_at(reports, *NO_SPEED)
    decision = judged(reports, overrides=(override(),))
    assert (decision["verdict"], failing(decision)) == ("block", ["speedup"])
    assert check_of(decision, "alpha")["verdict"] == "overridden"


def test_a_check_that_passes_is_not_touched_by_an_override(reports):
    decision = judged(reports, overrides=(override(), override("drift")))
    assert decision["valid_until"] is None
    assert {item["override"] is None for item in decision["checks"]} == {True}
    assert decision["reasons"] == judged(reports)["reasons"]


def test_the_override_that_holds_longest_counts(reports):
    set_at(reports, *LOW_ALPHA)
    renewed = override(until=LAST_DAY + timedelta(days=30), who="Bo")
    for both in ((override(), renewed), (renewed, override())):
        decision = judged(reports, overrides=both, today=LAST_DAY + timedelta(days=1))
        assert check_of(decision, "alpha")["override"]["who"] == "Bo"
        assert decision["verdict"] == "promote"


def test_a_decision_is_valid_until_its_first_override_ends(reports):
    set_at(reports, *LOW_ALPHA)
    set_at(reports, *NO_SPEED)
    both = (override(), override("speedup", until=LAST_DAY - timedelta(days=9)))
    assert judged(reports, overrides=both)["valid_until"] == "2026-06-21"


def test_a_recorded_decision_to_promote_ends_with_its_override(reports):
    set_at(reports, *LOW_ALPHA)
    recorded = judged(reports, overrides=(override(),))
    assert as_of(recorded, LAST_DAY) == recorded
    after = as_of(recorded, LAST_DAY + timedelta(days=1))
    assert after["verdict"] == "block"
    assert "2026-06-30" in after["reasons"][0]
    assert "dvc repro" in after["reasons"][0]


@pytest.mark.parametrize(
    "decision",
    [{}, {"verdict": "block", "reasons": ["slow"]}, {"verdict": "promote", "valid_until": None}],
)
def test_every_other_recorded_decision_stays_as_it_is(decision):
    assert as_of(decision, date(2100, 1, 1)) == decision


def test_a_signed_off_decision_is_plain_json(reports):
    set_at(reports, *LOW_ALPHA)
    decision = judged(reports, overrides=(override(),))
    assert json.loads(json.dumps(decision, allow_nan=False)) == decision


def test_a_signature_over_several_lines_stays_one_sentence():
    failed = check(
        "alpha", severity="block", requirement="x", measured=0.1, failure="low", remedy="mend"
    )
    signed = applied(failed, (override(why="first\nsecond.\n"),), today=LAST_DAY)
    assert signed.detail.endswith("by Ann Lee: first second.")
