"""Training of a feature head for every draft position: it is unrolled as decoding will unroll it.

At the first position of a draft the head reads the target's features, behind it its own. So it runs
`unroll` times over a text: run k reads, at entry t, what run k - 1 gave at entry t - 1, and stands
for the k-th draft of the round whose true features end at entry t - k + 1. All rounds of a text are
trained at once; a mask shows every entry what its own round would.

    entry 3 of run 1 sees    true 0 1 2 3
    entry 3 of run 2 sees    true 0 1 2, and itself (run 2, entry 3)
    entry 3 of run 3 sees    true 0 1, run 2's entry 2, and itself (run 3, entry 3)

Every run is held to the target's own distribution behind the same text, so the target's logits are
made once for all of them.

Source: Li et al. 2025 (arXiv 2503.01840), section 3.2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from draftsmith.decoding.slot_model import cache_argument, layer_windows
from draftsmith.distillation.batches import TokenBatch
from draftsmith.distillation.divergences import Divergence, overlap
from draftsmith.distillation.objective import (
    Sums,
    positions_per_chunk,
    recomputed,
    sum_in_chunks,
)
from draftsmith.distillation.signals import Signal
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.student import head_logits, trained_rows


class UnrolledObjective(nn.Module):
    """Head and loss in one module, so that `accelerate` wraps both.

    Args:
        head: Float32 weights except those that are the target's, which are frozen.
        target_head: Target logits over the draft's vocabulary from hidden states `[n, width]`.
        divergence: Of log-probabilities of target and draft, `[n, entries]` to `[n]`.
        unroll: Draft positions that are trained.
        step_decay: Weight of a position's loss over that of the position before it.
        recompute: Runs are computed again in the backward pass.

    Attributes:
        device_type: As in `positions_per_chunk`.
    """

    device_type: str | None = None

    def __init__(
        self,
        head: EagleHead,
        target_head: Callable[[Tensor], Tensor],
        divergence: Divergence,
        *,
        unroll: int,
        step_decay: float,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.head = head
        self._target_head, self._divergence = target_head, divergence
        weights = [step_decay**step for step in range(unroll)]
        self._weights = [weight / sum(weights) for weight in weights]
        self._cache_argument = cache_argument(head)
        (self._window,) = layer_windows(head.config).values()
        self._run: Callable[..., tuple[Tensor, DynamicCache]] = self._once
        if recompute:
            self._run = recomputed(self._once)

    def forward(
        self, batch: TokenBatch, signal: Signal, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Sums over the masked positions: of the loss, weighted by run, and of the first's alpha.

        The entry that predicts what position s predicts is s - 1; position 0 has none and counts
        with neither loss nor alpha.
        """
        assert signal.features is not None, "the signals were made without features"
        # Rows of the signal go by masked positions: those of position 0 are left out.
        has_entry = batch.mask.nonzero()[:, 1] > 0
        # A batch that only fills a process's place masks nothing, and cached signals ignore masks.
        rows = slice(len(has_entry))
        hidden, normaliser = signal.hidden[rows][has_entry], signal.log_normaliser[rows][has_entry]
        places = batch.mask[:, 1:].to(device)
        entries = places.nonzero()[:, 1]
        features = self.head.fuse(signal.features.to(device))
        first = max(int(entries.min()) - len(self._weights), 0) if len(entries) else 0
        unrolled = self.unrolled(batch.token_ids[:, 1:].to(device), features, first=first)
        own = [run[places[:, places.shape[1] - run.shape[1] :]] for run in unrolled]
        # Normed here: what is trained has to lie outside the chunks.
        runs = torch.stack([self.head.norm(run) for run in own], 1)
        has_round = entries[:, None] >= torch.arange(runs.shape[1], device=device)
        weights = torch.tensor(self._weights, device=device) * has_round

        def compare(part: Tensor, place: slice) -> Sums:
            log_p = self._log_target(hidden[place], normaliser[place], device)
            loss, agreed = part.new_zeros((2,), dtype=torch.float32)
            for step in range(part.shape[1]):
                log_q = head_logits(self.head, part[:, step]).float().log_softmax(-1)
                loss = loss + (weights[place, step] * self._divergence(log_p, log_q)).sum()
                if step == 0:
                    agreed = overlap(log_p, log_q.detach()).sum()
            return loss, agreed

        size, trained = positions_per_chunk(self.head, self.device_type), trained_rows(self.head)
        return sum_in_chunks(runs, compare, size=size, trained=trained)

    @torch.no_grad()
    def _log_target(self, hidden: Tensor, normaliser: Tensor, device: torch.device) -> Tensor:
        logits = self._target_head(hidden.to(device)).float()
        return logits - normaliser.to(device)[:, None]

    def unrolled(self, tokens: Tensor, features: Tensor, *, first: int = 0) -> Iterator[Tensor]:
        """The own features of each run, `[rows, entries, hidden]`.

        Args:
            tokens: int64 `[rows, entries]`: those behind the features.
            features: `[rows, entries, hidden]`: the target's, fused.
            first: Runs behind the first begin at this entry, for texts whose prompts nobody drafts.
                What they give is right from entry `first + unroll` on.
        """
        cache, begin = DynamicCache(), 0  # collects the keys of all runs
        for step in range(1, len(self._weights) + 1):
            own, cache = self._run(tokens, features, cache, step=step, first=first)
            yield own
            before = nn.functional.pad(own[:, :-1], (0, 0, 1, 0))
            features, begin = before[:, first - begin :], first

    def _once(
        self, tokens: Tensor, features: Tensor, earlier: DynamicCache, *, step: int, first: int
    ) -> tuple[Tensor, DynamicCache]:
        """One run: its own features, and the keys of all runs so far; `earlier` stays as it is."""
        cache = copy.copy(earlier)
        cache.layers = [copy.copy(layer) for layer in earlier.layers]  # which replace their tensors
        begin, end = 0 if step == 1 else first, tokens.shape[1]
        visible = visible_entries(end, step, self._window, first=first, device=tokens.device)
        mask = torch.zeros(visible.shape, dtype=features.dtype, device=tokens.device)
        mask.masked_fill_(~visible, -torch.inf)
        own = self.head.run(
            tokens[:, begin:],
            features,
            attention_mask=mask[None, None].expand(len(tokens), 1, -1, -1),
            position_ids=torch.arange(begin, end, device=tokens.device)[None],
            use_cache=True,
            **{self._cache_argument: cache},
        )
        return own, cache


def visible_entries(
    entries: int,
    step: int,
    window: int | None,
    *,
    first: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """What the entries of run `step` (from 1) see.

    Keys come run by run. Of run 1 an entry t sees those up to t - step + 1, of a later run i its
    round's only one, t - step + i, which for i = step is the entry itself.

    Args:
        entries: Number of entries.
        step: The run.
        window: Entries seen at most, the own one included; None is all.
        first: The entry at which runs behind the first begin.
        device: Of the result.

    Returns:
        bool `[entries, entries]` for run 1, else `[entries - first, keys]` with the entries of run
        1 and `entries - first` of each later run as keys.
    """
    every, late = (torch.arange(begin, entries, device=device) for begin in (0, first))
    query = (every if step == 1 else late)[:, None]
    keys = [every] + [late] * (step - 1)
    runs = [every <= query - step + 1]
    runs += [late == query - step + later for later in range(2, step + 1)]
    visible = torch.cat(runs, 1)
    if window is not None:
        visible &= torch.cat(keys) > query - window
    return visible
