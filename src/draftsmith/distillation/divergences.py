"""Divergences between target and draft at one position, as pure functions of log-probabilities.

The draft's vocabulary may be a part of the target's: the target's log-probabilities are then those
entries of the full distribution, with a mass m below one, and q is zero outside, which no training
can change. Each function says what it makes of m. All keep the dtype that they are given and
reduce the last axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from draftsmith.distillation.settings import DistillConfig

Divergence = Callable[[Tensor, Tensor], Tensor]


def divergence_of(config: DistillConfig) -> Divergence:
    """The divergence that `config.loss` names."""
    match config.loss:
        case "forward_kl":
            return forward_kl
        case "reverse_kl":
            return reverse_kl
        case "jensen_shannon":
            return partial(jensen_shannon, beta=config.js_beta)
        case "total_variation":
            return total_variation
        case "acceptance":
            return negative_log_acceptance


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_x p(x) (log p(x) - log q(x)).

    With a trimmed vocabulary the sum is m KL(p / m || q) + m log m: positions count by their
    covered mass.

    Args:
        log_p: `[..., entries]`.
        log_q: Same shape, normalised.

    Source: Hinton et al. 2015 (arXiv 1503.02531), equation 2.
    """
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_x q(x) (log q(x) - log p(x)), the divergence over the full vocabulary.

    With a trimmed one it is KL(q || p / m) - log m: a constant more, so the covered mass does not
    weigh positions.

    Args:
        log_p: `[..., entries]`.
        log_q: Same shape, normalised.

    Source: Gu et al. 2023 (arXiv 2306.08543), at one position.
    """
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor, *, beta: float) -> Tensor:
    """The mixture beta KL(p || r) + (1 - beta) KL(q || r) with r = beta p + (1 - beta) q.

    Divided by beta it tends to the forward KL as beta goes to 0, divided by 1 - beta to the reverse
    one as beta goes to 1. With a trimmed vocabulary, tokens outside have r = beta p: they add
    -beta (1 - m) log(beta), which no training can change, and are left out.

    Args:
        log_p: `[..., entries]`.
        log_q: Same shape, normalised.
        beta: In (0, 1).

    Source: Agarwal et al. 2023 (arXiv 2306.13649), generalised Jensen-Shannon divergence.
    """
    log_r = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * forward_kl(log_p, log_r) + (1 - beta) * forward_kl(log_q, log_r)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1 - sum_x min(p(x), q(x)), the share that is not accepted, in [0, 1].

    Exact over the full vocabulary: tokens outside a trimmed one add nothing to the sum, so the
    least value is 1 - m.

    Args:
        log_p: `[..., entries]`.
        log_q: Same shape, normalised.
    """
    return 1 - overlap(log_p, log_q)


def negative_log_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """-log sum_x min(p(x), q(x)): the negative log-likelihood of an acceptance, at least 0.

    Its gradient is that of the total variation divided by the overlap, so positions where the draft
    is far off are not left behind. Summed in logarithms, so that an overlap too small for the dtype
    still has a gradient. With a trimmed vocabulary the least value is -log m.

    Args:
        log_p: `[..., entries]`.
        log_q: Same shape, normalised.

    Source: Samarin et al. 2026 (arXiv 2602.23881).
    """
    return -log_p.minimum(log_q).logsumexp(-1)


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Acceptance rate alpha of a position: sum_x min(p(x), q(x)) over the last axis, in [0, 1]."""
    return log_p.exp().minimum(log_q.exp()).sum(-1)
