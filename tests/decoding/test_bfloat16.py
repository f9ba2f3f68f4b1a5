"""In bfloat16 a token may differ from that of the request alone only where it was a near-tie.

A forward over more rows or positions rounds otherwise. So two runs are compared up to their first
difference, and there the target's own law says how near the two tokens were.
"""

from __future__ import annotations

import copy

import pytest
import torch

from draftsmith.decoding import DraftModelProposer, Engine, NoProposer, Request, SamplingParams
from draftsmith.decoding.randomness import Purpose, request_key, uniform
from draftsmith.decoding.tree import Tree
from draftsmith.decoding.tree_choice import TreesByRows

NUM_REQUESTS, NUM_NEW = 24, 24
_ULP = 2.0**-8  # of bfloat16, relative
_TIE = 8 * _ULP  # what rounding of a few layers can move a logit by, over the largest logit
_EDGE = 0.05  # and a cumulative probability


@pytest.fixture(scope="module")
def models(llama):
    return [copy.deepcopy(model).bfloat16() for model in (llama.target, llama.draft)]


def requests_at(temperature):
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=temperature)
    prompts = [[1 + (11 * i + 5 * j) % 60 for j in range(3 + i % 9)] for i in range(NUM_REQUESTS)]
    return [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]


@torch.inference_mode()
def law_behind(reference, token_ids):
    """Logits of the next token in float64, by a full forward of the bfloat16 weights."""
    logits = reference(torch.tensor([token_ids]), use_cache=False).logits
    return logits[0, -1].double()


def is_near_tie(logits, one, other, temperature, number):
    if temperature == 0:
        return abs(logits[one] - logits[other]) <= _TIE * logits.abs().max()
    cumulative = (logits / temperature).softmax(-1).cumsum(-1)
    low, high = sorted((one, other))
    return bool((cumulative[low:high] - number).abs().max() <= _EDGE)


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_neighbours_and_drafts_change_near_ties_only(llama, models, temperature, is_tree):
    target, draft = models
    reference = copy.deepcopy(llama.reference).bfloat16().float()
    requests = requests_at(temperature)
    plain = Engine(target, NoProposer(), max_rows=1, draft_length=0, verify="match")
    alone = plain.generate(requests)
    trees = TreesByRows({8: Tree.comb([3, 2])} if is_tree else {})
    proposer = DraftModelProposer(draft, trees=trees)
    engine = Engine(target, proposer, max_rows=8, draft_length=3, verify="match")
    num_equal = 0
    for request, mine, together in zip(requests, alone, engine.generate(requests), strict=True):
        pairs = list(zip(mine.token_ids, together.token_ids, strict=True))
        place = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if place is None:
            num_equal += 1
            continue
        text = request.prompt_ids + mine.token_ids[:place]
        key = torch.tensor([request_key(0, request.request_id)])
        number = float(uniform(key, torch.tensor([len(text)]), Purpose.SAMPLE))
        assert is_near_tie(law_behind(reference, text), *pairs[place], temperature, number)
    assert num_equal >= NUM_REQUESTS / 2
