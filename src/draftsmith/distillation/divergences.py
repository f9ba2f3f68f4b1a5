"""Divergences between target and draft at one position, as pure functions of log-probabilities.

The draft's vocabulary may be a part of the target's: the target's log-probabilities are then those
entries of the full distribution, with a mass below one, and q is zero outside, which no training
can change.
"""

from __future__ import annotations

from torch import Tensor


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_x p(x) (log p(x) - log q(x)) over the last axis.

    With a trimmed vocabulary p has a mass m < 1 and the sum is m KL(p / m || q) + m log m:
    positions count by their covered mass.

    Args:
        log_p: `[..., entries]`.
        log_q: Same shape, normalised.

    Source: Hinton et al. 2015 (arXiv 1503.02531), equation 2.
    """
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Acceptance rate alpha of a position: sum_x min(p(x), q(x)) over the last axis, in [0, 1]."""
    return log_p.exp().minimum(log_q.exp()).sum(-1)
