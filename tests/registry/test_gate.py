from __future__ import annotations

import copy
import json

import pytest

from draftsmith.errors import EvidenceError
from draftsmith.registry.gate_settings import DEFAULT_SEVERITIES
from tests.registry.gate_reports import (
    DRAFT,
    PAIR,
    check_of,
    comparison,
    domain,
    estimate,
    failing,
    good_reports,
    judged,
    set_at,
)

LOSSLESS = "evaluation/recipes/small/losslessness"
SPEED = "benchmark/recipes/small/speedup"
RATIOS = "benchmark/recipes/small/ratios"

BLOCKING = [
    ("losslessness", {f"{LOSSLESS}/holds": False}),
    ("losslessness", {f"{LOSSLESS}/fp32/holds": False}),
    ("losslessness", {f"{LOSSLESS}/bf16/holds": False}),
    ("losslessness", {f"{LOSSLESS}/control/detected": False}),
    ("losslessness", {f"{LOSSLESS}/fp32": None}),
    ("losslessness", {f"{LOSSLESS}/fp32/num_prompts": 0}),
    ("identity", {"evaluation/recipes/small/pair_digest": "e" * 64}),
    ("identity", {"benchmark/recipes/small/pair_digest": "e" * 64}),
    ("identity", {"drift/pair_digest": "e" * 64}),
    ("identity", {"target/digest": "e" * 64}),
    ("identity", {"evaluation/target_digest": "e" * 64}),
    ("identity", {"benchmark/target_digest": "e" * 64}),
    ("alpha", {"evaluation/recipes/small/alpha/0.0/low": 0.29}),
    ("alpha", {"evaluation/recipes/small/alpha/0.0/num_prompts": 1}),
    ("speedup", {f"{SPEED}/low": 1.0}),
    ("speedup", {f"{SPEED}/low": 0.8}),
    ("speedup", {f"{SPEED}/num_prompts": 1}),
    ("speedup", {f"{SPEED}/low": float("nan")}),
    ("alpha", {"evaluation/recipes/small/alpha/0.0/low": float("nan")}),
    ("non_inferiority", {"drift/pooled": comparison(0.0, float("nan"), 0.0)}),
    ("drift", {"drift/live_drift": True, "drift/verdict": "drifted"}),
    (
        "drift",
        {
            "drift/reference/kind": "own_record",
            "drift/pooled": comparison(-0.05, -0.06, -0.04),
            "drift/verdict": "drifted",
        },
    ),
    (
        "non_inferiority",
        {"drift/pooled": comparison(-0.01, -0.021, 0.0), "drift/verdict": "drifted"},
    ),
    (
        "non_inferiority",
        {
            "drift/reference/kind": "predecessor",
            "drift/pooled": comparison(-0.01, -0.02, 0.0),
            "drift/verdict": "drifted",
        },
    ),
    ("non_inferiority", {"drift/pooled": None, "drift/verdict": "unknown"}),
    (
        "incumbent_test",
        {"incumbent/incumbent/draft_digest": DRAFT, "incumbent/verdict": "drifted"},
    ),
]


@pytest.fixture
def reports():
    return good_reports()


def test_a_good_pair_is_promoted(reports):
    decision = judged(reports)
    assert (decision["verdict"], failing(decision)) == ("promote", [])
    assert (decision["name"], decision["version"], decision["pair_digest"]) == ("demo", "2", PAIR)
    assert len(decision["reasons"]) == 1
    assert [check["name"] for check in decision["checks"]] == list(DEFAULT_SEVERITIES)


@pytest.mark.parametrize(("name", "changes"), BLOCKING)
def test_each_check_alone_blocks_and_its_detail_is_the_reason(reports, name, changes):
    for path, value in changes.items():
        set_at(reports, path, value)
    decision = judged(reports)
    assert decision["verdict"] == "block"
    assert failing(decision) == [name]
    assert decision["reasons"] == [check_of(decision, name)["detail"]]
    assert check_of(decision, name)["remedy"]


def test_the_device_check_alone_blocks_and_accepts_kind_name_and_any(reports):
    assert failing(judged(reports, device="cuda")) == ["device"]
    for device in ("any", "cpu", "some processor"):
        assert judged(reports, device=device)["verdict"] == "promote"


def test_a_reason_holds_the_measured_value_the_requirement_and_the_shortfall(reports):
    set_at(reports, f"{SPEED}/low", 0.934)
    (reason,) = judged(reports)["reasons"]
    for figure in ("1.300", "0.934", "1.000", "0.066"):
        assert figure in reason
    set_at(reports, f"{SPEED}/low", 1.2)
    reports["drift"] |= {"pooled": comparison(-0.03, -0.045, -0.015), "verdict": "drifted"}
    (reason,) = judged(reports)["reasons"]
    for figure in ("-0.030", "-0.045", "-0.020", "0.025"):
        assert figure in reason


def test_the_alpha_bound_is_met_at_equality_and_the_speedup_bound_is_not(reports):
    set_at(reports, "evaluation/recipes/small/alpha/0.0/low", 0.3)
    assert judged(reports)["verdict"] == "promote"
    assert failing(judged(reports, min_speedup=1.2)) == ["speedup"]
    assert judged(reports, min_speedup=1.1999)["verdict"] == "promote"


def test_several_failures_all_give_their_reason(reports):
    set_at(reports, f"{SPEED}/low", 0.5)
    set_at(reports, "evaluation/recipes/small/alpha/0.0/low", 0.1)
    set_at(reports, f"{LOSSLESS}/holds", False)
    decision = judged(reports)
    assert failing(decision) == ["losslessness", "alpha", "speedup"]
    assert len(decision["reasons"]) == 3


def test_warnings_do_not_block(reports):
    ratios = reports["benchmark"]["recipes"]["small"]["ratios"]
    ratios["engine_vs_generate"] = estimate(0.9, 0.89, 0.91)
    ratios["speculative_vs_generate"] = estimate(1.0, 0.95, 1.05)
    reports["incumbent"]["verdict"] = "drifted"
    reports["drift"]["by_domain"]["maths"] = domain(-0.05, True)
    set_at(reports, f"{LOSSLESS}/holds", False)
    decision = judged(reports, require_losslessness=False)
    assert decision["verdict"] == "promote"
    assert set(failing(decision)) == {
        "losslessness",
        "incumbent_test",
        "domains",
        "better_than_generate",
        "engine_ratio",
    }


def test_a_draft_that_drifted_from_its_use_elsewhere_does_not_block_a_pair_that_returns(reports):
    reports["incumbent"] |= {"verdict": "drifted"}
    reports["incumbent"]["incumbent"]["draft_digest"] = DRAFT
    assert failing(judged(reports)) == ["incumbent_test"]
    reports["drift"]["reference"] = {"kind": "own_record", "pair_digest": PAIR, "version": "2"}
    assert judged(reports)["verdict"] == "promote"
    assert check_of(judged(reports), "incumbent_test")["severity"] == "warn"


def test_a_draft_that_is_not_surely_faster_than_prompt_lookup_is_warned_of(reports):
    ratios = reports["benchmark"]["recipes"]["small"]["ratios"]
    for low, verdict in ((0.95, "fail"), (1.05, "pass")):
        ratios["speculative_vs_prompt_lookup"] = estimate(1.1, low, 1.25, 16)
        decision = judged(reports)
        assert decision["verdict"] == "promote"
        assert check_of(decision, "better_than_prompt_lookup")["verdict"] == verdict


def test_a_fallen_domain_blocks_only_when_it_is_critical(reports):
    reports["drift"]["by_domain"]["maths"] = domain(-0.05, True)
    assert judged(reports, critical_domains=("chat",))["verdict"] == "promote"
    decision = judged(reports, critical_domains=("maths",))
    assert (decision["verdict"], failing(decision)) == ("block", ["domains"])
    assert "maths (critical) changed by -0.050" in decision["reasons"][0]


@pytest.mark.parametrize("is_compared", [True, False])
def test_a_critical_domain_that_has_no_prompt_blocks_and_those_that_have_are_named(
    reports, is_compared
):
    if not is_compared:
        reports["drift"] |= {"pooled": None, "by_domain": {}, "verdict": "no_reference"}
        reports["drift"]["reference"] = {"kind": "none", "pair_digest": None, "version": None}
    assert judged(reports, critical_domains=("maths",))["verdict"] == "promote"
    decision = judged(reports, critical_domains=("maths", "meths"))
    assert (decision["verdict"], failing(decision)) == ("block", ["domains"])
    assert "meths (critical) has no eval prompt" in decision["reasons"][0]
    assert "chat, maths" in decision["reasons"][0]
    assert "drift.critical_domains" in check_of(decision, "domains")["remedy"]


def test_the_configuration_decides_the_severity(reports):
    failures = {
        "alpha": ("evaluation/recipes/small/alpha/0.0/low", 0.1),
        "speedup": (f"{SPEED}/low", 0.8),
        "drift": ("drift/live_drift", True),
        "non_inferiority": ("drift/pooled", comparison(-0.1, -0.2, 0.0)),
        "domains": ("drift/by_domain/maths", domain(-0.05, True)),
        "better_than_generate": (f"{RATIOS}/speculative_vs_generate", estimate(0.9, 0.8, 1.0)),
        "better_than_prompt_lookup": (
            f"{RATIOS}/speculative_vs_prompt_lookup",
            estimate(0.9, 0.8, 1.0),
        ),
        "engine_ratio": (f"{RATIOS}/engine_vs_generate", estimate(0.9, 0.8, 1.0)),
    }
    for name, (path, value) in failures.items():
        changed = copy.deepcopy(reports)
        set_at(changed, path, value)
        blocked = judged(changed, checks={name: "block"})
        assert blocked["reasons"] == [check_of(blocked, name)["detail"]]
        warned = judged(changed, checks={name: "warn"})
        assert (warned["verdict"], failing(warned)) == ("promote", [name])
        assert check_of(warned, name)["severity"] == "warn"
        for off in ("off", False):
            decision = judged(changed, checks={name: off})
            assert (decision["verdict"], failing(decision)) == ("promote", [])
            assert check_of(decision, name)["severity"] == "off"
            assert "gate.checks" in check_of(decision, name)["detail"]


def test_the_incumbent_test_never_blocks_more_than_it_is_configured_to(reports):
    reports["incumbent"] |= {"verdict": "drifted"}
    reports["incumbent"]["incumbent"]["draft_digest"] = DRAFT
    assert judged(reports)["verdict"] == "block"
    assert judged(reports, checks={"incumbent_test": "warn"})["verdict"] == "promote"


def test_a_check_that_is_off_needs_no_evidence(reports):
    settings = {"alpha_temperature": 1.0, "checks": {"alpha": "off"}}
    assert judged(reports, **settings)["verdict"] == "promote"


def test_a_critical_domain_is_judged_even_where_the_check_of_domains_is_off(reports):
    reports["drift"]["by_domain"]["maths"] = domain(-0.05, True)
    off = {"checks": {"domains": "off"}}
    assert judged(reports, **off)["verdict"] == "promote"
    assert judged(reports, critical_domains=("maths",), **off)["verdict"] == "block"


def test_a_ratio_that_blocks_must_have_been_measured(reports):
    decision = judged(reports, checks={"better_than_prompt_lookup": "block"})
    assert (decision["verdict"], failing(decision)) == ("block", ["better_than_prompt_lookup"])
    set_at(reports, f"{RATIOS}/speculative_vs_prompt_lookup", estimate(1.2, float("nan"), 1.3))
    assert judged(reports, checks={"better_than_prompt_lookup": "block"})["verdict"] == "block"


def test_without_champion_and_incumbent_their_checks_are_skipped(reports):
    reports["incumbent"] = None
    reports["drift"] |= {
        "verdict": "no_reference",
        "reference": {"kind": "none", "pair_digest": None, "version": None},
        "pooled": None,
        "by_domain": {},
    }
    decision = judged(reports)
    assert decision["verdict"] == "promote"
    for name in ("drift", "non_inferiority", "domains", "incumbent_test"):
        assert check_of(decision, name)["verdict"] == "skip"


def test_an_impossible_comparison_blocks_unless_the_configuration_waives_it(reports):
    reports["drift"] |= {"verdict": "unknown", "reasons": ["No prompt in common."], "pooled": None}
    reports["drift"]["by_domain"] = {}
    assert failing(judged(reports)) == ["non_inferiority"]
    assert judged(reports, require_comparison=False)["verdict"] == "promote"
    reports["drift"]["reference"]["kind"] = "own_record"
    assert failing(judged(reports)) == ["drift"]


def test_a_report_without_the_registered_recipe_is_an_error(reports):
    for name in ("evaluation", "benchmark"):
        broken = copy.deepcopy(reports)
        broken[name]["recipes"] = {"other": broken[name]["recipes"]["small"]}
        with pytest.raises(EvidenceError, match=f"reports/{name}.json.*recipes other.*small"):
            judged(broken)


def test_a_missing_temperature_is_an_error_that_lists_the_measured_ones(reports):
    with pytest.raises(EvidenceError, match=r"0\.0, 0\.7"):
        judged(reports, alpha_temperature=1.0)


def test_a_ratio_that_was_not_measured_is_skipped(reports):
    reports["benchmark"]["recipes"]["small"]["ratios"] = {}
    decision = judged(reports)
    assert check_of(decision, "engine_ratio")["verdict"] == "skip"
    assert decision["verdict"] == "promote"


def test_the_decision_is_plain_json_and_depends_on_the_reports_alone(reports):
    before = copy.deepcopy(reports)
    first, second = judged(reports), judged(reports)
    assert reports == before
    assert json.dumps(first, allow_nan=False) == json.dumps(second)


def advised(verdict, *, device=None, context=64, error_bar=0.1):
    entry = {"batch_size": 1, "context": context, "new_tokens": 64, "temperature": 0.0}
    other = entry | {"batch_size": 16, "verdict": "do not speculate"}
    device = device or {"kind": "cpu", "name": "Some Processor"}
    told = {"device": device, "prediction": {"error_bar": error_bar}}
    return told | {"workloads": [entry | {"verdict": verdict}, other]}


@pytest.mark.parametrize(
    ("verdict", "judged_as"),
    [
        ("speculate", "pass"),
        ("about even", "pass"),
        ("do not speculate", "fail"),
        ("copies alone", "fail"),
        ("quantise instead", "fail"),
    ],
)
def test_advice_against_the_draft_at_batch_1_is_a_warning(reports, verdict, judged_as):
    decision = judged(reports | {"advice": advised(verdict)})
    check = check_of(decision, "advice")
    assert (check["verdict"], check["severity"]) == (judged_as, "warn")
    assert check["measured"] == verdict
    assert bool(check["remedy"]) == (judged_as == "fail")
    assert decision["verdict"] == "promote"


def test_advice_blocks_where_the_configuration_says_so(reports):
    against = reports | {"advice": advised("do not speculate")}
    decision = judged(against, checks={"advice": "block"})
    assert (decision["verdict"], failing(decision)) == ("block", ["advice"])
    assert judged(reports, checks={"advice": "block"})["verdict"] == "promote"


def test_advice_of_another_device_says_nothing(reports):
    elsewhere = {"kind": "cpu", "name": "Another Processor"}
    reports["advice"] = advised("do not speculate", device=elsewhere)
    assert check_of(judged(reports), "advice")["verdict"] == "skip"
    assert check_of(judged(reports | {"advice": None}), "advice")["verdict"] == "skip"


def test_advice_that_nobody_checked_says_nothing(reports):
    reports["advice"] = advised("do not speculate", error_bar=None)
    assert check_of(judged(reports), "advice")["verdict"] == "skip"
