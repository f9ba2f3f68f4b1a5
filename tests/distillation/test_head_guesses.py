"""How often a head's r-th guess is right, against cases that are counted by hand."""

from __future__ import annotations

import pytest
import torch

from draftsmith.corpus.rollouts import Rollout
from draftsmith.distillation import head_guesses
from draftsmith.distillation.head_guesses import (
    NUM_RANKS,
    guess_rates,
    held_out_guesses,
    rank_hits,
)
from draftsmith.drafts.medusa import HeadShape, build_heads
from tests.drafts.small_models import VOCAB_SIZE, make_target

SHAPE = HeadShape(num_heads=3, num_blocks=1, own_heads=False)
LOGITS = torch.tensor(
    [
        [0.0, 3.0, 2.0, 1.0],  # guesses 1 2 3 0
        [9.0, 3.0, 2.0, 5.0],  # 0 3 1 2
        [0.0, 1.0, 2.0, 3.0],  # 3 2 1 0
    ]
)


def test_ranks_are_counted_exactly():
    hits = rank_hits(LOGITS, torch.tensor([2, 0, 1]))
    assert hits.tolist() == [1, 1, 1, 0] + [0] * (NUM_RANKS - 4)


def test_tokens_outside_the_drafts_vocabulary_are_no_guess():
    ids = torch.tensor([5, 6, 7, 9])  # guesses 6 7 9 5, then 5 9 6 7, then 9 7 6 5
    hits = rank_hits(LOGITS, torch.tensor([1, 9, 9]), ids)
    assert hits.tolist() == [1, 1, 0, 0] + [0] * (NUM_RANKS - 4)


def test_rates_add_up_to_a_rank():
    hits = torch.zeros(2, NUM_RANKS, dtype=torch.long)
    hits[0, :4] = torch.tensor([4, 2, 1, 1])
    rates = guess_rates(hits, torch.tensor([16, 0]))
    assert rates["positions"] == [16, 0]
    assert rates["rank_shares"][0][:5] == [0.25, 0.125, 0.0625, 0.0625, 0.0]
    assert rates["hit_rates"][0] == {"1": 0.25, "2": 0.375, "3": 0.4375, "5": 0.5, "10": 0.5}
    assert rates["rank_shares"][1] == [0.0] * NUM_RANKS


def rollout(name, temperature, prompt, response):
    return Rollout(name, "", temperature, prompt, response, finished=True)


@pytest.fixture
def llama():
    return make_target("llama")


def draw(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (size,), generator=generator).tolist()


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_guesses_are_those_of_single_forwards(llama, is_trimmed):
    """Every token of a response that a round's state can be k + 1 places before."""
    token_ids = torch.arange(0, VOCAB_SIZE, 2) if is_trimmed else None
    heads = build_heads(llama, SHAPE, token_ids)
    for parameter in heads.heads.parameters():
        parameter.data += 0.3 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(4)
        )
    rollouts = [
        rollout("a", 0.0, draw(4, 1), draw(6, 2)),
        rollout("b", 0.0, draw(1, 3), draw(9, 4)),
        rollout("warm", 0.7, draw(4, 5), draw(9, 6)),
        rollout("empty", 0.0, draw(3, 7), []),
    ]
    found = held_out_guesses(heads, llama, token_ids, rollouts)
    ids = torch.arange(VOCAB_SIZE) if token_ids is None else token_ids
    for head in range(3):
        counts, judged = [0] * NUM_RANKS, 0
        for one in rollouts[:2]:
            text, length = one.prompt_ids + one.response_ids, len(one.prompt_ids)
            for place in range(length, len(text)):
                state = place - head - 2
                if state < max(length - 2, 0):
                    continue
                with torch.no_grad():
                    prefix = torch.tensor([text[: state + 1]])
                    hidden = llama.base_model(prefix).last_hidden_state[0, -1]
                    logits = heads.logits(heads.run(hidden, 3))[head]
                order = ids[logits.sort(descending=True).indices].tolist()
                judged += 1
                if text[place] in order[:NUM_RANKS]:
                    counts[order.index(text[place])] += 1
        assert found["positions"][head] == judged
        assert found["rank_shares"][head] == pytest.approx([count / judged for count in counts])
    assert found["temperature"] == 0.0
    assert sum(map(sum, found["rank_shares"])) > 0


def test_so_many_positions_are_judged_and_from_all_over(llama, monkeypatch):
    monkeypatch.setattr(head_guesses, "_MAX_POSITIONS", 30)
    heads = build_heads(llama, SHAPE, None)
    rollouts = [rollout(str(i), 0.7, draw(3, i), draw(10, i)) for i in range(12)]
    found = held_out_guesses(heads, llama, None, rollouts)
    assert found["positions"] == [30, 27, 24]
    assert found["temperature"] == 0.7


def test_without_responses_there_is_nothing_to_say(llama):
    assert held_out_guesses(build_heads(llama, SHAPE, None), llama, None, []) == {}
