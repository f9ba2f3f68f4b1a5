"""Typical acceptance: faster, and LOSSY. No pair is measured, registered or served with it.

A draft x is kept where p(x) > min(epsilon, delta exp(-H(p))), H being the entropy of the target's
distribution p at its position: whatever the target might well have said. Of a tree the longest path
of such drafts is kept. The token behind it is drawn from p, so a round always has one token of the
target's own. The committed tokens do NOT follow p: likely tokens are kept each time that they are
drafted. A row at temperature 0 has one token that it may say, and is decoded as ever.

Source: Cai et al. 2024 (arXiv 2401.10774), section 2.3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.decoding.acceptance import Proposal, Verdict
from draftsmith.decoding.batch import to_device
from draftsmith.decoding.distribution import Distribution, OneHot, draw
from draftsmith.decoding.tree import Tree, tensors_of

_EPSILON, _DELTA = 0.09, 0.3


def typical_lossy(
    p: Distribution,
    proposal: Proposal,
    _accept: Tensor,
    uniforms: Tensor,
    *,
    epsilon: float = _EPSILON,
    delta: float = _DELTA,
) -> Verdict:
    """Keep the longest path of drafts that are typical of the target; the first of several.

    Args:
        p: Target distributions at `drafts + 1` positions, or at the places of a tree.
        proposal: What was drafted.
        uniforms: `[rows, places]`; the one at the place of the next token is used.
        epsilon: What is more probable than this is always kept; below 1. 0 keeps whatever has a
            probability at all.
        delta: What is more probable than delta exp(-H) is kept, below 1.
    """
    tree = proposal.tree or Tree.chain(proposal.tokens.shape[1])
    depths, _, _, sees, _ = tensors_of(tree, proposal.tokens.device)
    is_refused = ~pad(_is_typical(p, proposal, tree, epsilon, delta), (1, 0), value=True)
    num_refused = is_refused.float() @ sees.T.float()  # on the path to each place
    is_whole = (num_refused == 0) & (depths <= proposal.counts[:, None])
    reached = torch.where(is_whole, depths, 0)
    place = reached.argmax(-1)
    next_token = draw(p, uniforms).gather(1, place[:, None]).squeeze(1)
    return Verdict(reached.amax(-1), next_token, _paths(tree, place.device)[place])


def _is_typical(
    p: Distribution, proposal: Proposal, tree: Tree, epsilon: float, delta: float
) -> Tensor:
    """By draft, bool `[rows, drafts]`: whether p at its parent's place would have it."""
    parents, tokens = tensors_of(tree, proposal.tokens.device).parents, proposal.tokens
    if isinstance(p, OneHot):
        return p.ids[:, parents] == tokens
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    certainty = torch.exp(-torch.special.entr(p.probs).sum(-1))  # [rows, places]
    least = (delta * certainty).clamp(max=epsilon)
    return p.probs[rows, parents, tokens] > least[:, parents]


def _paths(tree: Tree, device: torch.device) -> Tensor:
    """By place, int64 `[places, depth]`: the places on its path, and behind them itself again."""
    paths = [
        [*(node + 1 for node in prefix), *[place] * (tree.depth - len(prefix))]
        for place, prefix in enumerate(tree.prefixes)
    ]
    return to_device(paths, device)
