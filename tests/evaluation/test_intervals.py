from __future__ import annotations

import numpy as np
import pytest

from draftsmith.errors import EvidenceError
from draftsmith.evaluation.intervals import bootstrap_mean, bootstrap_ratio_of_sums


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        estimate = bootstrap_mean(rng.beta(4, 6, size=60), seed=trial, num_resamples=500)
        covered += estimate.low <= 0.4 <= estimate.high
    assert 0.91 <= covered / 300 <= 0.98


def test_the_ratio_interval_covers_the_true_ratio_when_lengths_and_rates_depend():
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(300):
        rounds = rng.integers(5, 80, size=60).astype(float)
        tokens = rounds * (1.5 + 0.005 * rounds) + rng.normal(0, 3, size=60)
        truth = 1.5 + 0.005 * np.mean(np.arange(5, 80) ** 2.0) / np.mean(np.arange(5, 80))
        estimate = bootstrap_ratio_of_sums(tokens, rounds, seed=trial, num_resamples=500)
        covered += estimate.low <= truth <= estimate.high
    assert 0.90 <= covered / 300 <= 0.985


def test_the_interval_narrows_with_the_square_root_of_the_number_of_prompts():
    values = np.random.default_rng(2).normal(size=6400)
    widths = [
        (estimate := bootstrap_mean(values[:count], seed=0)).high - estimate.low
        for count in (100, 6400)
    ]
    assert 6 < widths[0] / widths[1] < 11


def test_a_ratio_weighs_prompts_by_their_size_and_a_mean_does_not():
    tokens, forwards = [10.0, 400.0], [10.0, 100.0]
    assert bootstrap_ratio_of_sums(tokens, forwards, seed=0).mean == pytest.approx(410 / 110)
    assert bootstrap_mean(np.divide(tokens, forwards), seed=0).mean == pytest.approx(2.5)


def test_the_same_seed_gives_the_same_interval_and_a_generator_moves_on():
    values = np.random.default_rng(3).normal(size=50)
    assert bootstrap_mean(values, seed=7) == bootstrap_mean(values, seed=7)
    generator = np.random.default_rng(7)
    first, second = (bootstrap_mean(values, seed=generator) for _ in range(2))
    assert first != second
    assert first == bootstrap_mean(values, seed=7)


def test_one_prompt_gives_its_own_value_and_says_that_it_was_one():
    estimate = bootstrap_mean([0.4], seed=0)
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((0.4, 0.4, 0.4))
    assert estimate.num_prompts == 1


def test_a_wider_confidence_contains_the_narrower_one():
    values = np.random.default_rng(4).normal(size=40)
    narrow, wide = (bootstrap_mean(values, seed=0, confidence=level) for level in (0.8, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_many_prompts_are_resampled_in_bounded_memory():
    estimate = bootstrap_mean(np.ones(100_000), seed=0, num_resamples=100)
    assert (estimate.low, estimate.high, estimate.num_prompts) == (1.0, 1.0, 100_000)


@pytest.mark.parametrize("values", [[], [[0.1, 0.2]], [0.1, float("nan")], [float("inf")]])
def test_values_without_a_mean_over_prompts_are_refused(values):
    with pytest.raises(EvidenceError, match="one finite value for every prompt"):
        bootstrap_mean(values, seed=0)


@pytest.mark.parametrize(
    ("numerators", "denominators"),
    [([], []), ([1.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 0.0]), ([1.0, 1.0], [2.0, -1.0])],
)
def test_numerators_and_denominators_that_do_not_fit_are_refused(numerators, denominators):
    with pytest.raises(EvidenceError):
        bootstrap_ratio_of_sums(numerators, denominators, seed=0)


def test_an_empty_prompt_beside_full_ones_does_not_divide_by_zero():
    estimate = bootstrap_ratio_of_sums([0.0, 6.0], [0.0, 3.0], seed=0)
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((2.0, 2.0, 2.0))
