from __future__ import annotations

import copy
import dataclasses

import pytest

from draftsmith.artifacts import digest_json, read_json, write_json
from draftsmith.errors import DraftError, EvidenceError
from draftsmith.evaluation.record import Evaluator, evaluation_report
from draftsmith.evaluation.settings import EvaluationConfig

CONFIG = EvaluationConfig(
    decoding_prompts=1000,
    draft_length=2,
    guesses=(3, 2),
    guess_prompts=6,
    lookup_length=3,
    temperatures=(0.0, 0.7),
    max_new_tokens=12,
    batch_size=8,
    exact_prompts=3,
    near_tie_prompts=4,
    self_test_tokens=8,
    seed=0,
)
KEYS = ["0.0", "0.7"]


class Phases:
    """Notes every phase's total and what was reported done."""

    def __init__(self):
        self.totals, self.num_done = {}, {}

    def __call__(self, name, total):
        self.totals[name], self.num_done[name] = total, 0

        def done(count):
            self.num_done[name] += count

        return done


@pytest.fixture(scope="module")
def evaluator(loaded, rollouts, stop_ids):
    return Evaluator(CONFIG, loaded.model, loaded.identity, rollouts, stop_ids, Phases())


@pytest.fixture(scope="module")
def record(evaluator, draft_folders):
    return evaluator.evaluate(draft_folders["trimmed"])


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def test_a_record_names_the_pair(record, loaded, drafts):
    manifest = drafts["trimmed"].manifest
    assert record["recipe"] == "trimmed"
    assert record["family"] == "student"
    assert record["draft_digest"] == manifest.digest
    pair = {"target": loaded.identity.digest, "draft": manifest.digest}
    assert record["pair_digest"] == digest_json(pair)


def test_a_record_is_json_and_comes_back_unchanged(record, tmp_path):
    write_json(tmp_path / "record.json", record)
    assert read_json(tmp_path / "record.json") == record


@pytest.mark.parametrize("key", KEYS)
def test_alpha_is_the_mean_over_prompts_and_by_domain_over_its_own(record, key):
    prompts, summary = record["prompts"], record["alpha"][key]
    assert summary["mean"] == pytest.approx(mean(p["alpha"][key] for p in prompts))
    assert summary["num_prompts"] == len(prompts)
    assert set(summary["by_domain"]) == {p["domain"] for p in prompts} == {"walk", "meal"}
    for domain, part in summary["by_domain"].items():
        own = [p["alpha"][key] for p in prompts if p["domain"] == domain]
        assert part["mean"] == pytest.approx(mean(own))
        assert part["num_prompts"] == len(own)
        assert part["low"] <= part["mean"] <= part["high"]


@pytest.mark.parametrize("key", KEYS)
def test_tau_is_a_ratio_of_sums_within_the_range_of_its_prompts(record, key):
    prompts, summary = record["prompts"], record["tau"][key]
    assert summary["num_prompts"] == len(prompts)
    for domain, part in {None: summary, **summary["by_domain"]}.items():
        own = [p["tau"][key] for p in prompts if domain in (None, p["domain"])]
        assert min(own) <= part["mean"] <= max(own)
        assert part["num_prompts"] == len(own)
        assert 1 <= part["mean"] <= CONFIG.draft_length + 1


@pytest.mark.parametrize("key", KEYS)
def test_survival_falls_with_position_and_agrees_with_tau(record, key):
    survival, counts = record["survival"][key], record["position_counts"][key]
    assert len(survival) == len(counts) == CONFIG.draft_length
    assert survival[0] >= survival[1] > 0
    assert counts[0] >= counts[1] > 0
    assert record["conditional_acceptance"][key][0] == survival[0]
    assert 0 < record["accepted_fraction"][key] <= survival[0]
    # Rounds that a stop token or the length limit cut commit less than they accepted.
    assert record["tau"][key]["mean"] == pytest.approx(1 + sum(survival), abs=0.25)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", ["survival", "conditional_acceptance"])
def test_positions_have_intervals_and_domains_that_agree_with_the_pooled_figures(record, key, name):
    entries = record["positions"][key]
    assert 1 <= len(entries) <= len(record[name][key])
    for entry, pooled in zip(entries, record[name][key], strict=False):
        estimate = entry[name]
        assert estimate["mean"] == pytest.approx(pooled)
        assert estimate["low"] <= estimate["mean"] <= estimate["high"]
        parts = [part["mean"] for part in estimate["by_domain"].values()]
        assert min(parts) - 1e-12 <= estimate["mean"] <= max(parts) + 1e-12


def test_every_prompt_is_there_once_with_its_tokens(record, rollouts):
    assert [p["prompt_id"] for p in record["prompts"]] == list(
        dict.fromkeys(rollout.prompt_id for rollout in rollouts)
    )
    lengths = {(r.prompt_id, str(r.temperature)): len(r.response_ids) for r in rollouts}
    for prompt in record["prompts"]:
        for key in KEYS:
            assert prompt["num_tokens"][key] == lengths[prompt["prompt_id"], key]


def test_coverage_is_the_share_of_the_targets_tokens_that_the_draft_knows(
    record, evaluator, rollouts, drafts
):
    known = set(drafts["trimmed"].token_ids.tolist())
    tokens = [token for rollout in rollouts for token in rollout.response_ids]
    share = mean(token in known for token in tokens)
    assert record["vocabulary_coverage"] == pytest.approx(share)
    assert 0 < share < 1
    assert evaluator.acceptance(drafts["student"])["vocabulary_coverage"] is None


def test_the_pair_is_lossless_and_the_control_was_noticed(record):
    result = record["losslessness"]
    assert result["holds"]
    assert result["fp32"]["num_identical"] == result["fp32"]["num_prompts"] == 3
    assert result["bf16"]["num_prompts"] == 4
    assert result["bf16"]["dtype"] == "float32"
    assert result["control"]["detected"]


def test_progress_is_told_of_all_work(record, evaluator):
    assert evaluator.on_phase.totals == evaluator.on_phase.num_done
    assert len(evaluator.on_phase.totals) == 6


def test_the_same_evaluation_gives_the_same_record(record, evaluator, drafts):
    again = evaluator.acceptance(drafts["trimmed"])
    assert {key: record[key] for key in again if key != "prompts"} == {
        key: value for key, value in again.items() if key != "prompts"
    }


def test_a_temperature_that_the_target_was_not_asked_at_is_refused(evaluator, drafts):
    config = dataclasses.replace(CONFIG, temperatures=(0.0, 0.3))
    colder = dataclasses.replace(evaluator, config=config)
    with pytest.raises(EvidenceError, match=r"temperature 0\.3") as caught:
        colder.acceptance(drafts["student"])
    assert "[0.0, 0.7]" in caught.value.found
    assert "corpus.eval_temperatures" in caught.value.remedy


def test_a_draft_of_another_tokenizer_is_refused(evaluator, save_student):
    folder = save_student("foreign", (0,), tokenizer_digest="0" * 64)
    with pytest.raises(DraftError, match="tokenizer"):
        evaluator.evaluate(folder)


def test_a_draft_of_another_target_with_the_same_tokenizer_is_measured(
    evaluator, save_student, loaded
):
    """So that the incumbent's draft can be put on a new target."""
    folder = save_student("incumbent", (0,), target_digest="0" * 64)
    draft = evaluator.join(folder)
    record = evaluator.acceptance(draft)
    pair = {"target": loaded.identity.digest, "draft": draft.manifest.digest}
    assert record["pair_digest"] == digest_json(pair)


def test_measuring_leaves_the_target_as_it_was(evaluator, target, draft_folders, rollouts):
    before = copy.deepcopy(target.state_dict())
    few = [r for r in rollouts if r.prompt_id in {rollouts[0].prompt_id, rollouts[2].prompt_id}]
    dataclasses.replace(evaluator, rollouts=few).evaluate(draft_folders["student"])
    assert target.dtype == before["lm_head.weight"].dtype
    assert all(value.equal(before[name]) for name, value in target.state_dict().items())


def test_a_report_carries_the_digests_of_what_was_measured(record):
    facts = {"target_digest": "t" * 64, "digest": "c" * 64, "prompts": {}}
    report = evaluation_report({"trimmed": record}, CONFIG, facts)
    assert report["target_digest"] == facts["target_digest"]
    assert report["corpus_digest"] == facts["digest"]
    assert report["temperatures"] == KEYS
    assert report["draft_length"] == CONFIG.draft_length
    assert report["recipes"] == {"trimmed": record}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperatures", ()),
        ("temperatures", (0.0, -1.0)),
        ("draft_length", 0),
        ("exact_prompts", 0),
        ("near_tie_prompts", 0),
        ("self_test_tokens", 0),
    ],
)
def test_a_setting_out_of_range_is_refused(key, value):
    with pytest.raises(ValueError, match="must"):
        dataclasses.replace(CONFIG, **{key: value})
