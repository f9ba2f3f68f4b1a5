from __future__ import annotations

import pytest
import torch

from draftsmith.decoding.batch import Batch, Row, pad_prompts
from draftsmith.decoding.randomness import request_key
from draftsmith.decoding.request import Request, SamplingParams

CPU = torch.device("cpu")


def row(name: str, token_ids: list[int], **params: float) -> Row:
    values = SamplingParams(**{"max_new_tokens": 5, **params})
    return Row(Request(name, list(token_ids), values), list(token_ids))


def batch(*rows: Row) -> Batch:
    made = Batch(CPU, vocab_size=64)
    for one in rows:
        made.append(one)
    return made


def test_the_tail_holds_the_last_tokens_at_their_own_positions():
    tokens, positions = batch(row("a", [5, 6, 7, 8]), row("b", [1, 2])).tail(2)
    assert tokens.tolist() == [[7, 8], [1, 2]]
    assert positions.tolist() == [[2, 3], [0, 1]]


def test_a_tail_longer_than_a_row_repeats_its_first_token_at_position_zero():
    tokens, positions = batch(row("a", [5, 6, 7]), row("b", [1])).tail(3)
    assert tokens.tolist() == [[5, 6, 7], [1, 1, 1]]
    assert positions.tolist() == [[0, 1, 2], [0, 0, 0]]


def test_a_removed_rows_place_is_taken_by_the_last_row():
    three = batch(row("a", [1]), row("b", [2]), row("c", [3]))
    assert three.remove(0) == 2
    assert [r.request.request_id for r in three.rows] == ["c", "b"]
    assert three.remove(1) == 1
    assert [r.request.request_id for r in three.rows] == ["c"]


def test_a_bias_is_exact_while_another_thread_loads_a_model():
    """Who loads one sets torch's default dtype for the whole process."""
    biased = batch(row("a", [1], logit_bias=((3, 0.1),)))
    logits = torch.zeros(1, 1, 64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        adjusted = biased.adjust(logits, torch.zeros(1, 0, dtype=torch.long))
    finally:
        torch.set_default_dtype(before)
    assert adjusted[0, 0, 3] == torch.tensor(0.1, dtype=torch.float32)


@pytest.mark.parametrize("remove", [True, False])
def test_tensors_follow_the_rows(remove):
    changing = batch(row("a", [1], temperature=0.5), row("b", [2, 2], top_k=3))
    assert changing.sampling.temperature.tolist() == [0.5, 0.0]
    if remove:
        changing.remove(0)
    else:
        changing.append(row("c", [3, 3, 3], seed=4, temperature=0.25, top_p=0.5))
    rows = changing.rows
    params = [r.request.params for r in rows]
    assert changing.sampling.temperature.tolist() == [p.temperature for p in params]
    assert changing.sampling.top_k.tolist() == [p.top_k for p in params]
    assert changing.sampling.top_p.tolist() == [p.top_p for p in params]
    keys = [request_key(r.request.params.seed, r.request.request_id) for r in rows]
    assert changing.keys.tolist() == keys
    assert changing.lengths().tolist() == [len(r.token_ids) for r in rows]
    assert changing.span == max(len(r.token_ids) for r in rows)


@pytest.mark.parametrize(
    ("params", "is_greedy", "is_truncated"),
    [
        ({}, True, False),
        ({"temperature": 0.5}, False, False),
        ({"temperature": 0.5, "top_k": 3}, False, True),
        ({"temperature": 0.5, "top_p": 0.9}, False, True),
    ],
)
def test_one_sampled_or_truncated_row_makes_the_batch_so(params, is_greedy, is_truncated):
    mixed = batch(row("a", [1]), row("b", [1], **params)).sampling
    assert mixed.is_greedy is is_greedy
    assert mixed.is_truncated is is_truncated


def test_a_row_counts_what_it_may_still_commit():
    one = row("a", [1, 2, 3])
    assert (one.num_new, one.num_remaining) == (0, 5)
    one.token_ids += [4, 5]
    assert (one.num_new, one.num_remaining) == (2, 3)


def test_prompts_are_padded_on_the_right():
    tokens, positions = pad_prompts([[4, 5, 6], [7], []], CPU)
    assert tokens.tolist() == [[4, 5, 6], [7, 0, 0], [0, 0, 0]]
    assert positions.tolist() == [[0, 1, 2]] * 3


def test_a_piece_of_a_prompt_keeps_its_positions():
    tokens, positions = pad_prompts([[4, 5], [7]], CPU, start=30)
    assert tokens.tolist() == [[4, 5], [7, 0]]
    assert positions.tolist() == [[30, 31]] * 2
