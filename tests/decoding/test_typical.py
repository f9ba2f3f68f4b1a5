"""Typical acceptance: what it keeps, that it is lossy indeed, and that nothing of it counts."""

from __future__ import annotations

import inspect
import math
import random

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from draftsmith.decoding import DraftModelProposer, Engine, NoProposer, Request, SamplingParams
from draftsmith.decoding.acceptance import Proposal
from draftsmith.decoding.distribution import Dense, OneHot
from draftsmith.decoding.trace import accepted_fraction, block_efficiency, position_counts
from draftsmith.decoding.tree import Tree
from draftsmith.decoding.typical import typical_lossy
from draftsmith.errors import DecodingError
from tests.decoding.laws import exact_law, p_value
from tests.decoding.test_engine_greedy import greedy_requests
from tests.decoding.test_tree_engine import BUSHY, COMB, engine_with

VOCAB = 8
PROMPT = [6, 7, 7, 4, 7]
TEMPERATURE = 0.7
SIGNIFICANCE = 1e-3
LOSSY = {"verify": "typical_lossy"}


def kept(p, tokens, counts=None, **thresholds):
    """How many drafts of a chain are kept where p is the same at all places."""
    tokens = torch.tensor([tokens])
    num_drafts = tokens.shape[1]
    law = Dense(torch.tensor(p, dtype=torch.float64).expand(1, num_drafts + 1, -1))
    counts = torch.tensor([num_drafts if counts is None else counts])
    proposal = Proposal(tokens, OneHot(tokens), counts)
    draws = torch.zeros(1, num_drafts + 1)
    return int(typical_lossy(law, proposal, draws[:, 1:], draws, **thresholds).num_accepted)


def test_a_token_is_kept_that_is_probable_enough_for_how_sure_the_target_is():
    sure = [0.9, 0.08, 0.02]  # exp(-H) is 0.69, and 0.3 of it more than 0.09
    assert [kept(sure, [token]) for token in range(3)] == [1, 0, 0]
    unsure = [0.25] * 4  # exp(-H) is 0.25, and 0.3 of it 0.075
    assert kept(unsure, [3, 2, 1, 0]) == 4
    flat = [0.07] * 12 + [0.16]
    certainty = math.exp(sum(share * math.log(share) for share in flat))
    assert 0.3 * certainty < flat[0]
    assert kept(flat, [4]) == 1


def test_a_round_ends_at_the_first_draft_that_is_not_typical_and_at_the_padding():
    sure = [0.9, 0.08, 0.02]
    assert kept(sure, [0, 0, 1, 0]) == 2
    assert kept(sure, [0, 0, 0, 0], counts=1) == 1
    assert kept(sure, [0], counts=0) == 0


def test_at_its_ends_it_keeps_all_that_can_be_said_or_nothing():
    p = [0.6, 0.399, 0.001, 0.0]
    assert kept(p, [2, 1, 0], epsilon=0.0) == 3
    assert kept(p, [3], epsilon=0.0) == 0
    assert kept(p, [0], epsilon=1.0, delta=math.e) == 0
    assert kept(p, [2], delta=0.0) == 1


def test_behind_the_drafts_stands_a_draw_of_the_targets():
    p = Dense(torch.tensor([[[0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]]).expand(3, 3, 3))
    drafts = torch.tensor([[2, 0], [0, 2], [0, 0]])
    draws = torch.tensor([[0.95, 0.2, 0.0]]).expand(3, 3)
    verdict = typical_lossy(p, Proposal(drafts, OneHot(drafts), torch.full((3,), 2)), draws, draws)
    assert verdict.num_accepted.tolist() == [0, 1, 2]
    assert verdict.next_token.tolist() == [1, 0, 2]


def longest_by_hand(tree, p, tokens, count):
    """The first of the longest paths of typical drafts, by a walk over all nodes."""
    paths = {0: []}
    for node, parent in enumerate(tree.parents, start=1):
        entropy = -sum(share * math.log(share) for share in p[parent] if share)
        least = min(0.09, 0.3 * math.exp(-entropy))
        is_kept = parent in paths and p[parent][tokens[node - 1]] > least
        if is_kept and len(paths[parent]) < count:
            paths[node] = [*paths[parent], node]
    return max(paths.values(), key=len)


def test_the_longest_path_of_a_tree_is_kept():
    chance = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for _ in range(200):
        tree = Tree(tuple(chance.randint(0, place) for place in range(chance.randint(1, 7))))
        logits = 2 * torch.randn(2, tree.num_nodes + 1, 4, generator=generator)
        p = logits.double().softmax(-1)
        tokens = torch.randint(4, (2, tree.num_nodes), generator=generator)
        counts = torch.tensor([tree.depth, chance.randint(0, tree.depth)])
        draws = torch.rand(2, tree.num_nodes + 1, generator=generator)
        verdict = typical_lossy(
            Dense(p), Proposal(tokens, OneHot(tokens), counts, tree=tree), draws[:, 1:], draws
        )
        for row in range(2):
            path = longest_by_hand(tree, p[row].tolist(), tokens[row].tolist(), int(counts[row]))
            found = int(verdict.num_accepted[row])
            assert verdict.path[row, :found].tolist() == path
            place = path[-1] if path else 0
            mass_before = p[row, place].cumsum(0) - p[row, place]
            token = int(verdict.next_token[row])
            assert mass_before[token] <= draws[row, place] + 1e-6
            lengths.add(found)
    assert lengths >= {0, 1, 2, 3}


# ------------------------------------------------------------------------------ through the engine


@pytest.fixture(scope="module")
def small(family):
    return family("llama", vocab_size=VOCAB, noise=0.3)


@pytest.fixture(scope="module")
def law(small):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE)])
    return exact_law(small.reference, PROMPT, 3, warpers)


def sampled(engine, count=4000):
    params = SamplingParams(max_new_tokens=3, temperature=TEMPERATURE)
    return engine.generate([Request(str(i), PROMPT, params) for i in range(count)])


def chains(models, **options):
    proposer = DraftModelProposer(models.draft)
    return Engine(models.target, proposer, max_rows=2000, draft_length=2, **options)


def trees_of(models, **options):
    return engine_with(models, Tree.comb([2, 2]), rows=2000, **options)


@pytest.mark.parametrize("build", [chains, trees_of], ids=["chain", "tree"])
def test_it_is_lossy_and_faster_where_the_lossless_rule_is_neither(small, law, build):
    lossless, lossy = sampled(build(small)), sampled(build(small, **LOSSY))
    assert p_value(lossless, law) > SIGNIFICANCE
    assert p_value(lossy, law) < 1e-6
    fractions = [accepted_fraction([r.trace for r in found]) for found in (lossless, lossy)]
    assert fractions[1] > fractions[0]


def test_without_drafts_nothing_is_lost(small, law):
    engine = Engine(small.target, NoProposer(), max_rows=2000, draft_length=0, **LOSSY)
    assert p_value(sampled(engine), law) > SIGNIFICANCE


@pytest.mark.parametrize("tree", [None, COMB, BUSHY], ids=["chain", "comb", "bushy"])
@pytest.mark.parametrize("is_alone", [True, False])
def test_greedy_requests_keep_the_targets_tokens(
    llama, continue_greedily, ragged_prompts, tree, is_alone
):
    expected = [continue_greedily(llama.reference, prompt, 20) for prompt in ragged_prompts]
    requests = greedy_requests(ragged_prompts)
    if not is_alone:
        params = SamplingParams(max_new_tokens=20, temperature=0.9)
        requests += [Request(f"s{i}", prompt, params) for i, prompt in enumerate(ragged_prompts)]
    chain = Tree.chain(4)
    results = engine_with(llama, tree or chain, rows=10, **LOSSY).generate(requests)
    assert [r.token_ids for r in results[: len(expected)]] == expected
    assert 0.05 < accepted_fraction([r.trace for r in results]) < 0.95


# -------------------------------------------------------------------------- only where it was asked


def test_it_is_off_unless_it_is_named(llama):
    assert inspect.signature(Engine).parameters["verify"].default == "rejection"
    (result,) = chains(llama).generate([Request("a", PROMPT, SamplingParams(max_new_tokens=4))])
    assert not result.trace.is_lossy


def test_it_carries_no_logits_processors(llama):
    request = Request(
        "a",
        PROMPT,
        SamplingParams(max_new_tokens=4, temperature=1.0),
        logits_processors=[TemperatureLogitsWarper(0.5)],
    )
    with pytest.raises(DecodingError, match="TemperatureLogitsWarper"):
        chains(llama, **LOSSY).generate([request])


def test_nothing_is_counted_of_what_it_decoded(llama):
    requests = greedy_requests([[5, 9, 2], [7]])
    lossy = [r.trace for r in chains(llama, **LOSSY).generate(requests)]
    lossless = [r.trace for r in chains(llama).generate(requests)]
    for count in (block_efficiency, lambda traces: position_counts(traces, 2)):
        count(lossless)
        with pytest.raises(DecodingError, match="1 of 3 requests that a lossy engine decoded"):
            count([*lossless, lossy[0]])


def test_nor_of_a_request_that_went_on_after_it_was_put_back(llama):
    engine = chains(llama, **LOSSY)
    engine.open(64)
    engine.submit(greedy_requests([[5, 9, 2]], num_new=30))
    engine.step()
    engine.preempt("0")
    engine.step()
    assert engine.abort("0").trace.is_lossy
