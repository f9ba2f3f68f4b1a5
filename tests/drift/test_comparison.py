from __future__ import annotations

import numpy as np
import pytest

from draftsmith.drift.comparison import compare, compare_domains, holm, shrink
from draftsmith.errors import EvidenceError

NUM_DOMAIN_TRIALS = 120
NUM_PROMPTS = 200
NUM_DOMAINS = 6


def simulate(seed, *, drop=0.0, spread=0.06, num_prompts=NUM_PROMPTS):
    """Two measurements of the same prompts, which differ far more among prompts than within one."""
    rng = np.random.default_rng(seed)
    base = rng.beta(8, 8, size=num_prompts)
    before = base + rng.normal(0, spread / np.sqrt(2), num_prompts)
    after = base - drop + rng.normal(0, spread / np.sqrt(2), num_prompts)
    ids = [f"prompt-{index}" for index in range(num_prompts)]
    return dict(zip(ids, before, strict=True)), dict(zip(ids, after, strict=True))


def domains_of(prompts):
    return {name: f"domain-{index % NUM_DOMAINS}" for index, name in enumerate(prompts)}


def test_pairing_finds_what_independent_samples_would_hide():
    before, after = simulate(0, drop=0.02, spread=0.03)
    width = (result := compare(before, after, seed=0)).high - result.low
    spread_among_prompts = np.std(list(before.values()))
    assert width < 4 * spread_among_prompts * np.sqrt(2 / NUM_PROMPTS) / 3


def test_the_order_of_the_prompts_does_not_matter(config):
    before, after = simulate(5, drop=0.01)
    shuffled = dict(sorted(before.items(), key=lambda item: hash(item[1])))
    assert compare(before, after, seed=1) == compare(shuffled, after, seed=1)
    domains = domains_of(before)
    assert compare_domains(before, after, domains=domains, seed=1, config=config) == (
        compare_domains(shuffled, after, domains=domains, seed=1, config=config)
    )


def test_only_common_prompts_count():
    before, after = simulate(6)
    del before["prompt-0"], after["prompt-1"]
    before["another"] = 0.0
    assert compare(before, after, seed=0).num_prompts == NUM_PROMPTS - 2


def test_swapping_the_sides_turns_the_change_around():
    before, after = simulate(7, drop=0.03)
    there, back = compare(before, after, seed=0), compare(after, before, seed=0)
    assert there.change == pytest.approx(-back.change)
    assert there.change == pytest.approx(there.proposed - there.reference)
    assert there.low < there.change < there.high


def test_identical_measurements_have_no_change_and_no_effect():
    before, _ = simulate(8)
    result = compare(before, dict(before), seed=0)
    assert (result.change, result.low, result.high, result.effect_size) == (0, 0, 0, 0)


def test_the_effect_size_is_that_of_the_paired_differences():
    before, after = simulate(9, drop=0.03)
    differences = np.array([after[name] - before[name] for name in before])
    expected = differences.mean() / differences.std(ddof=1)
    assert compare(before, after, seed=0).effect_size == pytest.approx(expected)


def test_no_common_prompt_and_values_that_are_not_finite_are_refused():
    with pytest.raises(EvidenceError, match="no common prompt"):
        compare({"a": 0.1}, {"b": 0.1}, seed=0)
    with pytest.raises(EvidenceError, match="without a finite value"):
        compare({"a": 0.1}, {"a": float("nan")}, seed=0)


def test_flags_of_many_domains_raise_no_more_false_alarms_than_one(config):
    """With noise far above the margin, uncorrected flags of twelve domains would alarm in 40 %."""
    alarms = 0
    for trial in range(NUM_DOMAIN_TRIALS):
        before, after = simulate(trial, spread=0.3, num_prompts=240)
        domains = {name: str(index % 12) for index, name in enumerate(before)}
        results = compare_domains(before, after, domains=domains, seed=trial, config=config)
        alarms += any(result.flag for result in results.values())
    assert alarms / NUM_DOMAIN_TRIALS <= 0.08


def test_a_significant_drop_within_the_margin_is_not_flagged(config):
    before, after = simulate(3, drop=0.015, spread=0.01)
    results = compare_domains(before, after, domains=domains_of(before), seed=0, config=config)
    assert all(result.p_adjusted < 0.05 for result in results.values())
    assert not any(result.flag for result in results.values())


def test_a_domain_of_one_prompt_is_never_flagged(config):
    before, after = simulate(4)
    domains = domains_of(before) | {"prompt-0": "rare"}
    after["prompt-0"] = before["prompt-0"] - 0.9
    results = compare_domains(before, after, domains=domains, seed=0, config=config)
    assert results["rare"].comparison.num_prompts == 1
    assert not results["rare"].flag


def test_adjusted_p_values_keep_their_order_and_never_shrink():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    raw = list(np.random.default_rng(0).uniform(size=20))
    adjusted = holm(raw)
    assert all(0 < before <= after <= 1 for before, after in zip(raw, adjusted, strict=True))
    assert np.all(np.diff(np.array(adjusted)[np.argsort(raw)]) >= 0)


def test_shrunken_changes_are_nearer_to_the_truth_than_raw_ones():
    rng = np.random.default_rng(0)
    raw_error, shrunken_error = 0.0, 0.0
    for _ in range(100):
        truth = rng.normal(-0.01, 0.01, size=8)
        differences = [rng.normal(value, 0.08, size=12) for value in truth]
        raw = np.array([values.mean() for values in differences])
        raw_error += float(((raw - truth) ** 2).sum())
        shrunken_error += float(((np.array(shrink(differences)) - truth) ** 2).sum())
    assert shrunken_error < 0.7 * raw_error


def test_shrinking_moves_towards_the_pooled_change_and_never_past_it():
    rng = np.random.default_rng(1)
    differences = [
        rng.normal(mean, 0.05, size=size) for mean, size in ((-0.1, 5), (0, 50), (0.1, 9))
    ]
    pooled = np.concatenate(differences).mean()
    for values, value in zip(differences, shrink(differences), strict=True):
        assert min(pooled, values.mean()) - 1e-12 <= value <= max(pooled, values.mean()) + 1e-12
