"""Lengths that vary from round to round, by nothing that the round samples, change no answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from transformers import TemperatureLogitsWarper

from draftsmith.decoding import (
    NO_TREES,
    ChosenTree,
    DraftModelProposer,
    Engine,
    FixedLengths,
    Lengths,
    LookupFirstProposer,
    Request,
    SamplingParams,
    Tree,
)
from draftsmith.decoding.trace import block_efficiency
from tests.decoding.laws import exact_law, p_value

LONGEST = Lengths(draft=3, copy=4)
SHAPES = (Tree.comb([3, 1]), None, Tree((0, 0, 1, 2)), Tree.comb([2, 3, 2]))


@dataclass(frozen=True)
class Varying(FixedLengths):
    """Other lengths in nearly every round."""

    def choose(self, batch, copies, caps):
        turn = len(batch) + batch.span
        return Lengths(turn % (self.limit.draft + 1), (3 * turn) % (self.limit.copy + 1))


@dataclass(frozen=True)
class VaryingTrees(Varying):
    """And other trees, or none."""

    trees: ChosenTree = field(default_factory=lambda: ChosenTree(SHAPES[-1].num_nodes))

    def choose(self, batch, copies, caps):
        num_rounds = sum(row.trace.num_rounds for row in batch.rows)
        self.trees.tree = SHAPES[(batch.span + num_rounds) % len(SHAPES)]
        return super().choose(batch, copies, caps)


POLICIES = {"chains": Varying(LONGEST), "trees": VaryingTrees(LONGEST)}


def engine_of(small, lengths, *, max_rows):
    draft = DraftModelProposer(small.draft, trees=getattr(lengths, "trees", NO_TREES))
    proposer = LookupFirstProposer(draft, lengths, min_ngram=1)
    return Engine(small.target, proposer, max_rows=max_rows, draft_length=max(lengths.limit))


def lengths_of(results, *, from_text):
    traces = [result.trace for result in results]
    rounds = [r for trace in traces for r in zip(trace.drafted, trace.from_text, strict=True)]
    return {drafted for drafted, is_copy in rounds if is_copy == from_text}


def ranks_of(results):
    return {rank for result in results for path in result.trace.ranks for rank in path}


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_output_does_not_depend_on_the_chosen_lengths(
    llama, continue_greedily, ragged_prompts, policy
):
    params = SamplingParams(max_new_tokens=40)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(ragged_prompts)]
    results = engine_of(llama, POLICIES[policy], max_rows=3).generate(requests)
    expected = [continue_greedily(llama.reference, prompt, 40) for prompt in ragged_prompts]
    assert [result.token_ids for result in results] == expected
    assert lengths_of(results, from_text=False) == {0, 1, 2, 3}
    assert len(lengths_of(results, from_text=True)) > 1
    assert block_efficiency([result.trace for result in results]) > 1.1
    assert (max(ranks_of(results), default=0) > 0) == (policy == "trees")


@pytest.mark.parametrize("policy", POLICIES)
def test_sampled_output_keeps_the_targets_law_while_lengths_vary(family, policy):
    small = family("llama", vocab_size=8, noise=0.3)
    params = SamplingParams(max_new_tokens=3, temperature=0.9)
    prompt = [6, 7, 4, 6]
    requests = [Request(str(i), prompt, params) for i in range(6000)]
    results = engine_of(small, POLICIES[policy], max_rows=500).generate(requests)
    assert len(lengths_of(results, from_text=False) | lengths_of(results, from_text=True)) > 2
    law = exact_law(small.reference, prompt, 3, TemperatureLogitsWarper(0.9))
    assert (max(ranks_of(results), default=0) > 0) == (policy == "trees")
    assert p_value(results, law) > 1e-3


@pytest.mark.parametrize("copy", [0, 2])
def test_copies_are_no_longer_than_their_own_limit(llama, copy):
    lengths = FixedLengths(Lengths(draft=3, copy=copy))
    prompt = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]
    request = Request("a", prompt, SamplingParams(max_new_tokens=20))
    (result,) = engine_of(llama, lengths, max_rows=1).generate([request])
    assert max(lengths_of([result], from_text=True), default=0) == copy
