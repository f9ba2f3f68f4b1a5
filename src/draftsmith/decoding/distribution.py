"""Next-token distributions after all sampling parameters, and what verification does with them.

Logits become probabilities in one place, and the object that a token was drawn from is the one that
verification reads. Temperature 0 is a one-hot distribution. `OneHot` stores it as its only id;
`Dense` stores probabilities, optionally over a trimmed vocabulary. Pure functions: they keep the
dtype they are given.

Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters of a batch, one entry a row.

    Attributes:
        temperature: float32 `[rows]`, at least 0; 0 means one-hot.
        top_k: int64 `[rows]`; 0 is off.
        top_p: float64 `[rows]` in (0, 1]; 1 is off.
        is_greedy: Every row has temperature 0 (known on the host).
        is_truncated: Some row uses top-k or top-p (known on the host).
        min_p: float32 `[rows]` in [0, 1); None where no row uses it.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    is_greedy: bool
    is_truncated: bool
    min_p: Tensor | None = None


@dataclass(frozen=True)
class OneHot:
    """All mass on one id of the target's vocabulary. `ids` is int64 `[rows, positions]`."""

    ids: Tensor


@dataclass(frozen=True)
class Dense:
    """Probabilities `[rows, positions, entries]`.

    Entry j stands for id `token_ids[j]`, or for id j without a map.
    """

    probs: Tensor
    token_ids: Tensor | None = None


Distribution = OneHot | Dense


def distribution(
    logits: Tensor, sampling: SamplingTensors, token_ids: Tensor | None = None
) -> Distribution:
    """The distribution that the sampling parameters make of `logits`.

    Args:
        logits: `[rows, positions, entries]`, float32 (float64 in tests).
        sampling: Parameters, one entry a row.
        token_ids: int64 `[entries]`: the target's id of each entry of a trimmed vocabulary; None is
            the identity.
    """
    if sampling.is_greedy:
        ids = logits.argmax(-1)
        return OneHot(ids if token_ids is None else token_ids[ids])
    temperature = sampling.temperature[:, None, None].to(logits.dtype)
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature)
    if sampling.is_truncated:
        scaled = _truncate(scaled, sampling)
    if sampling.min_p is not None:
        shares = scaled.softmax(-1)
        least = sampling.min_p[:, None, None].to(shares.dtype) * shares.amax(-1, keepdim=True)
        scaled = scaled.masked_fill(shares < least, -torch.inf)
    probs = scaled.softmax(-1)
    top = logits.argmax(-1, keepdim=True)
    at_top = torch.where(greedy, 1.0, probs.gather(-1, top))
    return Dense(probs.masked_fill_(greedy, 0.0).scatter_(-1, top, at_top), token_ids)


def _truncate(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Top-k, then top-p, in the order and with the ties of Transformers; outside is -inf."""
    entries = logits.shape[-1]
    ascending = logits.sort(-1)
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, entries).clamp(1, entries)
    index = (entries - top_k)[:, None, None].expand(*logits.shape[:-1], 1)
    smallest = ascending.values.gather(-1, index)
    kept = ascending.values.masked_fill(ascending.values < smallest, -torch.inf)
    cumulative = kept.softmax(-1).cumsum(-1)
    top_p = sampling.top_p[:, None, None]
    # Rounded last, as in Transformers: in float32 1 - 0.6 is below 0.4 and keeps one entry more.
    removed = (cumulative <= (1 - top_p).to(logits.dtype)) & (top_p < 1)
    removed[..., -1] = False
    kept = kept.masked_fill(removed, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(-1, ascending.indices, kept)


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw by the inverse of the cumulative sum: one uniform a row, no noise over the vocabulary.

    Args:
        probs: `[..., entries]`, non-negative, not all zero; need not sum to one.
        uniforms: `[...]` in [0, 1).

    Returns:
        int64 `[...]`: an entry of positive probability. `right=True` and a threshold strictly below
        the total keep zero-probability entries out: with probs [0, 1, 0] the sums are [0, 1, 1] and
        every u in [0, 1) finds entry 1. Where probs are NaN it is the last entry, so that an index
        is never out of range.
    """
    cumulative = probs.cumsum(-1)
    total = cumulative[..., -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniforms.unsqueeze(-1).to(probs.dtype) * total, below)
    entries = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return entries.clamp(max=probs.shape[-1] - 1)


def draw(distribution: Distribution, uniforms: Tensor) -> Tensor:
    """One token of every position: int64 ids of the target's vocabulary, `[rows, positions]`."""
    if isinstance(distribution, OneHot):
        return distribution.ids
    entries = sample(distribution.probs, uniforms)
    return entries if distribution.token_ids is None else distribution.token_ids[entries]


def probability(
    distribution: Distribution, tokens: Tensor, entries: Tensor | None = None
) -> Tensor:
    """Probability of `tokens` (int64 `[rows, positions]`), same shape.

    Args:
        distribution: Over at least as many positions as `tokens`; later ones are ignored.
        tokens: Ids of the target's vocabulary.
        entries: Where the tokens stand in a trimmed vocabulary; needed exactly when there is a map.
    """
    positions = tokens.shape[1]
    if isinstance(distribution, OneHot):
        return (distribution.ids[:, :positions] == tokens).to(torch.float32)
    index = tokens if distribution.token_ids is None else entries
    assert index is not None, "a trimmed distribution is read by entry"
    return distribution.probs[:, :positions].gather(-1, index.unsqueeze(-1)).squeeze(-1)


def densify(distribution: Distribution, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Probabilities over the whole vocabulary, `[rows, positions, vocab_size]`."""
    if isinstance(distribution, OneHot):
        shape = (*distribution.ids.shape, vocab_size)
        zeros = torch.zeros(shape, dtype=dtype, device=distribution.ids.device)
        return zeros.scatter_(-1, distribution.ids.unsqueeze(-1), 1.0)
    probs = distribution.probs
    if distribution.token_ids is None:
        return probs
    full = probs.new_zeros(*probs.shape[:-1], vocab_size)
    full[..., distribution.token_ids] = probs
    return full
