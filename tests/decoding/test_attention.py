from __future__ import annotations

import pytest
import torch
from torch import nn

from draftsmith.decoding.attention import causal_mask, pack_mask, register, slot_attention
from draftsmith.errors import DecodingError

ROWS, DIM, SLOTS, POSITIONS = 3, 8, 16, 4
PLAIN = nn.Module()


def tensors(query_heads: int, key_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(query_heads * 10 + key_heads)
    query = torch.randn(ROWS, query_heads, POSITIONS, DIM, generator=generator)
    key, value = torch.randn(2, ROWS, key_heads, SLOTS, DIM, generator=generator)
    return query, key, value


def ragged_mask() -> torch.Tensor:
    """Boolean `[rows, 1, positions, slots]`: rows stand apart and see a window of 6 slots."""
    positions = torch.tensor([0, 5, 12])[:, None] + torch.arange(POSITIONS)
    slots = torch.arange(SLOTS)
    query = positions[:, None, :, None]
    return (slots <= query) & (slots > query - 6)


def repeated_attention(query, key, value, mask, scaling):
    """The textbook: keys and values repeated for every query head."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    attended = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return attended.transpose(1, 2)


@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 4), (4, 2), (6, 2), (6, 1)])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("is_additive", [True, False])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_packed_groups_equal_repeated_keys_and_values(
    query_heads, key_heads, is_packed, is_additive, scaling
):
    query, key, value = tensors(query_heads, key_heads)
    visible = ragged_mask()
    want = repeated_attention(query, key, value, visible, scaling)
    mask = visible
    if is_additive:
        mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    if is_packed:
        mask = pack_mask(mask, query_heads // key_heads)
    got, weights = slot_attention(PLAIN, query, key, value, mask, scaling=scaling)
    torch.testing.assert_close(got, want)
    assert weights is None


def test_without_a_mask_attention_is_causal_over_the_last_slots():
    query, key, value = tensors(6, 2)
    visible = torch.ones(POSITIONS, SLOTS).tril(SLOTS - POSITIONS).bool()
    assert causal_mask(POSITIONS, SLOTS, device=query.device)[0, 0].equal(visible)
    got, _ = slot_attention(PLAIN, query, key, value, None)
    torch.testing.assert_close(got, repeated_attention(query, key, value, visible, None))


def test_masked_slots_do_not_matter():
    query, key, value = tensors(4, 2)
    visible = ragged_mask()
    before, _ = slot_attention(PLAIN, query, key, value, visible)
    hidden = ~visible.any(2)[:, :, :, None]  # slots that no query of the row sees
    key, value = key.masked_fill(hidden, 1e6), value.masked_fill(hidden, -1e6)
    after, _ = slot_attention(PLAIN, query, key, value, visible)
    assert after.equal(before)


@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("is_additive", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_soft_capping_and_sinks_are_those_of_the_textbook(
    query_heads, key_heads, is_additive, softcap, has_sinks
):
    query, key, value = tensors(query_heads, key_heads)
    visible = ragged_mask()
    sinks = torch.linspace(-1, 2, query_heads) if has_sinks else None
    keys = key.repeat_interleave(query_heads // key_heads, 1)
    scores = query @ keys.transpose(2, 3) * 0.3
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if has_sinks:
        total = total + sinks.exp()[None, :, None, None]
    values = value.repeat_interleave(query_heads // key_heads, 1)
    want = (weights / total @ values).transpose(1, 2)
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf) if is_additive else visible
    got, _ = slot_attention(
        PLAIN, query, key, value, mask, scaling=0.3, softcap=softcap, s_aux=sinks
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("keyword", ["position_bias", "a_future_keyword"])
def test_a_keyword_that_changes_the_result_is_refused_by_name(keyword):
    query, key, value = tensors(4, 2)
    with pytest.raises(DecodingError, match=keyword):
        slot_attention(PLAIN, query, key, value, None, **{keyword: 1.0})


@pytest.mark.parametrize(
    ("keyword", "value"), [("position_bias", None), ("sliding_window", 1), ("position_ids", 1)]
)
def test_keywords_without_a_value_or_without_effect_are_accepted(keyword, value):
    query, key, values = tensors(4, 2)
    slot_attention(PLAIN, query, key, values, None, **{keyword: value})


def test_registering_again_changes_nothing():
    register()
    register()
