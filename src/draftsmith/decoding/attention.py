"""Attention over a slot cache.

Grouped-query heads are packed into the query axis, so keys and values are never repeated.
Registered with Transformers' `AttentionInterface`; models are not modified. Soft-capped scores
(Gemma 2) and attention sinks (gpt-oss) are computed; a keyword that changes the result and is not
known (a position bias) is refused: ignoring it would be silently wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from draftsmith.errors import DecodingError

NAME = "draftsmith_slots"

# Keywords that Transformers passes along and that do not change what this function computes: the
# mask already holds window and causality.
_HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)


def _refuse_unknown(module: nn.Module, keywords: dict[str, Any]) -> None:
    unknown = {name for name, value in keywords.items() if value is not None} - _HARMLESS
    if unknown:
        raise DecodingError(
            f"attention of {type(module).__name__}",
            found=f"keyword arguments {sorted(unknown)} that change its result",
            expected="scaled dot-product attention, at most with soft-capping or sinks",
            remedy="use a target of a supported family (see docs/support.md)",
        )


def slot_attention(  # noqa: PLR0913, PLR0917  the signature is Transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Scaled dot-product attention with packed query groups.

    Worked example: 6 query heads over 2 key heads make groups of 3. A query of 4 positions
    `[1, 6, 4, dim]` becomes `[1, 2, 12, dim]`, group after group, under a mask `[1, 1, 12, slots]`.

    Args:
        module: The calling attention layer.
        query: `[rows, query_heads, positions, dim]`.
        key: `[rows, key_heads, slots, dim]`.
        value: `[rows, key_heads, slots, dim]`.
        attention_mask: Additive or boolean, `[rows, 1, positions, slots]`, or already packed
            `[rows, 1, groups * positions, slots]`; None is causal.
        dropout: Probability; 0 when decoding.
        scaling: Factor of the scores; None is 1 / sqrt(dim).
        softcap: Scores s become softcap * tanh(s / softcap).
        s_aux: `[query_heads]`: score of each head's sink, which takes attention and gives nothing.
        **keywords: What the model passes besides.

    Returns:
        `[rows, positions, query_heads, dim]` and None.
    """
    _refuse_unknown(module, keywords)
    rows, query_heads, positions, dim = query.shape
    key_heads, slots = key.shape[1:3]
    groups = query_heads // key_heads
    if attention_mask is None:
        attention_mask = causal_mask(positions, slots, device=query.device)
    if attention_mask.shape[2] != groups * positions:
        attention_mask = pack_mask(attention_mask, groups)
    query = query.reshape(rows, key_heads, -1, dim)
    if softcap is None and s_aux is None:
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
        )
    else:
        scores = query @ key.mT * (dim**-0.5 if scaling is None else scaling)
        attended = _shares(scores, attention_mask, softcap, s_aux) @ value
    return attended.reshape(rows, query_heads, positions, -1).transpose(1, 2).contiguous(), None


def _shares(scores: Tensor, mask: Tensor, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Attention of `scores` `[rows, key_heads, groups * positions, slots]`."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    is_boolean = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, -torch.inf) if is_boolean else scores + mask
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
    rows, key_heads, packed, _ = scores.shape
    groups = len(sinks) // key_heads
    column = sinks.to(scores.dtype).reshape(1, key_heads, groups, 1)
    column = column.repeat(rows, 1, 1, packed // groups).reshape(rows, key_heads, packed, 1)
    shares = torch.cat([scores, column], -1).softmax(-1, dtype=torch.float32)
    return shares[..., :-1].to(scores.dtype)


def causal_mask(positions: int, slots: int, *, device: torch.device) -> Tensor:
    """Boolean `[1, 1, positions, slots]`: the last `positions` slots are the queries' own."""
    query = torch.arange(positions, device=device)[:, None] + (slots - positions)
    return (torch.arange(slots, device=device)[None] <= query)[None, None]


def pack_mask(mask: Tensor, groups: int) -> Tensor:
    """Repeat a mask by query group.

    `[rows, 1, positions, slots]` becomes `[rows, 1, groups * positions, slots]`.
    """
    return mask.repeat(1, 1, groups, 1) if groups > 1 else mask


def register() -> None:
    """Make `slot_attention` known to Transformers under `NAME`; repeated calls change nothing."""
    AttentionInterface.register(NAME, slot_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
