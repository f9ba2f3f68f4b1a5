"""Lossless acceptance: which drafts are kept, and what is drawn in their place.

Pure functions of distributions and uniforms. A draft x is kept when u q(x) < p(x), strictly, so
that a token of probability 0 is never kept; after the first rejection one token comes from the
residual norm(max(0, p - q)), after a full accept the bonus token comes from p. The committed tokens
then follow p exactly.

Of a tree the guesses of a node are certain, and its path is the one that the target's own draws
follow; or they were drawn without replacement, and are tried one after the other: after each
rejection p becomes the residual and q loses the token that was tried. Rows of both kinds may stand
in one batch.

Source: Leviathan et al. 2023, theorem 1; Chen et al. 2023, algorithm 2; for trees Miao et al. 2024
(arXiv 2305.09781), section 4.3; without replacement Jeon et al. 2024 (arXiv 2402.14160).
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
from draftsmith.decoding.distribution import draw as drawn
from draftsmith.decoding.tree import Tree, follow, tensors_of


@dataclass(frozen=True)
class Proposal:
    """Drafts of one round.

    Attributes:
        tokens: int64 `[rows, drafts]`, ids of the target's vocabulary.
        drawn_from: The distribution each token was drawn from, `[rows, drafts]` positions. Of a
            tree `[rows, depth]`: siblings were drawn from their depth's without replacement.
        counts: int64 `[rows]`: how many of a row's drafts count; the rest is padding. Of a tree
            how long its paths may be.
        entries: int64 `[rows, drafts]`: the tokens' places in a trimmed vocabulary, else None.
        from_text: The rows whose drafts were copied from their text; no model guessed them.
        tree: Shape of the drafts; None is a chain.
        certain: bool `[rows]`: of a tree whose guesses were drawn, the rows whose guesses were not;
            None is none of them.
    """

    tokens: Tensor
    drawn_from: Distribution
    counts: Tensor
    entries: Tensor | None = None
    from_text: frozenset[int] = frozenset()
    tree: Tree | None = None
    certain: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """Which drafts are kept, and what follows them.

    Attributes:
        num_accepted: int64 `[rows]`: how many.
        next_token: int64 `[rows]`: the token behind them.
        path: int64 `[rows, depth]`: places in the tree of those that are kept; None of a chain.
    """

    num_accepted: Tensor
    next_token: Tensor
    path: Tensor | None = None


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
    if proposal.tree is not None:
        if isinstance(p, OneHot) or isinstance(proposal.drawn_from, OneHot):
            return along_tree(drawn(p, draw), proposal, proposal.tree)
        return through_tree(p.probs, proposal, proposal.tree, accept, draw)
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


def along_tree(draws: Tensor, proposal: Proposal, tree: Tree) -> Verdict:
    """Keep the path that the target's draws follow.

    Args:
        draws: int64 `[rows, places]`: one at every place of the tree.
        proposal: What was drafted.
        tree: Its shape.
    """
    num_accepted, path = follow(draws, proposal.tokens, proposal.counts, tree)
    return Verdict(num_accepted, draws.gather(1, path[:, -1:]).squeeze(1), path)


def through_tree(
    p: Tensor, proposal: Proposal, tree: Tree, accept: Tensor, draw: Tensor
) -> Verdict:
    """Try the siblings at every place in their order, and go on behind the first that is kept.

    A guess that is certain was drawn from a law that knows no other token: it is kept with the
    target's probability.

    Args:
        p: Target probabilities `[rows, places, vocab]`.
        proposal: Drawn without replacement, from laws by depth, but for rows that are certain.
        tree: Its shape.
        accept: Uniforms `[rows, nodes]`, independent ones for siblings.
        draw: Uniforms `[rows, places]`; the one at the place of the next token is used.
    """
    rows = torch.arange(len(p), device=p.device)
    children = tensors_of(tree, p.device).children
    place = torch.zeros_like(proposal.counts)
    num_accepted, path, law = torch.zeros_like(place), [], p[:, 0]
    for depth, num_guesses in enumerate(tree.guesses):
        q = densify(_at(proposal.drawn_from, rows, place * 0 + depth), p.shape[-1], p.dtype)[:, 0]
        parent, is_open = place, (num_accepted == depth) & (proposal.counts > depth)
        for rank in range(num_guesses):
            child = children[parent, rank]
            is_tried = is_open & (place == parent) & (child > 0)
            node = (child - 1).clamp(min=0)
            token = proposal.tokens[rows, node][:, None]
            if proposal.certain is not None:
                alone = torch.zeros_like(q).scatter_(1, token, 1.0)
                q = torch.where(proposal.certain[:, None], alone, q)
            q_token, p_token = q.gather(1, token)[:, 0], law.gather(1, token)[:, 0]
            is_kept = is_tried & (accept[rows, node].to(p.dtype) * q_token < p_token)
            is_kept &= q_token > 0  # the law has run out of tokens
            is_refused = (is_tried & ~is_kept)[:, None]
            law = torch.where(is_refused, residual(law, q), law)
            law = torch.where(is_kept[:, None], p[rows, child], law)
            q = torch.where(is_refused, _without(q, token), q)
            place = torch.where(is_kept, child, place)
        num_accepted = num_accepted + (place != parent)
        path.append(place)
    return Verdict(num_accepted, sample(law, draw[rows, place]), torch.stack(path, 1))


def _without(q: Tensor, token: Tensor) -> Tensor:
    """The law of the next sibling: without `token` `[rows, 1]`; all zero where nothing is left."""
    rest = q.scatter(1, token, 0.0)
    mass = rest.sum(-1, keepdim=True)
    return rest / torch.where(mass > 0, mass, 1.0)


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
