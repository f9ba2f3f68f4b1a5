"""Training of Medusa heads: each is held to the target's own law further ahead.

Head k (from 1) reads the target's state of position t and is held to the law behind position t + k,
which is made from the state of position t + k. So both are last hidden states of the same response,
which the signals hold, and nothing else of the target is read:

    response states     h3 h4 h5 h6         law behind each     p3 p4 p5 p6
    held to p6          head 1 of h5, head 2 of h4, head 3 of h3

A law is made once for all heads that are held to it. The first position of a response has no state
before it, so no head is held to it; the k-th has k - 1 heads.

Source: Cai et al. 2024 (arXiv 2401.10774), section 2.2, with the target's law in place of one
token of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from draftsmith.distillation.batches import TokenBatch, places_in_responses
from draftsmith.distillation.divergences import Divergence, overlap
from draftsmith.distillation.objective import Sums, positions_per_chunk, sum_in_chunks
from draftsmith.distillation.signals import Signal
from draftsmith.drafts.medusa import MedusaHeads


class MedusaObjective(nn.Module):
    """Heads and loss in one module, so that `accelerate` wraps both.

    Args:
        heads: Trained in float32; embedding and the target's output rows are frozen.
        target_head: Target logits over the draft's vocabulary from hidden states `[n, width]`.
        divergence: Of log-probabilities of target and draft, `[n, entries]` to `[n]`.
        head_decay: Weight of a head's loss over that of the head before it.

    Attributes:
        device_type: As in `positions_per_chunk`.
    """

    device_type: str | None = None

    def __init__(
        self,
        heads: MedusaHeads,
        target_head: Callable[[Tensor], Tensor],
        divergence: Divergence,
        *,
        head_decay: float,
    ) -> None:
        super().__init__()
        self.heads = heads
        self._target_head, self._divergence = target_head, divergence
        weights = [head_decay**head for head in range(heads.num_heads)]
        self._weights = [weight / sum(weights) for weight in weights]

    def forward(self, batch: TokenBatch, signal: Signal, device: torch.device) -> Sums:
        """Sums over the masked positions: of the loss, weighted by head, and of head 1's alpha.

        Alpha of a response is that of the positions that head 1 is held to, counted for all: a
        mean over sequences does not depend on how a batch is cut.
        """
        before, lengths = (places.to(device) for places in places_in_responses(batch.mask))
        # A batch that only fills a process's place masks nothing, and cached signals ignore masks.
        hidden, normaliser = (
            part[: len(before)].to(device) for part in (signal.hidden, signal.log_normaliser)
        )
        num_heads = self.heads.num_heads
        states = self.heads.run(hidden, num_heads)
        # A head's state beside the law that it is held to; those that come round weigh nothing.
        beside = torch.stack([states[:, k].roll(k + 1, 0) for k in range(num_heads)], 1)
        is_held = before[:, None] > torch.arange(num_heads, device=device)
        weights = torch.tensor(self._weights, device=device) * is_held
        judged = is_held[:, 0] * lengths / (lengths - 1).clamp(min=1)

        def compare(part: Tensor, place: slice) -> Sums:
            log_p = self._log_target(hidden[place], normaliser[place])
            loss, agreed = part.new_zeros((2,), dtype=torch.float32)
            for head in range(num_heads):
                log_q = self.heads.logits_of(part[:, head], head).float().log_softmax(-1)
                loss = loss + (weights[place, head] * self._divergence(log_p, log_q)).sum()
                if head == 0:
                    agreed = (judged[place] * overlap(log_p, log_q.detach())).sum()
            return loss, agreed

        rows = list(self.heads.rows.parameters())
        size = positions_per_chunk(self.heads, self.device_type)
        return sum_in_chunks(beside, compare, size=size, trained=rows)

    @torch.no_grad()
    def _log_target(self, hidden: Tensor, normaliser: Tensor) -> Tensor:
        return self._target_head(hidden).float() - normaliser[:, None]
