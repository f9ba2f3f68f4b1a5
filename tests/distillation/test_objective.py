from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.distillation import objective
from draftsmith.distillation.batches import collate
from draftsmith.distillation.divergences import divergence_of, forward_kl, overlap
from draftsmith.distillation.objective import StudentObjective, recompute_layers, sum_in_chunks
from draftsmith.distillation.signals import OnlineSignals
from draftsmith.drafts.student import build_student, head_logits, layer_prefix
from tests.distillation.small_training import make_config, make_student, some_sequences
from tests.drafts.small_models import KINDS, make_target

POSITIONS, WIDTH, ENTRIES = 13, 3, 20
CPU = torch.device("cpu")
TOKEN_IDS = torch.arange(0, 48, 2)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    num_elements = 0

    def __torch_dispatch__(self, function, types, inputs=(), options=None):
        result = function(*inputs, **(options or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@pytest.fixture
def problem():
    """Hidden states, a head and target log-probabilities in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    hidden, head = draw(POSITIONS, WIDTH).requires_grad_(), draw(WIDTH, ENTRIES)
    log_p = draw(POSITIONS, ENTRIES).log_softmax(-1)

    def compare(part, place):
        log_q = (part @ head).log_softmax(-1)
        return forward_kl(log_p[place], log_q).sum(), overlap(log_p[place], log_q.detach()).sum()

    return hidden, compare


def value_and_gradient(hidden, loss):
    (gradient,) = torch.autograd.grad(loss, hidden)
    return loss.detach(), gradient


@pytest.mark.parametrize("size", [1, 4, POSITIONS - 1, POSITIONS, 100])
def test_chunks_give_the_plain_value_and_gradient(problem, size):
    hidden, compare = problem
    loss, agreed = sum_in_chunks(hidden, compare, size=size)
    plain_loss, plain_agreed = compare(hidden, slice(None))
    ours, plain = (value_and_gradient(hidden, 3 * one) for one in (loss, plain_loss))
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(agreed, plain_agreed)


def test_the_gradient_goes_on_to_what_the_hidden_states_come_from(problem):
    hidden, compare = problem
    weights = torch.full((WIDTH,), 0.5, dtype=torch.float64, requires_grad=True)
    grads = [
        torch.autograd.grad(one(hidden.detach() * weights), weights)[0]
        for one in (
            lambda made: sum_in_chunks(made, compare, size=4)[0],
            lambda made: compare(made, slice(None))[0],
        )
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_what_else_is_trained_gets_the_plain_gradient_too(problem, size):
    hidden, _ = problem
    head = torch.linspace(-1, 1, WIDTH * ENTRIES, dtype=torch.float64).view(WIDTH, ENTRIES)
    head.requires_grad_()

    def compare(part, place):
        log_q = (part @ head).log_softmax(-1)
        return (log_q[:, 0] * torch.arange(POSITIONS)[place]).sum(), log_q.detach().sum()

    grads = [
        torch.autograd.grad(2 * one, (hidden, head))
        for one in (
            sum_in_chunks(hidden, compare, size=size, trained=[head])[0],
            compare(hidden, slice(None))[0],
        )
    ]
    torch.testing.assert_close(*grads)


def test_without_a_gradient_the_value_is_the_same_and_none_is_computed(problem):
    hidden, compare = problem
    expected = [one.detach() for one in sum_in_chunks(hidden, compare, size=4)]
    with torch.no_grad():
        ours = sum_in_chunks(hidden, compare, size=4)
    torch.testing.assert_close(list(ours), expected)
    assert not any(one.requires_grad for one in ours)


def test_alpha_is_no_part_of_what_is_differentiated(problem):
    hidden, compare = problem
    loss, agreed = sum_in_chunks(hidden, compare, size=4)
    assert loss.requires_grad
    assert not agreed.requires_grad


def test_no_position_is_a_loss_of_nothing_with_a_gradient_of_nothing(problem):
    hidden, compare = problem
    loss, agreed = sum_in_chunks(hidden[:0], compare, size=4)
    assert (loss.item(), agreed.item()) == (0.0, 0.0)
    assert torch.autograd.grad(loss, hidden)[0].abs().max() == 0


def test_no_tensor_is_larger_than_a_chunk(problem):
    hidden, compare = problem
    for size in (3, POSITIONS):
        with Largest() as largest:
            sum_in_chunks(hidden, compare, size=size)[0].backward()
        assert largest.num_elements == size * ENTRIES


# The student's objective


def setting(kind="llama", *, dtype=torch.float32, loss="forward_kl", token_ids=TOKEN_IDS):
    target = make_target(kind, dtype=dtype)
    student = make_student(target, (0, 2), token_ids)
    batch = collate(some_sequences(), [0, 3, 5])
    divergence = divergence_of(make_config(loss=loss))
    module = StudentObjective(student, lambda hidden: head_logits(student, hidden), divergence)
    return module, batch, OnlineSignals(target).signal(batch), divergence


def plain_sums(module, batch, signal, divergence):
    """All positions at once, through the models' own forwards."""
    student = module.student
    log_q = student(input_ids=batch.token_ids).logits[batch.mask].log_softmax(-1)
    with torch.no_grad():
        log_p = head_logits(student, signal.hidden) - signal.log_normaliser[:, None]
    return divergence(log_p, log_q).sum(), overlap(log_p, log_q).sum()


def gradients(module, loss):
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, trained)


@pytest.mark.parametrize("token_ids", [None, TOKEN_IDS], ids=["whole", "trimmed"])
@pytest.mark.parametrize("loss", ["forward_kl", "jensen_shannon", "acceptance"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_chunks_is_the_plain_step(monkeypatch, kind, loss, token_ids):
    monkeypatch.setitem(objective._LOGITS_PER_CHUNK, "cpu", 4 * 48)
    module, batch, signal, divergence = setting(kind, loss=loss, token_ids=token_ids)
    ours = module(batch, signal, CPU)
    plain = plain_sums(module, batch, signal, divergence)
    near = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(ours, plain, **near)
    torch.testing.assert_close(gradients(module, ours[0]), gradients(module, plain[0]), **near)


def test_both_heads_see_each_position_once_and_a_chunk_at_a_time(monkeypatch):
    module, batch, signal, _ = setting()
    monkeypatch.setitem(objective._LOGITS_PER_CHUNK, "cpu", 4 * len(TOKEN_IDS))
    seen = []
    module.student.get_output_embeddings().register_forward_hook(
        lambda _module, inputs, _output: seen.append(len(inputs[0]))
    )
    module(batch, signal, CPU)[0].backward()
    # The target's head is the student's: two calls a chunk.
    assert max(seen) == 4
    assert sum(seen) == 2 * int(batch.mask.sum())


def test_a_student_in_the_targets_dtype_can_be_judged():
    target = make_target("llama", dtype=torch.bfloat16)
    batch = collate(some_sequences(), [0, 1])
    student = build_student(target, (0, 1, 2), None)
    module = StudentObjective(student, lambda hidden: head_logits(student, hidden), forward_kl)
    with torch.no_grad():
        loss, agreed = module(batch, OnlineSignals(target).signal(batch), CPU)
    assert loss.item() == pytest.approx(0.0, abs=0.05)
    assert agreed.item() == pytest.approx(int(batch.mask.sum()), rel=0.01)


# Layers that are computed again


def bytes_kept(loss_of):
    """Bytes that a forward pass keeps for the backward pass, without the weights."""
    kept = {}

    def keep(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of()
    return sum(kept.values())


@pytest.mark.parametrize("kind", KINDS)
def test_layers_computed_again_give_the_same_step_from_less_memory(kind):
    module, batch, signal, _ = setting(kind)
    plain = module(batch, signal, CPU)
    expected = gradients(module, plain[0])
    kept = bytes_kept(lambda: module(batch, signal, CPU))
    recompute_layers(module.student)
    ours = module(batch, signal, CPU)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    got = gradients(module, ours[0])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert bytes_kept(lambda: module(batch, signal, CPU)) < kept / 2


def test_layers_are_computed_again_only_where_a_gradient_is_wanted():
    module, batch, signal, _ = setting()
    calls = []
    layers = module.student.get_submodule(layer_prefix(module.student).removesuffix("."))
    layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    recompute_layers(module.student)
    with torch.no_grad():
        module(batch, signal, CPU)
    assert len(calls) == 1
    module(batch, signal, CPU)[0].backward()
    assert len(calls) == 3
