"""What the target says at every response position.

Its last hidden state, from which exact logits follow by one matmul, and the log-normaliser of its
full distribution: either cached on disk, memory-mapped, or computed in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.artifacts import read_json, write_json, writing
from draftsmith.distillation.batches import TokenBatch, TrainingSequence, collate
from draftsmith.distillation.reserved import have_files, reserve_files
from draftsmith.drafts.student import head_logits
from draftsmith.errors import DraftError

_LOG = logging.getLogger(__name__)
_TOKENS_PER_FORWARD = 4096
_SPOT_CHECKS = 3
_MAX_DEVIATION, _MIN_COSINE = 1.0, 0.98  # far outside bfloat16 noise
_BYTES_PER_GB = 1e9
_NORMALISER_BYTES = 4


@dataclass(frozen=True)
class Signal:
    """Signal of the positions that a batch masks, in row-major order.

    Attributes:
        hidden: `[n, width]` in the target's dtype.
        log_normaliser: float32 `[n]`.
    """

    hidden: Tensor
    log_normaliser: Tensor


class SignalSource(Protocol):
    """Where the trainer gets signals from."""

    def signal(self, batch: TokenBatch) -> object:
        """The target's signal at the masked positions, of a kind that the objective knows."""


class OnlineSignals:
    """A target forward for every batch."""

    def __init__(self, target: PreTrainedModel) -> None:
        self._target = target

    @torch.no_grad()
    def signal(self, batch: TokenBatch) -> Signal:
        """Forward the batch through the target."""
        token_ids = batch.token_ids.to(self._target.device)
        hidden = self._target.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        masked = hidden[batch.mask.to(hidden.device)]
        logits = (head_logits(self._target, part).float() for part in masked.split(1024))
        return Signal(masked, torch.cat([part.logsumexp(-1) for part in logits]))


class CachedSignals:
    """Signals of all sequences, computed once and memory-mapped.

    Args:
        directory: Where they live; a finished cache found there is used.
        target: Asked for what is missing.
        sequences: The training sequences, in the order of their indices.
        max_gb: Refuse above this size (10^9 bytes).

    Raises:
        DraftError: The cache would be larger than `max_gb`, or a stored sequence does not match a
            forward of it alone.
        ArtifactError: The disk has no room for it; nothing of it is left.
    """

    def __init__(
        self,
        directory: Path,
        target: PreTrainedModel,
        sequences: Sequence[TrainingSequence],
        *,
        max_gb: float,
    ) -> None:
        self._offsets: list[int] = np.cumsum([0] + [s.num_predicted for s in sequences]).tolist()
        width = int(target.config.get_text_config().hidden_size)
        total = self._offsets[-1]
        self._dtype: torch.dtype = target.get_output_embeddings().weight.dtype
        stored = np.dtype(np.float32 if self._dtype == torch.float32 else np.uint16)
        sizes = {
            "hidden.bin": total * width * stored.itemsize,
            "normaliser.bin": total * _NORMALISER_BYTES,
        }
        require_room(total, sum(sizes.values()), max_gb)
        marker, facts = directory / "finished.json", {"positions": total, "width": width}
        is_finished = (
            have_files(directory, sizes) and marker.exists() and read_json(marker) == facts
        )
        if not is_finished:
            reserve_files(directory, sizes)
        self._hidden = np.memmap(directory / "hidden.bin", stored, "r+", shape=(total, width))
        self._normaliser = np.memmap(directory / "normaliser.bin", np.float32, "r+", shape=(total,))
        if is_finished:
            _LOG.info("signal_cache=found positions=%d", total)
        else:
            with writing(directory):
                self._fill(OnlineSignals(target), sequences)
            write_json(marker, facts)
        self._spot_check(OnlineSignals(target), sequences)

    def _fill(self, online: OnlineSignals, sequences: Sequence[TrainingSequence]) -> None:
        for indices in by_length(sequences):
            batch = collate(sequences, indices)
            signal = online.signal(batch)
            start = 0
            for index in indices:
                end = start + sequences[index].num_predicted
                place = slice(self._offsets[index], self._offsets[index + 1])
                self._hidden[place] = _to_numpy(signal.hidden[start:end])
                self._normaliser[place] = signal.log_normaliser[start:end].cpu().numpy()
                start = end
        self._hidden.flush()
        self._normaliser.flush()

    def signal(self, batch: TokenBatch) -> Signal:
        """Read the batch's positions."""
        hidden = [self._hidden[slice(*self._range(index))] for index in batch.indices]
        normaliser = [self._normaliser[slice(*self._range(index))] for index in batch.indices]
        tensor = torch.from_numpy(np.concatenate(hidden))
        if tensor.dtype != torch.float32:
            tensor = tensor.view(self._dtype)
        return Signal(tensor, torch.from_numpy(np.concatenate(normaliser)))

    def _range(self, index: int) -> tuple[int, int]:
        return self._offsets[index], self._offsets[index + 1]

    def _spot_check(self, online: OnlineSignals, sequences: Sequence[TrainingSequence]) -> None:
        """Compare with a forward of single sequences: padding or order faults would show."""
        for index in np.linspace(0, len(sequences) - 1, _SPOT_CHECKS).astype(int).tolist():
            batch = collate(sequences, [index])
            stored, fresh = self.signal(batch), online.signal(batch)
            worst = (stored.log_normaliser - fresh.log_normaliser.cpu()).abs().max()
            cosine = torch.cosine_similarity(
                stored.hidden.float(), fresh.hidden.float().cpu(), dim=-1
            ).min()
            if not (float(worst) <= _MAX_DEVIATION and float(cosine) >= _MIN_COSINE):  # or NaN
                raise DraftError(
                    f"checking the cached target signal of sequence {index}",
                    found=f"cosine {float(cosine):.3f}, normaliser off by {float(worst):.2f}",
                    expected="the signal of a forward of that sequence alone",
                    remedy="delete build/partial/distill and rerun",
                )


def _to_numpy(hidden: Tensor) -> np.ndarray:
    hidden = hidden.cpu()
    return (hidden if hidden.dtype == torch.float32 else hidden.view(torch.uint16)).numpy()


def by_length(sequences: Sequence[TrainingSequence]) -> Iterator[list[int]]:
    """Indices in groups of similar length, about `_TOKENS_PER_FORWARD` tokens each."""
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index].token_ids))
    group: list[int] = []
    for index in order:
        if group and len(sequences[index].token_ids) * (len(group) + 1) > _TOKENS_PER_FORWARD:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def require_room(positions: int, num_bytes: int, max_gb: float) -> None:
    """Refuse a cache above `max_gb` before anything is computed."""
    size_gb = num_bytes / _BYTES_PER_GB
    _LOG.info("signal_cache=planned positions=%d size_gb=%.2f", positions, size_gb)
    if size_gb > max_gb:
        raise DraftError(
            "planning the cache of the target's signals",
            found=f"{size_gb:.1f} GB for {positions} positions",
            expected=f"at most distill.max_cache_gb = {max_gb} GB",
            remedy="set distill.signal to online, raise distill.max_cache_gb or use fewer rollouts",
        )
