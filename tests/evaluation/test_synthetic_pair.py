"""Random weights with a stated acceptance: every decoder meets the same one, at any temperature."""

from __future__ import annotations

import pytest
import torch

from benchmarks.synthetic import SHAPES, build_pair, disagreeing, prompts
from draftsmith.decoding import DraftModelProposer, Engine, Request, SamplingParams
from draftsmith.decoding.trace import position_counts
from draftsmith.evaluation.arms import twin

STATED = 0.7
NUM_NEW = 60


@pytest.fixture(scope="module")
def pair():
    return build_pair("tiny", STATED, device=torch.device("cpu"), dtype=torch.float32, seed=1)


@pytest.fixture(scope="module")
def some_prompts(pair):
    return prompts(pair[0].config.vocab_size, 12, 9)


def decode(pair, some_prompts, temperature):
    target, draft = pair
    engine = Engine(target, DraftModelProposer(draft.model), max_rows=12, draft_length=3)
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=temperature)
    return engine.generate([Request(str(i), ids, params) for i, ids in enumerate(some_prompts)])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_are_accepted_as_stated_at_every_position(pair, some_prompts, temperature):
    results = decode(pair, some_prompts, temperature)
    counts = position_counts([result.trace for result in results], 3)
    assert min(counts.reached) > 100
    assert counts.conditional_acceptance == pytest.approx([STATED] * 3, abs=0.12)


def test_the_engine_commits_what_transformers_would(pair, some_prompts):
    target = twin(pair[0])
    inputs = torch.tensor(some_prompts)
    output = target.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NUM_NEW, do_sample=False
    )
    found = [result.token_ids for result in decode(pair, some_prompts, 0.0)]
    assert found == output[:, inputs.shape[1] :].tolist()
    assert all(len(set(tokens)) > NUM_NEW / 2 for tokens in found)  # a walk, not a loop


def test_the_temperature_leaves_hardly_any_chance_to_other_tokens(pair, some_prompts):
    logits = pair[0](torch.tensor(some_prompts)).logits[:, -1]
    assert float((logits / 0.8).softmax(-1).amax(-1).min()) > 0.99


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_permutations_disagree_in_exactly_the_share_that_was_asked_for(share):
    generator = torch.Generator().manual_seed(0)
    nexts = torch.randperm(400, generator=generator)
    other = disagreeing(nexts, share, generator)
    assert float((other != nexts).float().mean()) == share
    assert other.sort().values.equal(torch.arange(400))


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_shapes_are_consistent(shape):
    target, draft = SHAPES[shape]
    assert target.vocab == draft.vocab
    for size in (target, draft):
        assert size.hidden % size.heads == size.heads % size.key_heads == 0
