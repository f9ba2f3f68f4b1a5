"""What the target says at every response position.

Its last hidden state, from which exact logits follow by one matmul, the log-normaliser of its full
distribution and, where a head asks for them, the features of all positions: either cached on disk,
memory-mapped, or computed in every step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.artifacts import read_json, write_json, writing
from draftsmith.decoding.features import layer_inputs
from draftsmith.distillation.batches import TokenBatch, TrainingSequence, collate
from draftsmith.distillation.reserved import have_files, reserve_files
from draftsmith.drafts.student import head_logits
from draftsmith.errors import DraftError

_LOG = logging.getLogger(__name__)
TOKENS_PER_FORWARD = 4096
_SPOT_CHECKS = 3
_MAX_DEVIATION, _MIN_COSINE = 1.0, 0.98  # far outside bfloat16 noise
_BYTES_PER_GB = 1e9


@dataclass(frozen=True)
class Signal:
    """Signal of the positions that a batch masks, in row-major order.

    Attributes:
        hidden: `[n, width]` in the target's dtype.
        log_normaliser: float32 `[n]`.
        features: `[sequences, width - 1, layers * hidden]`: features of all positions but the last,
            in the target's dtype; None unless they were asked for.
    """

    hidden: Tensor
    log_normaliser: Tensor
    features: Tensor | None = None


class SignalSource(Protocol):
    """Where the trainer gets signals from."""

    def signal(self, batch: TokenBatch) -> object:
        """The target's signal at the masked positions, of a kind that the objective knows."""


class OnlineSignals:
    """A target forward for every batch.

    Args:
        target: The target.
        feature_layers: Its layers whose inputs are wanted.
    """

    def __init__(self, target: PreTrainedModel, feature_layers: Sequence[int] = ()) -> None:
        self._target, self._layers = target, feature_layers

    @torch.no_grad()
    def signal(self, batch: TokenBatch) -> Signal:
        """Forward the batch through the target."""
        token_ids = batch.token_ids.to(self._target.device)
        with layer_inputs(self._target, self._layers) as inputs:
            hidden = self._target.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        features = torch.cat(inputs, -1)[:, :-1] if inputs else None
        masked = hidden[batch.mask.to(hidden.device)]
        logits = (head_logits(self._target, part).float() for part in masked.split(1024))
        return Signal(masked, torch.cat([part.logsumexp(-1) for part in logits]), features)


@dataclass(frozen=True)
class StoredArray:
    """An array of a cache on disk."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of its file."""
        return math.prod(self.shape) * self.dtype.itemsize


def cached_arrays(
    positions: int, entries: int, *, width: int, num_layers: int, dtype: torch.dtype
) -> dict[str, StoredArray]:
    """What `CachedSignals` keeps, by file name.

    Args:
        positions: Response positions of all sequences.
        entries: Positions of all sequences but the last of each: those that have features.
        width: Of the target's hidden state.
        num_layers: How many layers the features are of.
        dtype: Of the target's output rows.
    """
    stored = np.dtype(np.float32 if dtype == torch.float32 else np.uint16)
    arrays = {
        "hidden.bin": StoredArray((positions, width), stored),
        "normaliser.bin": StoredArray((positions,), np.dtype(np.float32)),
    }
    if num_layers:
        arrays["features.bin"] = StoredArray((entries, num_layers * width), stored)
    return arrays


class CachedSignals:
    """Signals of all sequences, computed once and memory-mapped.

    Args:
        directory: Where they live; a finished cache found there is used.
        target: Asked for what is missing.
        sequences: The training sequences, in the order of their indices.
        max_gb: Refuse above this size (10^9 bytes).
        feature_layers: As in `OnlineSignals`. A cache with features serves those who want none.

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
        feature_layers: Sequence[int] = (),
    ) -> None:
        self._offsets: list[int] = np.cumsum([0] + [s.num_predicted for s in sequences]).tolist()
        lengths = [len(sequence.token_ids) - 1 for sequence in sequences]
        self._starts: list[int] = np.cumsum([0, *lengths]).tolist()  # of features
        width = int(target.config.get_text_config().hidden_size)
        self._dtype: torch.dtype = target.get_output_embeddings().weight.dtype
        total, self._num_features = self._offsets[-1], len(feature_layers) * width
        arrays = cached_arrays(
            total,
            self._starts[-1],
            width=width,
            num_layers=len(feature_layers),
            dtype=self._dtype,
        )
        sizes = {name: array.num_bytes for name, array in arrays.items()}
        require_room(total, sum(sizes.values()), max_gb)
        facts = {"positions": total, "width": width, "feature_layers": list(feature_layers)}
        marker = directory / "finished.json"
        is_finished = have_files(directory, sizes) and _serves(marker, facts)
        if not is_finished:
            reserve_files(directory, sizes)
        self._files = {
            name: np.memmap(directory / name, array.dtype, "r+", shape=array.shape)
            for name, array in arrays.items()
        }
        online = OnlineSignals(target, feature_layers)
        if is_finished:
            _LOG.info("signal_cache=found positions=%d", total)
        else:
            with writing(directory):
                self._fill(online, sequences)
            write_json(marker, facts)
        self._spot_check(online, sequences)

    def _fill(self, online: OnlineSignals, sequences: Sequence[TrainingSequence]) -> None:
        for indices in by_length(sequences):
            batch = collate(sequences, indices)
            signal = online.signal(batch)
            start = 0
            for row, index in enumerate(indices):
                end = start + sequences[index].num_predicted
                place = self._range(index)
                self._files["hidden.bin"][place] = _to_numpy(signal.hidden[start:end])
                normaliser = signal.log_normaliser[start:end].cpu().numpy()
                self._files["normaliser.bin"][place] = normaliser
                if signal.features is not None:
                    place = self._feature_range(index)
                    features = signal.features[row, : place.stop - place.start]
                    self._files["features.bin"][place] = _to_numpy(features)
                start = end
        for file in self._files.values():
            file.flush()

    def signal(self, batch: TokenBatch) -> Signal:
        """Read the batch's positions."""
        hidden, normaliser = (
            np.concatenate([self._files[name][self._range(index)] for index in batch.indices])
            for name in ("hidden.bin", "normaliser.bin")
        )
        features = self._padded_features(batch) if self._num_features else None
        return Signal(self._tensor(hidden), torch.from_numpy(normaliser), features)

    def _padded_features(self, batch: TokenBatch) -> Tensor:
        file = self._files["features.bin"]
        rows, width = batch.token_ids.shape
        padded = np.zeros((rows, width - 1, self._num_features), file.dtype)
        for row, index in enumerate(batch.indices):
            place = self._feature_range(index)
            padded[row, : place.stop - place.start] = file[place]
        return self._tensor(padded)

    def _tensor(self, stored: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(stored)
        return tensor if tensor.dtype == torch.float32 else tensor.view(self._dtype)

    def _range(self, index: int) -> slice:
        return slice(self._offsets[index], self._offsets[index + 1])

    def _feature_range(self, index: int) -> slice:
        return slice(self._starts[index], self._starts[index + 1])

    def _spot_check(self, online: OnlineSignals, sequences: Sequence[TrainingSequence]) -> None:
        """Compare with a forward of single sequences: padding or order faults would show."""
        for index in np.linspace(0, len(sequences) - 1, _SPOT_CHECKS).astype(int).tolist():
            batch = collate(sequences, [index])
            stored, fresh = self.signal(batch), online.signal(batch)
            worst = (stored.log_normaliser - fresh.log_normaliser.cpu()).abs().max()
            cosine = _least_cosine(stored.hidden, fresh.hidden)
            if stored.features is not None and fresh.features is not None:
                cosine = min(cosine, _least_cosine(stored.features, fresh.features))
            if not (float(worst) <= _MAX_DEVIATION and cosine >= _MIN_COSINE):  # or NaN
                raise DraftError(
                    f"checking the cached target signal of sequence {index}",
                    found=f"cosine {cosine:.3f}, normaliser off by {float(worst):.2f}",
                    expected="the signal of a forward of that sequence alone",
                    remedy="delete build/partial/distill and rerun",
                )


def _serves(marker: Path, facts: dict[str, Any]) -> bool:
    """Whether a finished cache has what is wanted; one with more serves as well."""
    if not marker.exists():
        return False
    found = read_json(marker)
    if not facts["feature_layers"]:
        facts = facts | {"feature_layers": found.get("feature_layers")}
    return found == facts


def _least_cosine(stored: Tensor, fresh: Tensor) -> float:
    return float(torch.cosine_similarity(stored.float(), fresh.float().cpu(), dim=-1).min())


def _to_numpy(hidden: Tensor) -> np.ndarray:
    hidden = hidden.cpu()
    return (hidden if hidden.dtype == torch.float32 else hidden.view(torch.uint16)).numpy()


def by_length(sequences: Sequence[TrainingSequence]) -> Iterator[list[int]]:
    """Indices in groups of similar length, about `TOKENS_PER_FORWARD` tokens each."""
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index].token_ids))
    group: list[int] = []
    for index in order:
        if group and len(sequences[index].token_ids) * (len(group) + 1) > TOKENS_PER_FORWARD:
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
