"""The target's k largest log-probabilities at every response position, cached on disk.

For a wide target it is a fraction of its hidden states. What is left of the mass, 1 less the sum of
the k, is kept as the probability of all other tokens together: `TopKSignal.beside` compares both
models over the k and that one entry, instead of pretending that the k are everything. A divergence
over merged tokens is a lower bound of the full one, and alpha an upper bound of the real one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.artifacts import read_json, write_json, writing
from draftsmith.distillation.batches import TokenBatch, TrainingSequence, collate
from draftsmith.distillation.reserved import have_files, reserve_files
from draftsmith.distillation.signals import StoredArray, by_length, require_room
from draftsmith.drafts.student import head_logits
from draftsmith.errors import DraftError

_LOG = logging.getLogger(__name__)
_SPOT_CHECKS = 3
_MAX_DEVIATION, _RARE = 1.0, -4.0  # nats, far outside bfloat16 noise where tokens are not rare
_NOTHING = -1e4  # the logarithm of what is no probability at all, but finite
_LEAST_REST = 1e-6


@dataclass(frozen=True)
class TopKSignal:
    """Signal of the positions that a batch masks, in row-major order.

    Attributes:
        rows: int64 `[n, k]`, rows of the draft's head, -1 for a token outside its vocabulary.
        log_probs: float32 `[n, k]`, largest first.
    """

    rows: Tensor
    log_probs: Tensor

    def beside(self, log_q: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        """Log-probabilities of target and draft over the k tokens and all others as one.

        Tokens outside the draft's vocabulary have no mass on either side, as they have when the
        whole distribution is compared.

        Args:
            log_q: `[m, entries]` of the draft.
            place: Which m positions these are.

        Returns:
            Both `[m, k + 1]`.
        """
        rows = self.rows[place].to(log_q.device)
        log_p = self.log_probs[place].to(log_q.device)
        chosen = log_q.gather(-1, rows.clamp_min(0)).masked_fill(rows < 0, _NOTHING)
        known = log_p.masked_fill(rows < 0, _NOTHING)
        return _with_rest(known, log_p), _with_rest(chosen, chosen)


def _with_rest(log_probs: Tensor, counted: Tensor) -> Tensor:
    """Append the logarithm of what `counted` leaves of 1."""
    rest = 1 - counted.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, rest.clamp_min(_LEAST_REST).log()], -1)


def topk_arrays(positions: int, k: int) -> dict[str, StoredArray]:
    """What `TopKSignals` keeps of so many response positions, by file name."""
    kinds = {"ids.bin": np.dtype(np.int32), "log_probs.bin": np.dtype(np.float32)}
    return {name: StoredArray((positions, k), kind) for name, kind in kinds.items()}


class TopKSignals:
    """Signals of all sequences, computed once and memory-mapped.

    Args:
        directory: Where they live; a finished cache found there is used.
        target: Asked for what is missing.
        sequences: The training sequences, in the order of their indices.
        token_ids: int64 `[entries]`, the draft's vocabulary; None is the target's. What is stored
            does not depend on it.
        k: Entries a position.
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
        token_ids: Tensor | None,
        k: int,
        max_gb: float,
    ) -> None:
        vocab_size = int(target.get_output_embeddings().weight.shape[0])
        self._target, self._k = target, min(k, vocab_size)
        self._rows = _rows_of(token_ids, vocab_size)
        self._offsets: list[int] = np.cumsum([0] + [s.num_predicted for s in sequences]).tolist()
        total = self._offsets[-1]
        arrays = topk_arrays(total, self._k)
        sizes = {name: array.num_bytes for name, array in arrays.items()}
        require_room(total, sum(sizes.values()), max_gb)
        marker, facts = directory / "finished.json", {"positions": total, "k": self._k}
        is_finished = (
            have_files(directory, sizes) and marker.exists() and read_json(marker) == facts
        )
        if not is_finished:
            reserve_files(directory, sizes)
        self._ids, self._log_probs = (
            np.memmap(directory / name, array.dtype, "r+", shape=array.shape)
            for name, array in arrays.items()
        )
        if is_finished:
            _LOG.info("signal_cache=found positions=%d", total)
        else:
            with writing(directory):
                self._fill(sequences)
            write_json(marker, facts)
        self._spot_check(sequences)

    def signal(self, batch: TokenBatch) -> TopKSignal:
        """Read the batch's positions."""
        token_ids, log_probs = self._read(batch)
        return TopKSignal(self._rows[token_ids], log_probs)

    def _read(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        places = [slice(self._offsets[i], self._offsets[i + 1]) for i in batch.indices]
        token_ids = np.concatenate([self._ids[place] for place in places])
        log_probs = np.concatenate([self._log_probs[place] for place in places])
        return torch.from_numpy(token_ids).long(), torch.from_numpy(log_probs)

    def _fill(self, sequences: Sequence[TrainingSequence]) -> None:
        for indices in by_length(sequences):
            top = [part.topk(self._k) for part in self._forward(collate(sequences, indices))]
            log_probs = torch.cat([one.values for one in top]).cpu().numpy()
            token_ids = torch.cat([one.indices for one in top]).int().cpu().numpy()
            start = 0
            for index in indices:
                place = slice(self._offsets[index], self._offsets[index + 1])
                end = start + sequences[index].num_predicted
                self._ids[place] = token_ids[start:end]
                self._log_probs[place] = log_probs[start:end]
                start = end
        self._ids.flush()
        self._log_probs.flush()

    @torch.no_grad()
    def _forward(self, batch: TokenBatch) -> Iterator[Tensor]:
        """Log-probabilities of the target at the masked positions, some at a time."""
        token_ids = batch.token_ids.to(self._target.device)
        hidden = self._target.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        for part in hidden[batch.mask.to(hidden.device)].split(1024):
            yield head_logits(self._target, part).float().log_softmax(-1)

    def _spot_check(self, sequences: Sequence[TrainingSequence]) -> None:
        """Compare with a forward of single sequences: padding or order faults would show."""
        for index in np.linspace(0, len(sequences) - 1, _SPOT_CHECKS).astype(int).tolist():
            batch = collate(sequences, [index])
            fresh = torch.cat(list(self._forward(batch))).cpu()
            worst = _deviation(*self._read(batch), fresh)
            if not worst <= _MAX_DEVIATION:  # or not a number
                raise DraftError(
                    f"checking the cached target signal of sequence {index}",
                    found=f"log-probabilities that are off by {worst:.2f}",
                    expected="the signal of a forward of that sequence alone",
                    remedy="delete build/partial/distill and rerun",
                )


def _deviation(token_ids: Tensor, log_probs: Tensor, fresh: Tensor) -> float:
    """Largest deviation in nats from `[n, vocab_size]`, of tokens that are not rare."""
    if token_ids.min() < 0 or token_ids.max() >= fresh.shape[-1]:
        return math.inf
    off = (log_probs - fresh.gather(-1, token_ids)).abs()
    return float(off.masked_fill(log_probs < _RARE, 0).max())


def _rows_of(token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """The draft's row of each of the target's ids, -1 for none: int64 `[vocab_size]`."""
    if token_ids is None:
        return torch.arange(vocab_size)
    rows = torch.full((vocab_size,), -1)
    rows[token_ids.cpu()] = torch.arange(len(token_ids))
    return rows
