from __future__ import annotations

import json

import pytest

from draftsmith.drift.settings import DriftConfig
from draftsmith.drift.verdict import Records, drift_report
from draftsmith.errors import ConfigError, EvidenceError


def report_of(proposed, config, target_digest="t1", **records):
    records = Records(target_digest, **records)
    return drift_report(proposed, records, config=config, seed=0)


def test_a_first_pair_has_no_reference(config, make_record):
    report = report_of(make_record(), config)
    assert report["verdict"] == "no_reference"
    assert report["reference"] == {"kind": "none", "pair_digest": None, "version": None}


def test_a_new_draft_is_held_against_the_champion(config, make_record, make_recorded):
    champion = make_recorded(0.5, seed=1, version="4", draft="d0", pair="p0")
    worse, equal = (make_record(mean, seed=2, draft="d1", pair="p1") for mean in (0.4, 0.5))
    blocked, passed = (report_of(record, config, champion=champion) for record in (worse, equal))
    assert (blocked["verdict"], passed["verdict"]) == ("drifted", "pass")
    assert blocked["reference"] == {"kind": "champion", "pair_digest": "p0", "version": "4"}
    assert f"{blocked['pooled']['low']:+.3f}" in blocked["reasons"][0]
    json.dumps(blocked, allow_nan=False)


def test_a_reused_draft_is_held_against_its_own_record_not_a_champion_of_another_target(
    config, make_record, make_recorded
):
    incumbent = make_recorded(0.5, seed=1, version="2", draft="d1", pair="p0")
    champion = make_recorded(0.2, seed=3, version="3", draft="d9", pair="p9")
    proposed = make_record(0.4, seed=2, draft="d1", pair="p1")
    report = report_of(proposed, config, "t2", champion=champion, incumbent=incumbent)
    assert report["reference"]["kind"] == "own_record"
    assert report["verdict"] == "drifted"


def test_a_reused_draft_has_to_match_a_champion_of_the_same_target(
    config, make_record, make_recorded
):
    """Version 2 took version 1's draft over; version 3 replaced it, and the recipe goes back."""
    incumbent = make_recorded(0.5, seed=1, version="1", draft="d1", pair="p1", target="t1")
    reused = make_recorded(0.5, seed=2, version="2", draft="d1", pair="p2", target="t2")
    champion = make_recorded(0.6, seed=3, version="3", draft="d3", pair="p3", target="t2")
    records = {"incumbent": incumbent, "history": ("1", "2", "3")}
    for known in (reused, None):  # version 2 as it was registered, or a new reuse of the draft
        report = report_of(reused.record, config, "t2", champion=champion, known=known, **records)
        assert report["reference"] == {"kind": "champion", "pair_digest": "p3", "version": "3"}
        assert report["verdict"] == "drifted"
    # Had it passed and been promoted, the verdict would rest on the same comparison.
    after = report_of(
        reused.record, config, "t2", champion=reused, predecessor=champion, known=reused, **records
    )
    assert after["reference"]["kind"] == "predecessor"
    assert after["pooled"] == report["pooled"]


def test_a_pair_that_returns_is_held_against_its_own_record_not_that_of_its_draft_elsewhere(
    config, make_record, make_recorded
):
    elsewhere = make_recorded(0.6, seed=1, version="2", draft="d1", pair="p2", target="t2")
    known = make_recorded(0.5, seed=2, version="1", draft="d1", pair="p1")
    report = report_of(
        make_record(0.5, seed=2, draft="d1", pair="p1"),
        config,
        champion=elsewhere,
        incumbent=elsewhere,
        known=known,
    )
    assert report["reference"] == {"kind": "own_record", "pair_digest": "p1", "version": "1"}
    assert report["verdict"] == "pass"


def test_a_promotion_does_not_change_the_verdict(config, make_record, make_recorded):
    old = make_recorded(0.5, seed=1, version="1", draft="d0", pair="p0")
    proposed = make_record(0.51, seed=2, draft="d1", pair="p1")
    new = make_recorded(0.51, seed=2, version="2", draft="d1", pair="p1")
    before = report_of(proposed, config, champion=old)
    after = report_of(proposed, config, champion=new, predecessor=old)
    assert after["reference"]["kind"] == "predecessor"
    assert (before["verdict"], before["pooled"]) == (after["verdict"], after["pooled"])


def test_a_champion_that_is_this_pair_and_had_no_predecessor_is_no_reference(
    config, make_record, make_recorded
):
    champion = make_recorded(0.5, draft="d1", pair="p1")
    report = report_of(make_record(draft="d1", pair="p1"), config, champion=champion)
    assert report["verdict"] == "no_reference"


def test_a_live_drift_tag_of_the_same_draft_is_drift_whatever_the_numbers_say(
    config, make_record, make_recorded
):
    proposed = make_record(0.6, seed=2, draft="d1", pair="p1")
    champion = make_recorded(0.5, seed=1, version="7", draft="d7", pair="p7")
    report = report_of(proposed, config, champion=champion, tagged={"d1": "3"})
    assert (report["verdict"], report["live_drift"]) == ("drifted", True)
    assert "Version 3" in report["reasons"][0]
    assert report_of(proposed, config, champion=champion, tagged={"d7": "7"})["verdict"] == "pass"


@pytest.fixture
def returning(make_record, make_recorded):
    """Version 1 of target t1, proposed again, and champion 3, of another target or of its own."""

    def make(*, target, mean=0.5):
        champion = make_recorded(0.6, seed=1, version="3", draft="d3", pair="p3", target=target)
        known = make_recorded(mean, seed=2, version="1", draft="d1", pair="p1", target="t1")
        proposed = make_record(mean, seed=2, draft="d1", pair="p1")
        return proposed, {"champion": champion, "known": known}

    return make


def test_a_pair_that_returns_with_its_target_need_not_beat_the_last_champion(config, returning):
    proposed, pairs = returning(target="t3")
    report = report_of(proposed, config, **pairs, history=("1", "2", "3"))
    assert (report["reference"]["kind"], report["verdict"]) == ("own_record", "pass")


def test_its_promotion_changes_nothing_whatever_its_number(config, make_recorded, returning):
    proposed, pairs = returning(target="t3")
    before = report_of(proposed, config, **pairs, history=("1", "2", "3"))
    after = report_of(
        proposed,
        config,
        champion=pairs["known"],
        predecessor=pairs["champion"],
        known=pairs["known"],
        history=("1", "2", "3", "1"),
    )
    assert before == after
    # The third target returns in its turn: its pair has the higher number.
    late = make_recorded(0.6, seed=1, version="3", draft="d3", pair="p3", target="t3")
    report = report_of(
        late.record,
        config,
        "t3",
        champion=pairs["known"],
        known=late,
        history=("1", "2", "3", "1"),
    )
    assert report["reference"] == {"kind": "own_record", "pair_digest": "p3", "version": "3"}


def test_an_older_recipe_of_the_same_target_has_to_match_the_newer_champion(config, returning):
    proposed, pairs = returning(target="t1")
    report = report_of(proposed, config, **pairs, history=("1", "3"))
    assert (report["reference"]["kind"], report["verdict"]) == ("champion", "drifted")


def test_a_known_pair_that_never_was_champion_does_not_return(config, returning):
    for target in ("t1", "t3"):
        proposed, pairs = returning(target=target)
        report = report_of(proposed, config, **pairs, history=("2", "3"))
        assert (report["reference"]["kind"], report["verdict"]) == ("champion", "drifted")


def test_too_few_common_prompts_are_unknown(config, make_record, make_recorded):
    champion = make_recorded(0.5, draft="d0", pair="p0")
    report = report_of(make_record(0.5, num_prompts=20), config, champion=champion)
    assert report["verdict"] == "unknown"
    strange = make_record(0.5)
    for prompt in strange["prompts"]:
        prompt["prompt_id"] += "-new"
    report = report_of(strange, config, champion=champion)
    assert (report["verdict"], report["pooled"]) == ("unknown", None)


def test_a_champion_that_was_never_measured_at_the_judged_temperature_is_unknown(
    config, make_record, make_recorded
):
    champion = make_recorded(0.5, version="4", draft="d0", pair="p0")
    for prompt in champion.record["prompts"]:
        del prompt["alpha"]["0.0"]
    report = report_of(make_record(0.5), config, champion=champion)
    assert (report["verdict"], report["pooled"]) == ("unknown", None)
    assert "Version 4 was measured at temperature 0.7 and not at 0.0" in report["reasons"][0]
    never = make_record(0.5)
    for prompt in never["prompts"]:
        del prompt["alpha"]["0.0"]
    with pytest.raises(EvidenceError, match="measurements at 0.7"):  # that can be mended
        report_of(never, config, champion=champion)


def test_a_fallen_domain_is_named_with_its_numbers(config, make_record, make_recorded):
    champion = make_recorded(0.5, seed=1, draft="d0", pair="p0")
    proposed = make_record(0.53, seed=2)
    for prompt in proposed["prompts"]:
        if prompt["domain"] == "maths":
            prompt["alpha"]["0.0"] -= 0.15
    report = report_of(proposed, config, champion=champion)
    assert [name for name, entry in report["by_domain"].items() if entry["flag"]] == ["maths"]
    sentence = next(reason for reason in report["reasons"] if "maths" in reason)
    assert f"{-report['by_domain']['maths']['change']:.3f}" in sentence


@pytest.mark.parametrize(
    "wrong", [{"margin": 0.0}, {"margin": 2.0}, {"confidence": 1.0}, {"min_prompts": 1}]
)
def test_settings_under_which_every_verdict_is_meaningless_are_refused(wrong):
    usual = {"margin": 0.02, "confidence": 0.95, "temperature": 0.0, "min_prompts": 50}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DriftConfig(**(usual | wrong), on_match="reuse")
