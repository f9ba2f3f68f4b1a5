from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from draftsmith.distillation.divergences import (
    divergence_of,
    forward_kl,
    jensen_shannon,
    negative_log_acceptance,
    overlap,
    reverse_kl,
    total_variation,
)
from tests.distillation.small_training import make_config

ROWS, ENTRIES = 7, 11
KEPT = torch.tensor([0, 3, 4, 9])
BETA = 0.3
LOSSES = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": partial(jensen_shannon, beta=BETA),
    "total_variation": total_variation,
    "acceptance": negative_log_acceptance,
}
every_loss = pytest.mark.parametrize("name", LOSSES)


@pytest.fixture
def logits():
    """Target and draft logits, float64 `[rows, entries]`."""
    generator = torch.Generator().manual_seed(0)
    return [3 * torch.randn(ROWS, ENTRIES, dtype=torch.float64, generator=generator) for _ in "pq"]


@pytest.fixture
def pair(logits):
    """Log-probabilities of target and draft."""
    return [side.log_softmax(-1) for side in logits]


@pytest.fixture
def trimmed(logits):
    """The target's over the kept entries, of a mass below one, the draft's normalised there."""
    return logits[0].log_softmax(-1)[:, KEPT], logits[1][:, KEPT].log_softmax(-1)


def plain_kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def plain_overlap(p, q):
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


def plain_mixture(p, q):
    r = [BETA * a + (1 - BETA) * b for a, b in zip(p, q, strict=True)]
    return BETA * plain_kl(p, r) + (1 - BETA) * plain_kl(q, r)


PLAIN = {
    "forward_kl": plain_kl,
    "reverse_kl": lambda p, q: plain_kl(q, p),
    "jensen_shannon": plain_mixture,
    "total_variation": lambda p, q: sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
    "acceptance": lambda p, q: -math.log(plain_overlap(p, q)),
}


def by_row(plain, pair):
    rows = zip(*(side.exp().tolist() for side in pair), strict=True)
    return torch.tensor([plain(p, q) for p, q in rows], dtype=torch.float64)


@pytest.mark.parametrize(
    ("ours", "plain"),
    [*((LOSSES[name], PLAIN[name]) for name in LOSSES), (overlap, plain_overlap)],
    ids=[*LOSSES, "overlap"],
)
def test_it_is_the_formula(pair, ours, plain):
    torch.testing.assert_close(ours(*pair), by_row(plain, pair))


@every_loss
def test_the_configuration_names_it(pair, name):
    chosen = divergence_of(make_config(loss=name, js_beta=BETA))
    assert torch.equal(chosen(*pair), LOSSES[name](*pair))


@every_loss
def test_leading_axes_and_the_dtype_are_kept(pair, name):
    log_p, log_q = (side.expand(2, ROWS, ENTRIES) for side in pair)
    result = LOSSES[name](log_p, log_q)
    assert result.shape == (2, ROWS)
    assert result.dtype == torch.float64
    assert LOSSES[name](log_p.float(), log_q.float()).dtype == torch.float32


@every_loss
def test_equal_distributions_diverge_by_nothing_and_overlap_wholly(pair, name):
    log_p = pair[0]
    assert LOSSES[name](log_p, log_p).abs().max() < 1e-14
    torch.testing.assert_close(overlap(log_p, log_p), torch.ones(ROWS, dtype=torch.float64))


@every_loss
def test_a_divergence_is_positive_for_distributions_that_differ(pair, name):
    assert (LOSSES[name](*pair) > 0.01).all()


# What the losses of two distributions on other tokens, 80 nats apart, come to.
DISJOINT = {
    "forward_kl": 80.0,
    "reverse_kl": 80.0,
    "jensen_shannon": -BETA * math.log(BETA) - (1 - BETA) * math.log(1 - BETA),
    "total_variation": 1.0,
    "acceptance": 80.0 - math.log(2),
}


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distributions_on_other_tokens_do_not_overlap(name, dtype):
    log_p = torch.tensor([[0.0, -80.0]], dtype=dtype).log_softmax(-1)
    log_q = log_p.flip(-1)
    assert overlap(log_p, log_q).item() < 1e-30
    assert LOSSES[name](log_p, log_q).item() == pytest.approx(DISJOINT[name], rel=1e-5)


def test_an_acceptance_too_small_for_the_dtype_still_pulls_the_draft_over():
    log_p = torch.tensor([[0.0, -300.0]]).log_softmax(-1)
    logits = torch.tensor([[-300.0, 0.0]], requires_grad=True)
    loss = negative_log_acceptance(log_p, logits.log_softmax(-1))
    loss.sum().backward()
    assert math.isfinite(loss.item())
    assert logits.grad[0, 0] < -0.1 < 0.1 < logits.grad[0, 1]
    flat = torch.tensor([[-300.0, 0.0]], requires_grad=True)
    total_variation(log_p, flat.log_softmax(-1)).sum().backward()
    assert flat.grad.abs().max() < 1e-30


@pytest.mark.parametrize("beta", [1e-6, 1 - 1e-6])
def test_the_mixture_tends_to_either_kl(pair, beta):
    value = jensen_shannon(*pair, beta=beta)
    scaled = value / min(beta, 1 - beta)
    expected = forward_kl(*pair) if beta < 0.5 else reverse_kl(*pair)
    torch.testing.assert_close(scaled, expected, rtol=1e-2, atol=1e-3)


def test_the_mixture_is_symmetric_when_its_sides_trade_places(pair):
    log_p, log_q = pair
    mirrored = jensen_shannon(log_q, log_p, beta=1 - BETA)
    torch.testing.assert_close(jensen_shannon(log_p, log_q, beta=BETA), mirrored)


def test_the_acceptance_rate_is_bounded_by_both_kls(pair):
    missed = total_variation(*pair)
    torch.testing.assert_close(missed, 1 - overlap(*pair))
    # Pinsker: the total variation is at most sqrt(KL / 2).
    for kl in (forward_kl(*pair), reverse_kl(*pair)):
        assert (missed <= (kl / 2).sqrt()).all()
    assert (negative_log_acceptance(*pair) >= missed).all()


def gradient(loss_of, logits):
    leaf = logits.clone().requires_grad_()
    loss_of(leaf).sum().backward()
    return leaf.grad


TEXTBOOK = {
    "forward_kl": lambda p, q: (p * (p / q).log()).sum(-1),
    "reverse_kl": lambda p, q: (q * (q / p).log()).sum(-1),
    "jensen_shannon": lambda p, q: (
        BETA * (p * (p / (BETA * p + (1 - BETA) * q)).log()).sum(-1)
        + (1 - BETA) * (q * (q / (BETA * p + (1 - BETA) * q)).log()).sum(-1)
    ),
    "total_variation": lambda p, q: (p - q).abs().sum(-1) / 2,
    "acceptance": lambda p, q: -torch.log(1 - (p - q).abs().sum(-1) / 2),
}


@every_loss
def test_the_gradient_is_that_of_the_textbook_formula(pair, logits, name):
    def textbook(z):
        return TEXTBOOK[name](pair[0].exp(), z.exp() / z.exp().sum(-1, keepdim=True))

    ours = gradient(lambda z: LOSSES[name](pair[0], z.log_softmax(-1)), logits[1])
    torch.testing.assert_close(ours, gradient(textbook, logits[1]))


@every_loss
def test_the_gradient_is_that_of_finite_differences_also_when_trimmed(trimmed, logits, name):
    start = logits[1][:, KEPT].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: LOSSES[name](trimmed[0], z.log_softmax(-1)), start, eps=1e-6, atol=1e-6
    )


@every_loss
def test_a_perfect_draft_is_pulled_nowhere(logits, name):
    log_p = logits[0].log_softmax(-1)
    ours = gradient(lambda z: LOSSES[name](log_p, z.log_softmax(-1)), logits[0])
    assert ours.abs().max() < 1e-12


def test_the_gradient_of_the_acceptance_is_that_of_the_variation_over_the_overlap(pair, logits):
    ours, plain = (
        gradient(lambda z, loss=loss: loss(pair[0], z.log_softmax(-1)), logits[1])
        for loss in (negative_log_acceptance, total_variation)
    )
    torch.testing.assert_close(ours, plain / overlap(*pair)[:, None])


# A trimmed vocabulary: how each loss treats the target's mass outside it.


def with_the_rest(trimmed):
    """p over the kept entries and the rest as one more, and q, which has nothing there."""
    p, q = (side.exp() for side in trimmed)
    rest = 1 - p.sum(-1, keepdim=True)
    return torch.cat([p, rest], -1), torch.cat([q, torch.zeros_like(rest)], -1)


def test_the_forward_kl_weighs_positions_by_the_mass_that_is_kept(trimmed, logits):
    log_p, log_q = trimmed
    mass = log_p.exp().sum(-1)
    assert (mass < 1).all()
    conditional = log_p - mass.log()[:, None]
    expected = mass * forward_kl(conditional, log_q) + mass * mass.log()
    torch.testing.assert_close(forward_kl(log_p, log_q), expected)
    ours = gradient(lambda z: forward_kl(log_p, z.log_softmax(-1)), logits[1][:, KEPT])
    torch.testing.assert_close(ours, mass[:, None] * log_q.exp() - log_p.exp())


def test_the_reverse_kl_is_the_full_one_and_weighs_all_positions_alike(trimmed, logits):
    log_p, log_q = trimmed
    log_mass = log_p.logsumexp(-1)
    conditional = log_p - log_mass[:, None]
    torch.testing.assert_close(reverse_kl(log_p, log_q), reverse_kl(conditional, log_q) - log_mass)
    ours, alone = (
        gradient(lambda z, p=p: reverse_kl(p, z.log_softmax(-1)), logits[1][:, KEPT])
        for p in (log_p, conditional)
    )
    torch.testing.assert_close(ours, alone)


def test_the_mixture_leaves_a_constant_of_the_rest_out(trimmed):
    p, q = with_the_rest(trimmed)
    r = BETA * p + (1 - BETA) * q
    full = BETA * torch.xlogy(p, p / r).sum(-1) + (1 - BETA) * torch.xlogy(q, q / r).sum(-1)
    constant = -BETA * p[:, -1] * math.log(BETA)
    torch.testing.assert_close(jensen_shannon(*trimmed, beta=BETA) + constant, full)


def test_the_variation_and_the_acceptance_are_the_full_ones(trimmed):
    p, q = with_the_rest(trimmed)
    full = (p - q).abs().sum(-1) / 2
    torch.testing.assert_close(total_variation(*trimmed), full)
    torch.testing.assert_close(negative_log_acceptance(*trimmed), -torch.log(1 - full))


def test_tokens_outside_a_trimmed_vocabulary_cap_the_overlap(trimmed):
    log_p, _ = trimmed
    mass = log_p.exp().sum(-1)
    best = log_p - mass.log()[:, None]
    torch.testing.assert_close(overlap(log_p, best), mass)
    torch.testing.assert_close(negative_log_acceptance(log_p, best), -mass.log())
