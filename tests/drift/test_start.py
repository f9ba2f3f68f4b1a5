from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from draftsmith.drift.start import StartConfig, start_report
from draftsmith.errors import EvidenceError

AUTO = StartConfig("auto")


@pytest.fixture
def incumbent(make_pair):
    def make(verdict="matched", *, changed=("weights",), recipe="small", settings="", **pair):
        pair = make_pair("7", draft="d7", pair="p7", recipe=recipe, **pair)
        pair["recipe_digest"] = settings or f"settings of {recipe}"
        return {"verdict": verdict, "incumbent": pair, "changed": list(changed)}

    return make


@pytest.fixture
def start(config):
    def run(incumbent, *, known=None, action="auto", recipes=("small",), **options):
        drift = dataclasses.replace(config, on_match=options.pop("on_match", "reuse"))
        return start_report(
            {name: [f"settings of {name}", f"{name} from d3"] for name in recipes},
            known={} if known is None else {"small": {"quarantine": None, "reseed": 1} | known},
            incumbent=incumbent,
            config=StartConfig(action),
            drift=drift,
            **options,
        )["recipes"]

    return run


def test_a_known_pair_wins_over_a_matched_incumbent(start, incumbent, make_pair):
    decision = start(incumbent(), known=make_pair("3", pair="p3"))["small"]
    assert decision["action"] == "known"
    assert (decision["source_pair_digest"], decision["source_version"]) == ("p3", "3")


def test_a_live_drift_tag_rules_a_known_pair_out_and_asks_for_something_new(
    start, incumbent, make_pair
):
    known = make_pair("3", pair="p3", live_drift=True)
    decision = start(incumbent(), known=known | {"reseed": 2})["small"]
    assert (decision["action"], decision["reseed"]) == ("retrain", 2)
    assert "seed" in decision["reason"]


def test_an_imported_draft_with_a_live_drift_tag_cannot_be_trained_anew(start, make_pair):
    known = make_pair("3", pair="p3", live_drift=True) | {"reseed": None}
    decision = start(None, known=known)["small"]
    assert (decision["action"], decision["source_version"]) == ("known", "3")
    assert "import another" in decision["reason"]


def test_a_pair_in_quarantine_is_not_trained_again_only_to_be_blocked(start, make_pair):
    decision = start(None, known=make_pair("3") | {"quarantine": "slow"})["small"]
    assert (decision["action"], decision["source_version"]) == ("known", "3")
    assert "draftsmith release 3" in decision["reason"]
    assert "or change corpus, recipe or distill.seed" in decision["reason"]
    imported = make_pair("3") | {"quarantine": "slow", "reseed": None}
    assert "or import another draft" in start(None, known=imported)["small"]["reason"]


def test_an_imported_draft_starts_no_training(start, incumbent):
    for options in ({"on_match": "warm_start"}, {"action": "warm_start"}):
        decision = start(incumbent(), imported=["small"], **options)["small"]
        assert (decision["action"], decision["source_version"]) == ("reuse", "7")


def test_a_matched_incumbent_is_reused(start, incumbent):
    decision = start(incumbent())["small"]
    assert (decision["action"], decision["source_pair_digest"]) == ("reuse", "p7")


def test_a_matched_incumbent_is_trained_on_where_the_configuration_wants_that(start, incumbent):
    decision = start(incumbent(), on_match="warm_start")["small"]
    source = (decision["source_pair_digest"], decision["source_version"])
    assert (decision["action"], *source) == ("warm_start", "p7", "7")


def test_a_warm_started_incumbent_of_the_same_settings_is_no_other_recipe(start, incumbent):
    for on_match in ("reuse", "warm_start"):
        decision = start(incumbent(settings="small from d3"), on_match=on_match)["small"]
        assert decision["action"] == on_match


@pytest.mark.parametrize("on_match", ["reuse", "warm_start"])
@pytest.mark.parametrize("verdict", ["drifted", "unknown"])
def test_any_other_verdict_retrains(start, incumbent, verdict, on_match):
    decision = start(incumbent(verdict), on_match=on_match)["small"]
    assert (decision["action"], decision["source_pair_digest"]) == ("retrain", None)


def test_an_incumbent_built_differently_or_with_live_drift_is_not_reused(start, incumbent):
    assert start(incumbent(settings="fewer steps"))["small"]["action"] == "retrain"
    assert start(incumbent(recipe="other"))["small"]["action"] == "retrain"
    assert start(incumbent(live_drift=True))["small"]["action"] == "retrain"
    assert start(incumbent(), on_match="retrain")["small"]["action"] == "retrain"


def test_without_an_incumbent_everything_is_trained(start):
    none = {"verdict": "none", "incumbent": None, "changed": []}
    for report in (None, none):
        decisions = start(report, recipes=("small", "large"))
        assert {decision["action"] for decision in decisions.values()} == {"retrain"}


def test_retrain_overrules_known_and_matched(start, incumbent, make_pair):
    known = make_pair("3")
    assert start(incumbent(), known=known, action="retrain")["small"]["action"] == "retrain"


@pytest.mark.parametrize("action", ["reuse", "warm_start"])
def test_a_forced_start_overrules_a_drifted_verdict_and_a_known_pair(
    start, incumbent, make_pair, action
):
    known = make_pair("3")
    decisions = start(incumbent("drifted"), known=known, action=action, recipes=("small", "large"))
    assert (decisions["small"]["action"], decisions["small"]["source_version"]) == (action, "7")
    assert decisions["large"]["action"] == "retrain"


@pytest.mark.parametrize("action", ["reuse", "warm_start"])
def test_a_forced_start_without_a_usable_draft_is_an_error(start, incumbent, action):
    with pytest.raises(EvidenceError, match="no promoted pair"):
        start(None, action=action)
    with pytest.raises(EvidenceError, match="recipe other"):
        start(incumbent(recipe="other"), action=action)
    with pytest.raises(EvidenceError, match="tokenizer"):
        start(incumbent("drifted", changed=["tokenizer"]), action=action)
    with pytest.raises(EvidenceError, match="shape"):
        start(incumbent("drifted", changed=["weights", "shape"]), action=action)


def test_no_reason_holds_a_measured_number_so_that_measuring_again_retrains_nothing(
    start, incumbent, make_pair
):
    knowns = (None, make_pair("3"), make_pair("3", live_drift=True))
    cases = itertools.product(("matched", "drifted", "unknown"), knowns, ("reuse", "warm_start"))
    for verdict, known, on_match in cases:
        decision = start(incumbent(verdict), known=known, on_match=on_match)["small"]
        assert not re.search(r"\d\.\d", decision["reason"])
