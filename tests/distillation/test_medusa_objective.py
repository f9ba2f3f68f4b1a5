"""Each head is held to the law of its own distance, and is trained as it drafts."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch.nn.functional import silu

from draftsmith.distillation import objective as chunks
from draftsmith.distillation.batches import TrainingSequence, collate
from draftsmith.distillation.divergences import divergence_of, forward_kl
from draftsmith.distillation.medusa_objective import MedusaObjective
from draftsmith.distillation.signals import CachedSignals, OnlineSignals, Signal
from draftsmith.distillation.trainer import distill
from draftsmith.drafts.medusa import HeadShape, build_heads
from draftsmith.drafts.student import head_logits
from tests.distillation.small_training import are_equal, make_config, some_sequences, weights_of
from tests.drafts.small_models import KINDS, make_target

CPU = torch.device("cpu")
SHAPE = HeadShape(num_heads=3, num_blocks=1, own_heads=False)
OWN = dataclasses.replace(SHAPE, own_heads=True)
TOKEN_IDS = torch.arange(0, 48, 2)


def make_objective(
    target, *, shape=SHAPE, token_ids=None, divergence=forward_kl, head_decay=0.8, noise=0.0
):
    heads = build_heads(target, shape, token_ids)
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        if parameter.requires_grad:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data.float() + noise * drawn
    target_head = partial(head_logits, heads)
    return MedusaObjective(heads, target_head, divergence, head_decay=head_decay)


def train(target, folder, *, objective=None, sequences=None, signals=None, **changes):
    objective = make_objective(target) if objective is None else objective
    on_step = changes.pop("on_step", lambda _step, _metrics: None)
    outcome = distill(
        objective,
        some_sequences() if sequences is None else sequences,
        OnlineSignals(target) if signals is None else signals,
        config=make_config(**changes),
        checkpoints=folder,
        on_step=on_step,
    )
    return objective.heads, outcome


# -------------------------------------------------------------------------------- what is minimised


def plain_sums(objective, target, sequences, divergence, *, token_ids, head_decay=0.8):
    """Loss and alpha position by position in float64, from whole forwards of the target."""
    heads, num_heads = objective.heads, objective.heads.num_heads
    weights = [head_decay**k for k in range(num_heads)]
    loss = agreed = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        with torch.no_grad():
            tokens = torch.tensor([sequence.token_ids])
            output = target.base_model(input_ids=tokens).last_hidden_state[0]
            laws = target(input_ids=tokens).logits[0].double().log_softmax(-1)
        laws = laws if token_ids is None else laws[:, token_ids]
        last, overlaps = len(sequence.token_ids) - 2, []
        for t in range(sequence.start, last + 1):
            for k in range(1, num_heads + 1):
                if t + k > last:
                    continue
                state = output[t].double()
                for block in heads.heads[k - 1]:
                    weight, bias = block.linear.weight.double(), block.linear.bias.double()
                    state = state + silu(weight @ state + bias)
                rows = heads.rows[k - 1] if heads.shape.own_heads else heads.lm_head
                logits = rows.weight.double() @ state
                if rows.bias is not None:
                    logits = logits + rows.bias.double()
                log_q = logits.log_softmax(-1)
                share = weights[k - 1] / sum(weights)
                loss = loss + share * divergence(laws[t + k], log_q)
                if k == 1:
                    overlaps.append(torch.minimum(laws[t + 1].exp(), log_q.exp()).sum())
        if overlaps:
            agreed = agreed + torch.stack(overlaps).mean() * sequence.num_predicted
    return loss, agreed


@pytest.mark.parametrize("token_ids", [None, TOKEN_IDS], ids=["whole", "trimmed"])
@pytest.mark.parametrize("shape", [SHAPE, OWN, HeadShape(2, 2, own_heads=False)])
@pytest.mark.parametrize("loss", ["forward_kl", "acceptance"])
def test_value_and_gradient_are_the_plain_ones(monkeypatch, target, shape, loss, token_ids):
    monkeypatch.setitem(chunks._LOGITS_PER_CHUNK, "cpu", 4 * 48)  # several chunks
    divergence = divergence_of(make_config(loss=loss))
    objective = make_objective(
        target, shape=shape, token_ids=token_ids, divergence=divergence, noise=0.1
    )
    # One of the responses has a single position: no head is held to it.
    sequences = [*some_sequences(), TrainingSequence([3, 1, 4, 1], 2)]
    batch = collate(sequences, range(len(sequences)))
    ours = objective(batch, OnlineSignals(target).signal(batch), CPU)
    plain = plain_sums(objective, target, sequences, divergence, token_ids=token_ids)
    trained = [p for p in objective.parameters() if p.requires_grad]
    near = {"atol": 2e-4, "rtol": 2e-4}
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other.float(), **near)
    torch.testing.assert_close(
        torch.autograd.grad(ours[0], trained), torch.autograd.grad(plain[0], trained), **near
    )


def test_a_head_learns_the_token_at_its_own_distance():
    """A target that says 0 1 2 3 4 5 0 1 ...: head k, where it says c, has to say c + k."""
    target = make_target("llama")
    objective = make_objective(target, shape=HeadShape(3, 2, own_heads=False), head_decay=1.0)
    heads, cycle = objective.heads, 6
    said = [place % cycle for place in range(14)]  # behind each position
    # States that the output rows read as one token with near certainty.
    certain = 40 * target.lm_head.weight[:cycle]
    laws = head_logits(target, certain)
    assert laws.argmax(-1).tolist() == list(range(cycle))
    assert laws.softmax(-1).amax(-1).min() > 0.95
    hidden = certain[said]
    signal = Signal(hidden, head_logits(target, hidden).logsumexp(-1))
    batch = collate([TrainingSequence([0, *said], 0)], [0])
    optimizer = torch.optim.AdamW([p for p in heads.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss, _ = objective(batch, signal, CPU)
        (loss / len(said)).backward()
        optimizer.step()
    with torch.no_grad():
        guesses = heads.logits(heads.run(certain, 3)).argmax(-1)
    assert guesses.tolist() == [[(c + k) % cycle for k in (1, 2, 3)] for c in range(cycle)]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_say_the_targets_next_token_have_its_overlap_with_the_law_behind(kind):
    """An untrained head 1 at t says p[t], and is held to p[t + 1]."""
    target = make_target(kind)
    objective = make_objective(target, shape=HeadShape(1, 1, own_heads=False))
    (sequence,) = some_sequences(1)
    batch = collate([sequence], [0])
    with torch.no_grad():
        _, agreed = objective(batch, OnlineSignals(target).signal(batch), CPU)
        p = target(input_ids=batch.token_ids).logits[0].softmax(-1)[sequence.start : -1]
    expected = p[:-1].minimum(p[1:]).sum(-1).mean()
    assert float(agreed) / sequence.num_predicted == pytest.approx(float(expected), rel=1e-4)


def test_padding_and_company_change_nothing(target):
    objective, signals = make_objective(target, noise=0.1), OnlineSignals(target)
    sequences = some_sequences()
    with torch.no_grad():
        together = objective(b := collate(sequences, [0, 5]), signals.signal(b), CPU)
        alone = [objective(b := collate(sequences, [i]), signals.signal(b), CPU) for i in (0, 5)]
    for place in (0, 1):
        assert float(together[place]) == pytest.approx(
            sum(float(a[place]) for a in alone), rel=1e-4
        )


@pytest.mark.parametrize("shape", [SHAPE, OWN])
def test_a_batch_that_masks_nothing_costs_nothing(target, shape, tmp_path):
    sequences = some_sequences()
    signals = CachedSignals(tmp_path, target, sequences, max_gb=1.0)
    batch = collate(sequences, [0])
    batch = dataclasses.replace(batch, mask=torch.zeros_like(batch.mask))
    loss, agreed = make_objective(target, shape=shape)(batch, signals.signal(batch), CPU)
    loss.backward()
    assert (loss.item(), agreed.item()) == (0.0, 0.0)


# ----------------------------------------------------------------------------------------- training


def test_all_that_is_trained_gets_a_gradient_and_nothing_else(target):
    objective = make_objective(target, shape=OWN)
    batch = collate(some_sequences(), [0, 3])
    loss, _ = objective(batch, OnlineSignals(target).signal(batch), CPU)
    loss.backward()
    moved = {name for name, p in objective.named_parameters() if p.grad is not None}
    assert moved == {name for name, p in objective.named_parameters() if p.requires_grad}
    assert all(p.grad.any() for p in objective.parameters() if p.requires_grad)
    assert any("rows" in name for name in moved)


def test_eight_sequences_are_learned_by_heart(target, tmp_path):
    target.lm_head.weight.data *= 3  # sharper laws, so that untrained heads are often wrong
    objective = make_objective(target, shape=HeadShape(3, 2, own_heads=False))
    _, outcome = train(
        target,
        tmp_path,
        objective=objective,
        sequences=some_sequences(8),
        steps=200,
        batch_size=8,
        learning_rate=1e-2,
    )
    assert outcome.history[0]["alpha"] < 0.6
    assert outcome.history[-1]["alpha"] > 0.9


def test_a_cached_signal_trains_as_an_online_one(target, tmp_path):
    sequences = some_sequences()
    cached = CachedSignals(tmp_path / "signals", target, sequences, max_gb=1.0)
    whole = {"batch_size": len(sequences)}
    _, first = train(target, tmp_path / "a", signals=cached, **whole)
    _, second = train(target, tmp_path / "b", **whole)
    losses = [[entry["loss"] for entry in outcome.history] for outcome in (first, second)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("mixed_precision", ["bf16", "no"])
@pytest.mark.parametrize("shape", [SHAPE, OWN])
def test_a_bfloat16_target_trains_in_either_precision(shape, mixed_precision, tmp_path):
    target = make_target("llama", dtype=torch.bfloat16)
    objective = make_objective(target, shape=shape)
    heads, outcome = train(
        target, tmp_path, objective=objective, batch_size=6, mixed_precision=mixed_precision
    )
    assert outcome.history[-1]["loss"] < outcome.history[0]["loss"]
    assert {p.dtype for p in heads.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_killed_run_ends_like_an_unbroken_one(target, accumulation, tmp_path):
    options = {"checkpoint_steps": 4, "gradient_accumulation": accumulation}

    def kill(step, _metrics):
        if step == 5:
            raise KeyboardInterrupt

    whole, _ = train(target, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        train(target, tmp_path / "run", on_step=kill, **options)
    resumed, outcome = train(target, tmp_path / "run", **options)
    assert outcome.resumed_at == 4
    assert are_equal(weights_of(resumed), weights_of(whole))
