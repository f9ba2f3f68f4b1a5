"""The draft length that pays: chosen from measured costs and acceptance, for this batch now."""

from __future__ import annotations

import random

import pytest
from transformers import TemperatureLogitsWarper

from draftsmith.decoding import DraftModelProposer, Engine, Request, SamplingParams
from draftsmith.decoding.draft_length import AdaptiveLength, FixedLength, RoundCosts
from draftsmith.decoding.trace import block_efficiency
from tests.decoding.laws import exact_law, p_value

LONGEST = 4
CELLS = [(1, 128), (1, 1024), (16, 128), (16, 1024)]


def costs(*, draft: float = 0.1, steepness: float = 0.02):
    """Wider verifications cost little at one row and short context, and `steepness` elsewhere."""
    verify = {
        cell: [1.0 + (0.02 if cell == (1, 128) else steepness) * i for i in range(LONGEST + 1)]
        for cell in CELLS
    }
    return RoundCosts((1, 16), (128, 1024), verify, dict.fromkeys(CELLS, draft))


def rate(table, acceptance: float, length: int, **where: int) -> float:
    """Expected tokens over cost when every position is accepted at the same rate."""
    tokens = sum(acceptance**place for place in range(length + 1))
    return tokens / table.round_cost(length, **where)


def settled(chooser, acceptance: float, *, rows: int, context: int, rounds: int = 600) -> int:
    """The usual choice after rounds whose drafts are accepted at that rate."""
    chosen, chance = [], random.Random(0)
    for _ in range(rounds):
        chosen.append(chooser.choose(rows=rows, context=context))
        accepted = 0
        while accepted < chosen[-1] and chance.random() < acceptance:
            accepted += 1
        chooser.observe([chosen[-1]], [accepted])
    late = chosen[rounds // 2 :]
    return max(set(late), key=late.count)


def test_a_fixed_length_never_varies():
    chooser = FixedLength(3)
    chooser.observe([3], [0])
    assert {chooser.choose(rows=r, context=c) for r in (1, 64) for c in (1, 4096)} == {3}


@pytest.mark.parametrize(
    ("rows", "context", "expected"),
    [(1, 10, 1.0), (3, 10, 2.0), (2, 10, 1.5), (1, 30, 5.0), (2, 20, 4.0), (9, 99, 8.0)],
)
def test_costs_are_interpolated_between_measured_cells_and_constant_beyond(rows, context, expected):
    cells = {(1, 10): [1.0], (3, 10): [2.0], (1, 30): [5.0], (3, 30): [8.0]}
    table = RoundCosts((1, 3), (10, 30), cells, dict.fromkeys(cells, 0.0))
    assert table.round_cost(0, rows=rows, context=context) == pytest.approx(expected)


@pytest.mark.parametrize("acceptance", [0.15, 0.5, 0.95])
@pytest.mark.parametrize("draft", [0.02, 0.2, 2.0])
def test_it_settles_within_a_few_percent_of_the_best_length(acceptance, draft):
    table = costs(draft=draft)
    found = settled(AdaptiveLength(table, LONGEST, [0.6]), acceptance, rows=1, context=64)
    rates = [rate(table, acceptance, n, rows=1, context=64) for n in range(LONGEST + 1)]
    assert rates[found] >= 0.95 * max(rates)


@pytest.mark.parametrize("where", [{"rows": 16, "context": 64}, {"rows": 1, "context": 2000}])
def test_it_stops_drafting_where_batch_or_context_makes_it_a_loss_and_comes_back(where):
    chooser = AdaptiveLength(costs(steepness=1.0), LONGEST, [0.8])
    assert settled(chooser, 0.8, rows=1, context=64) >= 2
    assert settled(chooser, 0.8, **where) == 0
    assert settled(chooser, 0.8, rows=1, context=64) >= 2


def test_it_probes_in_a_lull_and_notices_that_drafts_are_good_again():
    chooser = AdaptiveLength(costs(), LONGEST, [0.5])
    assert settled(chooser, 0.0, rows=1, context=64) == 0
    assert settled(chooser, 1.0, rows=1, context=64, rounds=20000) == LONGEST


def test_it_does_not_flutter_between_lengths_that_are_as_good():
    table = RoundCosts((1,), (64,), {(1, 64): [1.0, 1.49]}, {(1, 64): 0.0})
    chooser = AdaptiveLength(table, 1, [0.5])
    choices = []
    for turn in range(60):
        choices.append(chooser.choose(rows=1, context=64))
        chooser.observe([choices[-1]], [turn % 2 if choices[-1] else 0])
    assert sum(a != b for a, b in zip(choices, choices[1:], strict=False)) <= 2


def test_greedy_output_does_not_depend_on_the_chosen_lengths(
    llama, continue_greedily, ragged_prompts
):
    chooser = AdaptiveLength(costs(steepness=0.4), LONGEST, [0.5])
    proposer = DraftModelProposer(llama.draft)
    engine = Engine(llama.target, proposer, max_rows=3, draft_length=chooser)
    params = SamplingParams(max_new_tokens=40)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(ragged_prompts)]
    results = engine.generate(requests)
    expected = [continue_greedily(llama.reference, prompt, 40) for prompt in ragged_prompts]
    assert [result.token_ids for result in results] == expected
    assert len({length for result in results for length in result.trace.drafted}) > 1
    assert block_efficiency([result.trace for result in results]) > 1.1


class Varying(FixedLength):
    """Another length in nearly every round, by nothing that was sampled."""

    def choose(self, *, rows, context):
        return (rows + context) % (self.max_length + 1)


def test_sampled_output_keeps_the_targets_law_while_lengths_vary(family):
    small = family("llama", vocab_size=8, noise=0.3)
    params = SamplingParams(max_new_tokens=3, temperature=0.9)
    prompt = [6, 7, 4]
    requests = [Request(str(i), prompt, params) for i in range(6000)]
    proposer = DraftModelProposer(small.draft)
    engine = Engine(small.target, proposer, max_rows=500, draft_length=Varying(3))
    results = engine.generate(requests)
    assert len({length for result in results for length in result.trace.drafted}) > 2
    law = exact_law(small.reference, prompt, 3, TemperatureLogitsWarper(0.9))
    assert p_value(results, law) > 1e-3
