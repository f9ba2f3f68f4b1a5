"""Lossless acceptance: which drafts are kept, and what is drawn in their place.

Pure functions of distributions and uniforms. A draft x is kept when u q(x) < p(x), strictly, so
that a token of probability 0 is never kept; after the first rejection one token comes from the
residual norm(max(0, p - q)), after a full accept the bonus token comes from p. The committed tokens
then follow p exactly.

Source: Leviathan et al. 2023, theorem 1; Chen et al. 2023, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decoding.distribution import (
    Dense,
    Distribution,
    OneHot,
    densify,
    probability,
    sample,
)


@dataclass(frozen=True)
class Proposal:
    """Drafts of one round.

    Attributes:
        tokens: int64 `[rows, drafts]`, ids of the target's vocabulary.
        drawn_from: The distribution each token was drawn from, `[rows, drafts]` positions.
        counts: int64 `[rows]`: how many of a row's drafts count; the rest is padding.
        entries: int64 `[rows, drafts]`: the tokens' places in a trimmed vocabulary, else None.
        from_text: The rows whose drafts were copied from their text; no model guessed them.
    """

    tokens: Tensor
    drawn_from: Distribution
    counts: Tensor
    entries: Tensor | None = None
    from_text: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Verdict:
    """`num_accepted` int64 `[rows]` drafts are kept, then `next_token` int64 `[rows]` follows."""

    num_accepted: Tensor
    next_token: Tensor


# Target laws, drafts, uniforms for acceptance, uniforms for draws.
Verify = Callable[[Distribution, Proposal, Tensor, Tensor], Verdict]


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability min(1, p / q) that a token drawn with probability q > 0 is kept."""
    return torch.clamp(p / q, max=1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) along the last axis; p where that is all zero (p is q up to rounding).

    Args:
        p: Target probabilities `[..., vocab]`.
        q: Draft probabilities, same shape.
    """
    rest = (p - q).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / torch.where(mass > 0, mass, 1.0), p)


def verify(p: Distribution, proposal: Proposal, accept: Tensor, draw: Tensor) -> Verdict:
    """Keep the longest accepted prefix of every row and choose the token behind it.

    Args:
        p: Target distributions at `drafts + 1` positions.
        proposal: What was drafted, and from what.
        accept: Uniforms `[rows, drafts]` for the acceptance tests.
        draw: Uniforms `[rows, drafts + 1]`; the one at the position of the next token is used.
    """
    num_drafts = proposal.tokens.shape[1]
    p_tokens = probability(p, proposal.tokens)
    q_tokens = probability(proposal.drawn_from, proposal.tokens, proposal.entries)
    kept = accept.to(p_tokens.dtype) * q_tokens < p_tokens
    num_accepted = longest_prefix(kept, proposal.counts)
    if isinstance(p, OneHot):
        # The residual of a one-hot p is p whatever q is: max(0, p - q) is zero off p's only id, and
        # all zero falls back to p.
        return Verdict(num_accepted, p.ids.gather(1, num_accepted[:, None]).squeeze(1))
    rows = torch.arange(len(num_accepted), device=num_accepted.device)
    p_next = p.probs[rows, num_accepted]
    if num_drafts:
        rejected = num_accepted < proposal.counts
        place = num_accepted.clamp(max=num_drafts - 1)
        q_next = densify(_at(proposal.drawn_from, rows, place), p_next.shape[-1], p_next.dtype)
        p_next = torch.where(rejected[:, None], residual(p_next, q_next[:, 0]), p_next)
    return Verdict(num_accepted, sample(p_next, draw[rows, num_accepted]))


def longest_prefix(kept: Tensor, counts: Tensor) -> Tensor:
    """How many drafts of a row stand before the first that is not kept: int64 `[rows]`.

    Args:
        kept: bool `[rows, drafts]`.
        counts: int64 `[rows]`: what stands behind so many drafts is padding.
    """
    places = torch.arange(kept.shape[1], device=kept.device)
    return (kept & (places < counts[:, None])).long().cumprod(-1).sum(-1)


def _at(distribution: Distribution, rows: Tensor, places: Tensor) -> Distribution:
    """The distribution of one position a row, `[rows, 1]` positions."""
    if isinstance(distribution, OneHot):
        return OneHot(distribution.ids[rows, places][:, None])
    return Dense(distribution.probs[rows, places][:, None], distribution.token_ids)
