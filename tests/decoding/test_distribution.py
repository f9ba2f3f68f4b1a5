from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.decoding.distribution import (
    Dense,
    OneHot,
    SamplingTensors,
    densify,
    distribution,
    draw,
    probability,
    sample,
)

ALMOST_ONE = math.nextafter(1.0, 0.0)
GRID = [
    (temperature, top_k, top_p)
    for temperature in (0.5, 0.7, 1.0, 1.7)
    for top_k in (0, 1, 5, 100)
    for top_p in (0.05, 0.3, 0.5, 0.8, 0.9, 0.95, 1.0)
]


def sampling(parameters: list[tuple[float, int, float]]) -> SamplingTensors:
    temperature, top_k, top_p = zip(*parameters, strict=True)
    return SamplingTensors(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p, dtype=torch.float64),
        is_greedy=not any(temperature),
        is_truncated=any(top_k) or any(p < 1 for p in top_p),
    )


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities `[positions, entries]` that Transformers' own warpers give."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers(None, logits).softmax(-1)


def random_logits(
    rows: int, *, positions: int = 3, entries: int = 40, ties: bool = False
) -> Tensor:
    generator = torch.Generator().manual_seed(entries)
    logits = torch.randn(rows, positions, entries, generator=generator) * 2
    return logits.round() if ties else logits


def test_temperature_top_k_and_top_p_equal_transformers_warpers():
    logits = random_logits(len(GRID))
    probs = distribution(logits, sampling(GRID)).probs
    for row, parameters in enumerate(GRID):
        want = warped(logits[row], *parameters)
        assert (probs[row] > 0).equal(want > 0), parameters
        torch.testing.assert_close(probs[row], want, msg=str(parameters))


@pytest.mark.parametrize("top_p", [0.8, 1.0])
def test_min_p_equals_transformers_warper(top_p):
    shares = [0.0, 0.02, 0.1, 0.5, 0.99]
    logits = random_logits(len(shares))
    parameters = [(0.8, 0, top_p)] * len(shares)
    tensors = dataclasses.replace(sampling(parameters), min_p=torch.tensor(shares))
    probs = distribution(logits, tensors).probs
    for row, share in enumerate(shares):
        scores = warped(logits[row], 0.8, 0, top_p).log()
        want = (MinPLogitsWarper(share)(None, scores) if share else scores).softmax(-1)
        assert (probs[row] > 0).equal(want > 0), share
        torch.testing.assert_close(probs[row], want, msg=str(share))


def test_tied_logits_share_the_probability_that_transformers_warpers_give_them():
    # Which of several tied entries top-p cuts is up to an unstable sort; how many is not.
    logits = random_logits(len(GRID), ties=True)
    probs = distribution(logits, sampling(GRID)).probs
    for row, parameters in enumerate(GRID):
        want = warped(logits[row], *parameters)
        for value in logits.unique():
            tied = logits[row] == value
            shares = [torch.where(tied, law, 0.0) for law in (probs[row], want)]
            counts = [(share > 0).sum(-1) for share in shares]
            assert counts[0].equal(counts[1]), parameters
            torch.testing.assert_close(shares[0].sum(-1), shares[1].sum(-1), msg=str(parameters))


@pytest.mark.parametrize("entries", [1, 2, 5, 10])
def test_uniform_logits_are_cut_where_transformers_cuts_them(entries):
    grid = [(1.0, 0, p / 20) for p in range(1, 20)] + [(1.0, k, 1.0) for k in range(1, 5)]
    probs = distribution(torch.zeros(len(grid), 1, entries), sampling(grid)).probs
    for row, parameters in enumerate(grid):
        want = warped(torch.zeros(1, entries), *parameters)
        assert (probs[row] > 0).sum() == (want > 0).sum(), parameters


def test_entries_tied_with_the_kth_are_all_kept():
    logits = torch.tensor([[[3.0, 2.0, 2.0, 2.0, 1.0]]])
    probs = distribution(logits, sampling([(1.0, 2, 1.0)])).probs
    assert (probs[0, 0] > 0).tolist() == [True, True, True, True, False]


def test_the_most_likely_entry_survives_the_smallest_top_p():
    logits = random_logits(1, entries=30)
    probs = distribution(logits, sampling([(1.0, 0, 1e-6)])).probs
    assert probs.argmax(-1).equal(logits.argmax(-1))
    assert bool((probs.max(-1).values == 1).all())


def test_a_row_does_not_depend_on_the_parameters_of_its_neighbours():
    parameters = [(0.0, 0, 1.0), (0.7, 3, 1.0), (1.0, 0, 0.8), (1.3, 0, 1.0)]
    logits = random_logits(4)
    together = distribution(logits, sampling(parameters)).probs
    for row, own in enumerate(parameters):
        alone = distribution(logits[row : row + 1], sampling([own]))
        torch.testing.assert_close(together[row : row + 1], densify(alone, 40, torch.float32))


def test_temperature_zero_is_one_hot_on_the_argmax():
    logits = random_logits(2)
    alone = distribution(logits, sampling([(0.0, 0, 1.0)] * 2))
    mixed = distribution(logits, sampling([(0.0, 0, 1.0), (1.0, 0, 1.0)]))
    assert isinstance(alone, OneHot)
    assert alone.ids.equal(logits.argmax(-1))
    assert mixed.probs[0].equal(densify(alone, 40, torch.float32)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_of_the_logits_is_kept(dtype):
    logits = random_logits(2).to(dtype)
    assert distribution(logits, sampling([(0.7, 5, 0.9)] * 2)).probs.dtype == dtype


def test_every_uniform_finds_an_entry_of_positive_probability():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(3000, 12, generator=generator)
    probs[torch.rand(3000, 12, generator=generator) < 0.7] = 0
    probs = probs[probs.sum(-1) > 0]
    scale = torch.rand(len(probs), 1, generator=generator) * 3  # need not sum to one
    for u in (0.0, 1e-30, 0.5, 1 - 2**-24, ALMOST_ONE):
        for weights in (probs, probs * scale, probs.double()):
            uniforms = torch.full((len(weights),), u, dtype=torch.float64)
            chosen = sample(weights, uniforms)
            assert bool((weights.gather(-1, chosen[:, None]) > 0).all()), u


@pytest.mark.parametrize("u", [0.0, 0.3, ALMOST_ONE])
def test_a_single_possible_entry_is_always_drawn(u):
    for place in range(4):
        probs = torch.zeros(4)
        probs[place] = 1.0
        assert sample(probs, torch.tensor(u, dtype=torch.float64)) == place


def test_the_share_of_uniforms_that_find_an_entry_is_its_probability():
    probs = torch.tensor([0.125, 0.0, 0.5, 0.25, 0.0, 0.125], dtype=torch.float64)
    grid = (torch.arange(1024, dtype=torch.float64) + 0.5) / 1024
    chosen = sample(probs.expand(1024, -1), grid)
    assert (torch.bincount(chosen, minlength=6) / 1024).tolist() == probs.tolist()


def test_probabilities_of_nan_give_an_entry_in_range():
    assert sample(torch.full((3, 5), torch.nan), torch.tensor([0.0, 0.5, ALMOST_ONE])).max() < 5


class TestTrimmedVocabulary:
    token_ids = torch.tensor([7, 2, 5])

    def dense(self) -> Dense:
        return Dense(torch.tensor([[[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]]]), self.token_ids)

    def test_draws_are_ids_of_the_target(self):
        uniforms = torch.tensor([[0.6, 0.1]], dtype=torch.float64)
        assert draw(self.dense(), uniforms).tolist() == [[2, 5]]

    def test_a_greedy_draw_is_an_id_of_the_target(self):
        logits = torch.tensor([[[0.0, 3.0, 1.0]]])
        one_hot = distribution(logits, sampling([(0.0, 0, 1.0)]), self.token_ids)
        assert draw(one_hot, torch.zeros(1, 1)).tolist() == [[2]]

    def test_probabilities_are_read_by_entry(self):
        tokens, entries = torch.tensor([[2, 5]]), torch.tensor([[1, 2]])
        assert probability(self.dense(), tokens, entries).tolist() == [[0.25, 1.0]]

    def test_ids_outside_the_map_have_probability_zero(self):
        full = densify(self.dense(), 9, torch.float32)
        assert full[0, 0].tolist() == [0, 0, 0.25, 0, 0, 0.25, 0, 0.5, 0]


def test_a_one_hot_distribution_reads_the_same_dense_or_not():
    one_hot = OneHot(torch.tensor([[3, 1]]))
    tokens = torch.tensor([[3, 2]])
    dense = Dense(densify(one_hot, 4, torch.float64))
    assert dense.probs.dtype == torch.float64
    assert probability(one_hot, tokens).tolist() == probability(dense, tokens).tolist() == [[1, 0]]
    assert draw(dense, torch.full((1, 2), 0.5)).equal(one_hot.ids)


def test_later_positions_than_those_of_the_tokens_are_ignored():
    dense = Dense(torch.tensor([[[0.25, 0.75], [1.0, 0.0]]]))
    assert probability(dense, torch.tensor([[1]])).tolist() == [[0.75]]
    assert probability(OneHot(torch.tensor([[1, 0]])), torch.tensor([[1]])).tolist() == [[1.0]]
