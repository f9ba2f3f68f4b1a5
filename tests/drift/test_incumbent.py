from __future__ import annotations

import json

import pytest

from draftsmith.drift.comparison import Comparison
from draftsmith.drift.incumbent import identity_changes, incumbent_report, judge
from draftsmith.drift.prediction import break_even_alpha, predicted_tau
from draftsmith.drift.wording import target_reasons
from draftsmith.errors import EvidenceError


def comparison(change, low, high, num_prompts=200):
    return Comparison(0.5 + change, 0.5, change, low, high, 0.1, num_prompts)


@pytest.mark.parametrize(
    ("change", "low", "high", "num_prompts", "verdict"),
    [
        (0.000, -0.010, 0.010, 200, "matched"),
        (0.050, 0.040, 0.060, 200, "matched"),
        (-0.010, -0.015, -0.005, 200, "matched"),
        (-0.015, -0.025, -0.005, 200, "drifted"),
        (-0.030, -0.080, 0.020, 200, "drifted"),
        (0.000, -0.030, 0.030, 200, "unknown"),
        (-0.300, -0.310, -0.290, 49, "unknown"),
        (0.000, -0.001, 0.001, 49, "unknown"),
    ],
)
def test_the_verdict_follows_interval_margin_and_number(
    config, change, low, high, num_prompts, verdict
):
    assert judge(comparison(change, low, high, num_prompts), config) == verdict


def test_a_draft_that_lost_ten_points_has_drifted_and_the_reason_holds_the_numbers(
    config, make_record, make_recorded
):
    report = incumbent_report(
        make_recorded(0.5, seed=1),
        make_record(0.4, seed=2),
        changed=["weights"],
        config=config,
        seed=0,
    )
    assert report["verdict"] == "drifted"
    for number in ("proposed", "reference"):
        assert f"{report['pooled'][number]:.3f}" in report["reasons"][0]
    assert report["pooled"]["change"] == pytest.approx(-0.1, abs=0.02)
    assert set(report["by_temperature"]) == {"0.0", "0.7"}
    assert report["num_prompts"] == 200
    assert len(report["by_domain"]) == 6
    assert report["by_temperature"]["0.0"]["by_domain"] == report["by_domain"]
    warmer = report["by_temperature"]["0.7"]["by_domain"]
    assert warmer.keys() == report["by_domain"].keys()
    assert warmer != report["by_domain"]
    json.dumps(report, allow_nan=False)


def test_the_same_draft_measured_again_matches(config, make_record, make_recorded):
    report = incumbent_report(
        make_recorded(0.5, seed=1),
        make_record(0.5, seed=2),
        changed=["weights"],
        config=config,
        seed=0,
    )
    assert report["verdict"] == "matched"
    assert report["changed"] == ["weights"]


@pytest.mark.parametrize("component", ["tokenizer", "vocabulary", "shape"])
def test_another_vocabulary_or_width_is_drift_by_definition_without_a_measurement(
    config, make_recorded, component
):
    report = incumbent_report(
        make_recorded(), None, changed=["weights", component], config=config, seed=0
    )
    assert report["verdict"] == "drifted"
    assert report["pooled"] is None
    assert component in report["reasons"][0]


def test_no_incumbent_gives_none_and_a_missing_measurement_unknown(config, make_recorded):
    assert incumbent_report(None, None, changed=[], config=config, seed=0)["verdict"] == "none"
    report = incumbent_report(make_recorded(), None, changed=["weights"], config=config, seed=0)
    assert report["verdict"] == "unknown"


def test_few_or_no_common_prompts_are_unknown_not_a_crash(config, make_record, make_recorded):
    few = incumbent_report(
        make_recorded(0.5), make_record(0.1, num_prompts=20), changed=[], config=config, seed=0
    )
    assert few["verdict"] == "unknown"
    assert "50" in few["reasons"][0]
    strange = make_record(0.5)
    for prompt in strange["prompts"]:
        prompt["prompt_id"] += "-new"
    none = incumbent_report(make_recorded(0.5), strange, changed=[], config=config, seed=0)
    assert none["verdict"] == "unknown"


def test_an_unmeasured_temperature_is_an_error_that_lists_the_measured_ones(
    config, make_record, make_recorded
):
    record = make_record()
    for prompt in record["prompts"]:
        del prompt["alpha"]["0.0"]
    with pytest.raises(EvidenceError, match=r"measurements at 0\.7"):
        incumbent_report(make_recorded(), record, changed=[], config=config, seed=0)


def test_an_old_record_without_the_judged_temperature_is_unknown_and_says_so(
    config, make_record, make_recorded
):
    """drift.temperature was another one when the pair was promoted; nobody can measure it again."""
    incumbent = make_recorded(0.5, seed=1)
    for prompt in incumbent.record["prompts"]:
        del prompt["alpha"]["0.0"]
    measured = make_record(0.5, seed=2)
    report = incumbent_report(incumbent, measured, changed=["weights"], config=config, seed=0)
    assert (report["verdict"], report["pooled"]) == ("unknown", None)
    assert "Version 1 was measured at temperature 0.7 and not at 0.0" in report["reasons"][0]
    assert "What changed in the target: weights." in report["reasons"]
    assert report["record"] == measured
    json.dumps(report, allow_nan=False)


def test_identity_changes_name_exactly_the_components_that_differ():
    old = {
        "weights_digest": "a",
        "config_digest": "b",
        "tokenizer_digest": "c",
        "chat_template_digest": None,
        "generation_config_digest": "d",
        "dtype": "bfloat16",
        "vocab_size": 100,
        "digest": "x",
    }
    new = old | {"weights_digest": "z", "chat_template_digest": "t", "digest": "y"}
    assert identity_changes(old, new) == ["weights", "chat_template"]
    assert identity_changes(old, old | {"digest": "y"}) == []


BENCHMARK = {
    "draft_length": 2,
    "temperature": 0.0,
    "cost": {"target_step_ms": 50.0, "draft_step_ms": 5.0, "verify_ms": {"1": 50.0, "3": 55.0}},
    "device": {"name": "A CPU", "torch": "2.12.0", "transformers": "5.20.0"},
}


@pytest.fixture
def report_of(config, make_record, make_recorded):
    def make(*, changed=("weights",), benchmark=BENCHMARK, packages=None, rename=0, **pair):
        measured = make_record(0.45, seed=2)
        measured["packages"] = packages or {}
        for prompt in measured["prompts"][:rename]:
            prompt["prompt_id"] += "-new"
        incumbent = make_recorded(0.5, seed=1, benchmark=benchmark, **pair)
        return incumbent_report(incumbent, measured, changed=changed, config=config, seed=0)

    return make


def test_tau_and_speedup_are_predicted_from_alpha_and_say_so(report_of):
    report = report_of()
    predicted, pooled = report["predicted"], report["pooled"]
    assert predicted["tau"]["reference"] == pytest.approx(1 + pooled["reference"] + 0.27, abs=0.02)
    round_cost = (2 * 5.0 + 55.0) / 50.0
    for key in ("proposed", "reference", "change", "low", "high"):
        assert predicted["speedup"][key] == pytest.approx(predicted["tau"][key] / round_cost)
    assert predicted["tau"]["high"] < 0
    (sentence,) = [reason for reason in report["reasons"] if reason.startswith("Predicted")]
    assert f"{predicted['tau']['proposed']:.3f}" in sentence
    assert f"{predicted['speedup']['proposed']:.2f}" in sentence
    assert "A CPU" in sentence
    json.dumps(report, allow_nan=False)


def test_tau_and_speedup_are_predicted_by_domain_and_temperature(report_of):
    report = report_of()
    assert report["by_temperature"]["0.0"]["predicted"] == report["predicted"]
    for key, entry in report["by_temperature"].items():
        parts = entry["predicted"]["by_domain"]
        assert parts.keys() == entry["by_domain"].keys()
        sizes = [part["tau"]["num_prompts"] for part in parts.values()]
        assert sum(sizes) == entry["predicted"]["tau"]["num_prompts"]
        for domain, part in parts.items():
            # Fewer accepted, fewer tokens: the sign is that of the measured change of alpha.
            assert part["tau"]["change"] * entry["by_domain"][domain]["change"] > 0
            assert (part["speedup"] is None) == (key != "0.0")


def test_a_pair_that_drafts_trees_is_predicted_by_its_best_chain(report_of):
    tree = BENCHMARK | {"draft_length": 4, "tree": [0, 0, 1, 3, 4], "chain_length": 2}
    assert report_of(benchmark=tree)["predicted"] == report_of()["predicted"]


def test_a_pair_that_drafts_nothing_has_the_speed_of_its_target(report_of):
    cost = BENCHMARK["cost"] | {"verify_ms": {"1": 60.0}}  # a head's features are in it
    report = report_of(benchmark=BENCHMARK | {"draft_length": 0, "cost": cost})
    assert report["predicted"]["speedup"]["proposed"] == pytest.approx(1.0)


def test_no_speedup_is_predicted_at_a_temperature_without_measured_costs(report_of):
    report = report_of(benchmark=BENCHMARK | {"temperature": 0.7})
    assert report["predicted"]["tau"]["num_prompts"] == 200
    assert report["predicted"]["speedup"] is None
    assert report_of(benchmark=None)["predicted"] is None


def test_a_constant_acceptance_rate_gives_the_geometric_sum():
    assert predicted_tau(0.0, 4) == 1.0
    assert predicted_tau(1.0, 4) == 5.0
    assert predicted_tau(0.5, 2) == pytest.approx(1.75)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (["weights"], "What changed in the target: weights."),
        (
            ["weights", "chat_template", "generation_config"],
            "What changed in the target: weights, chat template and generation config.",
        ),
        (["chat_template"], "What changed in the target: chat template; its weights are the same."),
        (["dtype"], "What changed in the target: dtype; its weights are the same."),
    ],
)
def test_the_reasons_tell_apart_what_changed_in_the_target(report_of, changed, sentence):
    assert sentence in report_of(changed=changed)["reasons"]
    assert target_reasons([]) == []


def test_another_engine_version_is_told_from_a_changed_target(report_of):
    report = report_of(
        packages={"torch": "2.13.0", "transformers": "5.20.0", "draftsmith": "0.2.0"}
    )
    assert report["engine"] == {"torch": ["2.12.0", "2.13.0"]}
    (sentence,) = [reason for reason in report["reasons"] if "engine version" in reason]
    assert "torch 2.12.0 to 2.13.0" in sentence
    assert "transformers" not in sentence
    same = report_of(packages={"torch": "2.12.0", "transformers": "5.20.0"})
    assert same["engine"] == {}
    assert not any("engine" in reason for reason in same["reasons"])


def test_the_version_of_draftsmith_counts_where_the_record_states_it(report_of):
    packages = {"draftsmith": "0.1.0", "torch": "2.12.0", "dvc": "3.6"}
    stated = BENCHMARK | {"provenance": {"packages": packages}}
    report = report_of(benchmark=stated, packages={"draftsmith": "0.2.0", "dvc": "3.7"})
    assert report["engine"] == {"draftsmith": ["0.1.0", "0.2.0"]}


def test_prompts_that_came_and_went_are_told_from_a_changed_target(report_of):
    report = report_of(rename=15)
    assert report["prompts"] == {"common": 185, "new": 15, "gone": 15}
    assert any("15 of today's are not in the record" in reason for reason in report["reasons"])
    assert not any("prompts changed" in reason for reason in report_of()["reasons"])


@pytest.mark.parametrize(
    ("length", "verify_ms", "expected"),
    [
        (1, {"2": 11.0}, 0.2),  # 1 + 11 of 10 ms: 1 + alpha = 1.2
        (2, {"3": 15.5}, 0.5),  # 2 + 15.5 of 10 ms: 1 + alpha + alpha^2 = 1.75
        (1, {"2": 20.0}, None),  # not even a draft that is always right
        (3, {"2": 11.0}, None),  # so many positions were not timed
    ],
)
def test_the_least_alpha_that_pays_makes_up_for_the_round(length, verify_ms, expected):
    cost = {"target_step_ms": 10.0, "draft_step_ms": 1.0, "verify_ms": verify_ms}
    found = break_even_alpha({"draft_length": length, "cost": cost})
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-5))


def test_a_draft_that_guesses_all_at_once_pays_earlier_and_a_tree_is_judged_by_its_chain():
    cost = {"target_step_ms": 10.0, "draft_step_ms": 1.0, "verify_ms": {"3": 15.5}}
    steps = {"draft_length": 5, "chain_length": 2, "cost": cost}
    at_once = steps | {"cost": cost | {"drafts_at_once": True}}
    assert break_even_alpha(at_once) < break_even_alpha(steps) == pytest.approx(0.5, abs=1e-5)
