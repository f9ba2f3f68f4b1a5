"""What a training step minimises: a student's divergence from its target, in chunks of positions.

All logits of a batch would be a step's largest tensor, and there several times: of both models, as
log-probabilities, as gradient. So each chunk's gradient by the student's hidden states is taken
while the chunk is there, in the forward pass, and the backward pass only hands it on: nothing is
computed twice, and no more than a chunk is ever there. Value and gradient are the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from draftsmith.distillation.batches import TokenBatch
from draftsmith.distillation.divergences import Divergence, overlap
from draftsmith.distillation.signals import Signal
from draftsmith.distillation.topk_signals import TopKSignal
from draftsmith.drafts.student import head_logits, layer_prefix, trained_rows

# What stays in a CPU's caches: at 8,192 entries 256 positions took 0.55 of the time of 2,048. An
# accelerator has launches to save instead.
_LOGITS_PER_CHUNK = {"cpu": 1 << 21, "cuda": 1 << 25}

Sums = tuple[Tensor, Tensor]


class StudentObjective(nn.Module):
    """Student and loss in one module, so that `accelerate` wraps both.

    Args:
        student: Trained in float32; what is the target's is frozen.
        target_head: Target logits over the draft's vocabulary from hidden states `[n, width]`.
        divergence: Of log-probabilities of target and draft, `[n, entries]` to `[n]`.

    Attributes:
        device_type: As in `positions_per_chunk`.
    """

    device_type: str | None = None

    def __init__(
        self,
        student: PreTrainedModel,
        target_head: Callable[[Tensor], Tensor],
        divergence: Divergence,
    ) -> None:
        super().__init__()
        self.student = student
        self._target_head = target_head
        self._divergence = divergence

    def forward(self, batch: TokenBatch, signal: Signal | TopKSignal, device: torch.device) -> Sums:
        """Sums of loss and alpha over the masked positions."""
        hidden = self._last_hidden(batch.token_ids.to(device))[batch.mask.to(device)]

        def compare(part: Tensor, place: slice) -> Sums:
            log_q = head_logits(self.student, part).float().log_softmax(-1)
            if isinstance(signal, TopKSignal):
                log_p, log_q = signal.beside(log_q, place)
            else:
                log_p = self._log_target(signal, place, device)
            agreed = overlap(log_p, log_q.detach())
            return self._divergence(log_p, log_q).sum(), agreed.sum()

        size, rows = positions_per_chunk(self.student, self.device_type), trained_rows(self.student)
        return sum_in_chunks(hidden, compare, size=size, trained=rows)

    @torch.no_grad()
    def _log_target(self, signal: Signal, place: slice, device: torch.device) -> Tensor:
        logits = self._target_head(signal.hidden[place].to(device)).float()
        return logits - signal.log_normaliser[place].to(device)[:, None]

    def _last_hidden(self, token_ids: Tensor) -> Tensor:
        inputs = {"input_ids": token_ids}
        embedding = self.student.get_input_embeddings()
        is_mixed = torch.is_autocast_enabled(token_ids.device.type)
        own = next(p.dtype for p in self.student.parameters() if p.requires_grad)
        if not is_mixed and embedding.weight.dtype != own:
            # The target's embedding under layers in float32, without autocast to join them.
            inputs = {"inputs_embeds": embedding(token_ids).to(own)}
        hidden: Tensor = self.student.base_model(**inputs, use_cache=False).last_hidden_state
        return hidden


def positions_per_chunk(draft: PreTrainedModel, device_type: str | None = None) -> int:
    """Positions whose logits are worked on at a time.

    Args:
        draft: The draft.
        device_type: cpu or cuda; None is where the draft is.
    """
    num_entries = len(draft.get_output_embeddings().weight)
    return max(1, _LOGITS_PER_CHUNK[device_type or draft.device.type] // num_entries)


def sum_in_chunks(
    hidden: Tensor,
    compare: Callable[[Tensor, slice], Sums],
    *,
    size: int,
    trained: Sequence[Tensor] = (),
) -> Sums:
    """Sums of loss and alpha over chunks of `size` positions.

    Args:
        hidden: `[n, ...]`; the loss is differentiated by it and by `trained`, by nothing else.
        compare: Sums of a chunk `[at most size, ...]` that lies at the slice.
        size: Positions a chunk.
        trained: What `compare` reads that wants a gradient, too.
    """
    if torch.is_grad_enabled() and hidden.requires_grad:
        sums: Sums = _ChunkedSums.apply(hidden, compare, size, *trained)  # type: ignore[no-untyped-call]
        return sums
    loss, agreed = _zeros(hidden)
    for place in _chunks(len(hidden), size):
        part_loss, part_agreed = compare(hidden[place], place)
        loss, agreed = loss + part_loss, agreed + part_agreed
    return loss, agreed


class _ChunkedSums(torch.autograd.Function):
    # torch types `ctx` by a class without the methods that it has.
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        compare: Callable[[Tensor, slice], Sums],
        size: int,
        *trained: Tensor,
    ) -> Sums:
        gradient = torch.empty_like(hidden)
        by_trained = [torch.zeros_like(tensor) for tensor in trained]
        loss, agreed = _zeros(hidden)
        for place in _chunks(len(hidden), size):
            part = hidden[place].detach().requires_grad_()
            with torch.enable_grad():
                part_loss, part_agreed = compare(part, place)
            with torch.autocast(hidden.device.type, enabled=False):
                gradient[place], *rest = torch.autograd.grad(part_loss, (part, *trained))
            for total, change in zip(by_trained, rest, strict=True):
                total.add_(change)
            loss += part_loss.detach()
            agreed += part_agreed
        ctx.save_for_backward(gradient, *by_trained)
        ctx.mark_non_differentiable(agreed)
        return loss, agreed

    @staticmethod
    def backward(ctx: Any, *by_sums: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        gradient, *by_trained = (saved * by_sums[0] for saved in ctx.saved_tensors)
        return gradient, None, None, *by_trained


def _chunks(num_positions: int, size: int) -> Iterator[slice]:
    for start in range(0, num_positions, size):
        yield slice(start, start + size)


def _zeros(hidden: Tensor) -> Sums:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.new_zeros((), dtype=dtype), hidden.new_zeros((), dtype=dtype)


def recompute_layers(model: PreTrainedModel) -> None:
    """Let the layers of `model` be computed again in the backward pass, in place.

    Transformers does so in training mode only, which would switch dropout on.
    """
    recompute(model.get_submodule(layer_prefix(model).removesuffix(".")))


def recompute(modules: nn.Module) -> None:
    """Let each of these modules be computed again in the backward pass, in place."""
    for module in modules.children():
        module.forward = recomputed(module.forward)


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of which nothing but inputs and results is kept for the backward pass.

    It is called once more there, so it must leave what it is given as it is.
    """

    def call(*inputs: object, **options: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*inputs, **options)
        again = partial(forward, *inputs, **options)
        return checkpoint(again, use_reentrant=False, preserve_rng_state=False)

    return call
