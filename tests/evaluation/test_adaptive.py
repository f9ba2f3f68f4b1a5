"""Lengths that pay: simulated rounds on a machine whose costs are known, seeded."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from draftsmith.decoding import FixedLengths, Lengths, Request, SamplingParams
from draftsmith.decoding.batch import Batch, Row
from draftsmith.evaluation.adaptive import AdaptiveLengths
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts, Survival, survival

LIMIT = Lengths(draft=5, copy=0)
WITH_COPIES = Lengths(draft=5, copy=8)
ROWS, CONTEXTS = (1, 4, 16, 64), (128, 1024, 8192)
CELLS = list(itertools.product(ROWS, CONTEXTS))
DRAFTS = (0.05, 0.3, 0.8)  # of the target's time
CAP = 100  # of a request that is far from its end
COPY_ACCEPTANCE = 0.85


def forward_ms(rows, context, width, *, scale=1.0):
    """Weights are read once; rows, positions and what they attend to are computed."""
    return scale * (20 + rows * width * (0.12 + context * 6e-5) + rows * context * 2e-5)


def machine(draft_scale, longest=WITH_COPIES.copy):
    """Costs of a target and of a draft that takes `draft_scale` of its time."""
    cells = {}
    for rows, context in CELLS:
        verify = {w: forward_ms(rows, context, w) for w in range(1, longest + 2)}
        step = forward_ms(rows, context, 1, scale=draft_scale)
        cells[rows, context] = ForwardCosts(verify[1], step, verify)
    return RoundCosts(ROWS, CONTEXTS, cells)


@dataclass(frozen=True)
class Played:
    """Expected tokens a millisecond, and how often each draft and copy length was used."""

    rate: float
    drafts: Counter
    copies: Counter


class Simulation:
    """Rounds of a batch whose acceptance is known.

    Acceptance falls with the position; `copy_share` of the rows can copy in a round. The rate
    counts the tokens that the chosen lengths lead one to expect, so the luck of the draws is not in
    it.
    """

    def __init__(self, costs, acceptances, *, context, copy_share=0.0):
        self.batch = Batch(torch.device("cpu"), vocab_size=8)
        self.costs = costs.at(rows=len(acceptances), context=context)
        self.conditional = [[a * 0.95**i for i in range(8)] for a in acceptances]
        self.copy_share = copy_share
        text = [0] * context
        for index in range(len(acceptances)):
            self.join(f"r{index}", text)

    def join(self, name, text):
        self.batch.append(Row(Request(name, text, SamplingParams(max_new_tokens=CAP)), text))

    def play(self, policy, rounds, *, skipped=0, seed=0):
        chance = random.Random(seed)
        tokens = spent = 0.0
        drafts, copies = Counter(), Counter()
        for turn in range(rounds):
            could_copy = [self._copyable(policy, chance) for _ in self.batch.rows]
            chosen = policy.choose(self.batch, could_copy, [CAP] * len(self.batch))
            self.policy = policy
            expected, cost, lengths = self._round(chosen, could_copy, chance)
            policy.observe(self.batch)
            if turn >= skipped:
                tokens, spent = tokens + expected, spent + cost
                drafts.update(n for n, is_copy in lengths if not is_copy)
                copies.update(n for n, is_copy in lengths if is_copy)
        return Played(tokens / spent, drafts, copies)

    def _copyable(self, policy, chance):
        return chance.randint(1, 8) if policy.limit.copy and self._hits(chance) else 0

    def _hits(self, chance):
        return chance.random() < self.copy_share

    def _round(self, chosen, could_copy, chance):
        expected, lengths = 0.0, []
        for row, conditional, found in zip(
            self.batch.rows, self.conditional, could_copy, strict=True
        ):
            copied = min(found, chosen.copy)
            length = copied or chosen.draft
            shares = [COPY_ACCEPTANCE] * length if copied else conditional[:length]
            accepted = 0
            while accepted < length and chance.random() < shares[accepted]:
                accepted += 1
            row.trace.record(
                drafted=length, accepted=accepted, committed=accepted + 1, from_text=copied > 0
            )
            expected += 1 + sum(survival(shares))
            lengths.append((length, copied > 0))
        steps = max((n for n, is_copy in lengths if not is_copy), default=0)
        width = max(n for n, _ in lengths)
        return expected, self.costs.round_ms(steps, width), lengths


def mixed(rows):
    """Easy and hard requests in turn; one alone is between them."""
    return [0.6] if rows == 1 else [(0.85, 0.45)[i % 2] for i in range(rows)]


@functools.cache
def outcome(cell, draft_scale, copy_share=0.0):
    """The adaptive policy and every fixed one in a cell of the grid."""
    rows, context = cell
    costs = machine(draft_scale)
    limit = WITH_COPIES if copy_share else LIMIT
    rounds = 400 + 1600 // rows

    def play(policy, num_rounds, skipped=0):
        world = Simulation(costs, mixed(rows), context=context, copy_share=copy_share)
        return world.play(policy, num_rounds, skipped=skipped)

    copies = (0, 2, 5, 8) if copy_share else (0,)
    fixed = {
        lengths: play(FixedLengths(lengths), rounds if copy_share else 1)
        for lengths in (Lengths(*each) for each in itertools.product(range(6), copies))
    }
    found = play(AdaptiveLengths(costs, limit, Survival([0.5, 0.25])), rounds, skipped=100)
    return found, fixed


@pytest.mark.parametrize("draft_scale", DRAFTS)
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_of_batch_and_context_comes_near_its_best_fixed_length(cell, draft_scale):
    found, fixed = outcome(cell, draft_scale)
    assert found.rate >= 0.95 * max(played.rate for played in fixed.values())


@pytest.mark.parametrize("cell", [(1, 128), (4, 128), (16, 1024), (64, 128)])
def test_with_copies_it_comes_near_the_best_pair_of_fixed_lengths(cell):
    found, fixed = outcome(cell, 0.15, 0.2)
    assert found.rate >= 0.95 * max(played.rate for played in fixed.values())


def losing(draft_scale):
    """Cells in which every draft costs more than a twentieth of the speed."""
    rates = {cell: outcome(cell, draft_scale)[1] for cell in CELLS}
    return [
        cell
        for cell, fixed in rates.items()
        if max(p.rate for n, p in fixed.items() if n.draft) < 0.95 * fixed[Lengths(0, 0)].rate
    ]


def test_the_grid_holds_cells_that_gain_and_cells_that_lose():
    """Otherwise the tests around would show little."""
    assert [len(losing(draft_scale)) for draft_scale in DRAFTS] == [0, 1, len(CELLS)]
    best = {
        max(fixed, key=lambda lengths: fixed[lengths].rate)
        for cell in CELLS
        for _, fixed in [outcome(cell, DRAFTS[0])]
    }
    assert {lengths.draft for lengths in best} >= {1, 2, 3, 4}


@pytest.mark.parametrize("draft_scale", DRAFTS[1:])
def test_where_speculation_loses_hardly_anything_is_drafted(draft_scale):
    for cell in losing(draft_scale):
        found, fixed = outcome(cell, draft_scale)
        assert found.drafts[0] >= 0.95 * found.drafts.total()
        assert found.rate >= 0.98 * fixed[Lengths(0, 0)].rate


def test_copies_grow_shorter_as_the_batch_grows():
    lengths = []
    for rows in (1, 16, 64):
        found, _ = outcome((rows, 1024), 0.15, 0.2)
        lengths.append(sum(n * count for n, count in found.copies.items()) / found.copies.total())
    assert lengths[0] > lengths[1] > lengths[2]


def settled(costs, limit=LIMIT, prior=(0.6, 0.36)):
    """A policy after 300 rounds of one easy request."""
    policy = AdaptiveLengths(costs, limit, Survival(prior))
    world = Simulation(costs, [0.8], context=128)
    world.play(policy, 300)
    return policy, world


def choice(policy, *, rows, context):
    world = Simulation(machine(0.1), [0.8] * rows, context=context)
    return policy.choose(world.batch, [0] * rows, [CAP] * rows).draft


def test_it_reacts_at_once_when_batch_or_context_grows_and_comes_back():
    policy, _ = settled(machine(0.3))
    alone = choice(policy, rows=1, context=128)
    assert alone >= 2
    assert choice(policy, rows=64, context=128) < alone
    assert choice(policy, rows=64, context=8192) == 0
    assert choice(policy, rows=16, context=8192) < alone
    assert choice(policy, rows=1, context=128) == alone


def test_a_row_near_its_end_drafts_no_more_than_it_may_commit():
    policy, world = settled(machine(0.1))
    assert policy.choose(world.batch, [0], [CAP]).draft > 1
    assert policy.choose(world.batch, [0], [1]).draft == 1


def test_rows_have_estimates_of_their_own():
    costs = machine(0.1)
    policy = AdaptiveLengths(costs, LIMIT, Survival([0.6]))
    world = Simulation(costs, [0.95, 0.1], context=128)
    world.play(policy, 120)
    easy, hard = world.batch.rows
    found = {}
    for name, row in (("easy", easy), ("hard", hard)):
        alone = Batch(torch.device("cpu"), vocab_size=8)
        alone.append(row)
        policy._drafts.keep_only = lambda names: None  # both stay known while one is asked
        found[name] = policy.choose(alone, [0], [CAP]).draft
    assert found["easy"] >= found["hard"] + 2


def test_a_new_request_under_an_old_id_inherits_nothing_of_the_old_one():
    costs = machine(0.1)
    policy = AdaptiveLengths(costs, LIMIT, Survival([0.6, 0.36]))
    Simulation(costs, [0.05], context=128).play(policy, 30)
    (old,) = policy._drafts.survivals(["r0"])
    policy.choose(Simulation(costs, [0.6], context=128).batch, [0], [CAP])
    (new,) = policy._drafts.survivals(["r0"])
    assert old[0] < 0.7 * new[0]


def test_in_a_lull_it_tries_again_rarely_and_notices_that_drafts_are_good():
    costs = machine(0.3)
    policy = AdaptiveLengths(costs, LIMIT, Survival([0.5]))
    poor = Simulation(costs, [0.0], context=128).play(policy, 2000, skipped=200)
    assert 0 < poor.drafts.total() - poor.drafts[0] < 0.05 * poor.drafts.total()
    good = Simulation(costs, [1.0], context=128).play(policy, 8000, skipped=7000)
    assert good.drafts.most_common(1)[0][0] >= 2


def test_copies_too_are_tried_again():
    costs = machine(0.1)
    policy = AdaptiveLengths(costs, WITH_COPIES, Survival([0.5], 0.2, [0.06]))
    world = Simulation(costs, [0.1] * 64, context=8192, copy_share=0.3)
    played = world.play(policy, 400)
    assert 0 < played.copies.total() < 0.2 * played.drafts.total()


def test_it_does_not_flutter_between_lengths_that_are_as_good():
    cell = ForwardCosts(1.0, 0.0, {1: 1.0, 2: 1.49})
    costs = RoundCosts((1,), (128,), {(1, 128): cell})
    policy = AdaptiveLengths(costs, Lengths(1, 0), Survival([0.5]))
    world = Simulation(costs, [0.5], context=128)
    choices = []
    for turn in range(60):
        choices.append(policy.choose(world.batch, [0], [CAP]).draft)
        accepted = turn % 2 if choices[-1] else 0
        world.batch.rows[0].trace.record(
            drafted=choices[-1], accepted=accepted, committed=accepted + 1
        )
        policy.observe(world.batch)
    assert sum(a != b for a, b in itertools.pairwise(choices)) <= 3


def test_positions_behind_an_end_teach_nothing():
    costs = machine(0.02)
    policy = AdaptiveLengths(costs, LIMIT, Survival([0.95, 0.05]))
    world = Simulation(costs, [0.9], context=128)
    before = policy.choose(world.batch, [0], [CAP]).draft
    for _ in range(50):  # a stop token at once; what was drafted behind it "was accepted"
        world.batch.rows[0].trace.record(drafted=5, accepted=5, committed=1)
        policy.observe(world.batch)
    assert policy.choose(world.batch, [0], [CAP]).draft == before


def test_a_prior_of_nothing_leaves_a_choice():
    policy = AdaptiveLengths(machine(0.05), WITH_COPIES, Survival(()))
    world = Simulation(machine(0.05), [0.5], context=128)
    chosen = policy.choose(world.batch, [4], [CAP])
    assert chosen.copy > 0
    assert math.isfinite(sum(chosen))
