from __future__ import annotations

import copy
import json

import pytest

from draftsmith.errors import ConfigError, EvidenceError
from draftsmith.registry.gate import GateConfig, GateEvidence, decide
from draftsmith.registry.pair import pair_digest

TARGET, DRAFT = "a" * 64, "b" * 64
PAIR = pair_digest(TARGET, DRAFT)


def estimate(mean, low, high, num_prompts=200):
    return {"mean": mean, "low": low, "high": high, "num_prompts": num_prompts}


def comparison(change, low, high):
    return {
        "proposed": 0.4 + change,
        "reference": 0.4,
        "change": change,
        "low": low,
        "high": high,
        "effect_size": 0.1,
        "num_prompts": 200,
    }


def domain(change, flag):
    return comparison(change, change - 0.01, change + 0.01) | {"p_adjusted": 0.01, "flag": flag}


@pytest.fixture
def reports():
    """Reports of a pair that is better than its champion in every respect."""
    evaluated = {
        "recipe": "small",
        "draft_digest": DRAFT,
        "pair_digest": PAIR,
        "alpha": {"0.0": estimate(0.4, 0.38, 0.42), "0.7": estimate(0.45, 0.43, 0.47)},
        "losslessness": {
            "holds": True,
            "fp32": {"num_prompts": 8, "num_identical": 8, "num_tokens": 512, "holds": True},
            "bf16": {"num_prompts": 8, "num_identical": 7, "holds": True},
            "control": {"detected": True, "num_identical": 0, "num_prompts": 8},
        },
    }
    benchmarked = {
        "recipe": "small",
        "draft_digest": DRAFT,
        "pair_digest": PAIR,
        "speedup": estimate(1.3, 1.2, 1.4, 20),
        "ratios": {
            "engine_vs_generate": estimate(1.0, 0.99, 1.01, 20),
            "speculative_vs_generate": estimate(1.3, 1.2, 1.4, 20),
        },
    }
    return {
        "registration": {"name": "demo", "version": "2", "pair_digest": PAIR, "recipe": "small"},
        "target": {"digest": TARGET},
        "evaluation": {"target_digest": TARGET, "recipes": {"small": evaluated}},
        "benchmark": {
            "target_digest": TARGET,
            "device": {"kind": "cpu", "name": "Some Processor"},
            "recipes": {"small": benchmarked},
        },
        "drift": {
            "verdict": "pass",
            "reasons": ["Compared with the champion it is no worse."],
            "reference": {"kind": "champion", "pair_digest": "c" * 64, "version": "1"},
            "pair_digest": PAIR,
            "margin": 0.02,
            "live_drift": False,
            "pooled": comparison(0.01, 0.0, 0.02),
            "by_domain": {"chat": domain(0.01, False), "maths": domain(0.01, False)},
        },
        "incumbent": {
            "verdict": "matched",
            "reasons": ["It still matches."],
            "pooled": comparison(0.0, -0.01, 0.01),
            "incumbent": {"version": "1", "draft_digest": "d" * 64},
        },
    }


CONFIG = {
    "min_alpha": 0.3,
    "alpha_temperature": 0.0,
    "min_speedup": 1.0,
    "device": "any",
    "require_losslessness": True,
    "min_engine_ratio": 0.97,
}


def judged(reports, *, critical_domains=(), **settings):
    config = GateConfig(**(CONFIG | settings))
    return decide(GateEvidence(**reports), config=config, critical_domains=critical_domains)


def failing(decision):
    return [check["name"] for check in decision["checks"] if check["verdict"] == "fail"]


def check_of(decision, name):
    return next(check for check in decision["checks"] if check["name"] == name)


def set_at(tree, path, value):
    *parents, last = path.split("/")
    for key in parents:
        tree = tree[key]
    tree[last] = value


LOSSLESS = "evaluation/recipes/small/losslessness"
SPEED = "benchmark/recipes/small/speedup"

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


def test_a_good_pair_is_promoted(reports):
    decision = judged(reports)
    assert (decision["verdict"], failing(decision)) == ("promote", [])
    assert (decision["name"], decision["version"], decision["pair_digest"]) == ("demo", "2", PAIR)
    assert len(decision["reasons"]) == 1


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


@pytest.mark.parametrize(
    ("key", "value"), [("min_alpha", 1.5), ("min_speedup", -1.0), ("min_prompts", 1)]
)
def test_bounds_that_cannot_be_meant_are_refused(key, value):
    with pytest.raises(ConfigError, match=f"gate.{key}"):
        GateConfig(**(CONFIG | {key: value}))
