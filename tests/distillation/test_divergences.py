from __future__ import annotations

import math

import pytest
import torch

from draftsmith.distillation.divergences import forward_kl, overlap

ROWS, ENTRIES = 7, 11


@pytest.fixture
def logits():
    """Target and draft logits, float64 `[rows, entries]`."""
    generator = torch.Generator().manual_seed(0)
    return [3 * torch.randn(ROWS, ENTRIES, dtype=torch.float64, generator=generator) for _ in "pq"]


def plain_kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def plain_overlap(p, q):
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize(("ours", "plain"), [(forward_kl, plain_kl), (overlap, plain_overlap)])
def test_it_is_the_formula(logits, ours, plain):
    log_p, log_q = (side.log_softmax(-1) for side in logits)
    expected = [
        plain(p, q) for p, q in zip(log_p.exp().tolist(), log_q.exp().tolist(), strict=True)
    ]
    torch.testing.assert_close(ours(log_p, log_q), torch.tensor(expected, dtype=torch.float64))


def test_leading_axes_are_kept(logits):
    log_p, log_q = (side.log_softmax(-1).expand(2, ROWS, ENTRIES) for side in logits)
    assert forward_kl(log_p, log_q).shape == (2, ROWS)
    assert overlap(log_p, log_q).shape == (2, ROWS)


def test_equal_distributions_diverge_by_nothing_and_overlap_wholly(logits):
    log_p = logits[0].log_softmax(-1)
    assert forward_kl(log_p, log_p).abs().max() == 0
    torch.testing.assert_close(overlap(log_p, log_p), torch.ones(ROWS, dtype=torch.float64))


def test_distributions_on_other_tokens_do_not_overlap():
    log_p = torch.tensor([[0.0, -80.0]]).log_softmax(-1)
    log_q = torch.tensor([[-80.0, 0.0]]).log_softmax(-1)
    assert overlap(log_p, log_q).item() < 1e-30
    assert forward_kl(log_p, log_q).item() == pytest.approx(80.0)


def test_kl_is_not_negative_and_bounds_the_overlap(logits):
    log_p, log_q = (side.log_softmax(-1) for side in logits)
    kl = forward_kl(log_p, log_q)
    assert (kl >= 0).all()
    # Pinsker: 1 - alpha is the total variation, at most sqrt(KL / 2).
    assert (1 - overlap(log_p, log_q) <= (kl / 2).sqrt()).all()


def gradient(loss_of, logits):
    leaf = logits.clone().requires_grad_()
    loss_of(leaf).sum().backward()
    return leaf.grad


def test_the_gradient_is_that_of_the_textbook_formula(logits):
    log_p = logits[0].log_softmax(-1)
    p = log_p.exp()

    def textbook(z):
        q = z.exp() / z.exp().sum(-1, keepdim=True)
        return (p * torch.log(p / q)).sum(-1)

    ours = gradient(lambda z: forward_kl(log_p, z.log_softmax(-1)), logits[1])
    torch.testing.assert_close(ours, gradient(textbook, logits[1]))
    torch.testing.assert_close(ours, logits[1].softmax(-1) - p)


def test_a_trimmed_target_weighs_by_the_mass_it_keeps(logits):
    kept = torch.tensor([0, 3, 4, 9])
    log_p = logits[0].log_softmax(-1)[:, kept]
    log_q = logits[1][:, kept].log_softmax(-1)
    mass = log_p.exp().sum(-1)
    assert (mass < 1).all()
    conditional = log_p - mass.log()[:, None]
    expected = mass * forward_kl(conditional, log_q) + mass * mass.log()
    torch.testing.assert_close(forward_kl(log_p, log_q), expected)
    ours = gradient(lambda z: forward_kl(log_p, z.log_softmax(-1)), logits[1][:, kept])
    torch.testing.assert_close(ours, mass[:, None] * log_q.exp() - log_p.exp())


def test_tokens_outside_a_trimmed_vocabulary_cap_the_overlap(logits):
    kept = torch.tensor([0, 3, 4, 9])
    log_p = logits[0].log_softmax(-1)[:, kept]
    best = (log_p - log_p.exp().sum(-1).log()[:, None]).exp().log()
    torch.testing.assert_close(overlap(log_p, best), log_p.exp().sum(-1))
