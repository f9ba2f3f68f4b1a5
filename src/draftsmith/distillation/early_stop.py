"""Early stopping: alpha on training prompts that are not trained on, and the best weights so far.

Which prompts are held out follows from their ids alone; the eval split plays no part. All of it is
deterministic and goes into the checkpoints, so a resumed run stops where an unbroken one stops.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.artifacts import digest_json, write_text
from draftsmith.distillation.batches import TrainingSequence, collate
from draftsmith.distillation.processes import of_all
from draftsmith.distillation.signals import SignalSource
from draftsmith.errors import CorpusError

_SHARE = 0.05
_BATCH_SIZE = 8
_WEIGHTS, _RECORD = "best.safetensors", "early_stop.json"


def held_out_indices(prompt_ids: Sequence[str]) -> list[int]:
    """Which responses belong to held-out prompts, about one prompt in twenty.

    Args:
        prompt_ids: The prompt of each response; all responses of a prompt go together.

    Raises:
        CorpusError: No prompt is held out, or none is left to train on.
    """
    held_out = {name for name in set(prompt_ids) if _place(name) < _SHARE}
    indices = [index for index, name in enumerate(prompt_ids) if name in held_out]
    if not 0 < len(indices) < len(prompt_ids):
        raise CorpusError(
            "holding training prompts out for distill.early_stop_patience",
            found=f"{len(held_out)} of {len(set(prompt_ids))} prompts",
            expected="at least one, and others to train on",
            remedy="add prompts to corpus.sources, or set distill.early_stop_patience to 0",
        )
    return indices


def _place(prompt_id: str) -> float:
    """Where the prompt lies in [0, 1); another place than that of the corpus's split."""
    return int(digest_json(["early stop", prompt_id])[:8], 16) / 16.0**8


class EarlyStop:
    """The judge of one training.

    Args:
        objective: Gives sums of loss and alpha of a batch, and holds the weights.
        sequences: All training sequences.
        held_out: Those that are judged by.
        signals: The target's signal for a batch.
        patience: Evaluations without a better alpha that end the training.
    """

    def __init__(
        self,
        objective: nn.Module,
        sequences: Sequence[TrainingSequence],
        held_out: Sequence[int],
        *,
        signals: SignalSource,
        patience: int,
    ) -> None:
        self._objective, self._signals, self._patience = objective, signals, patience
        self._sequences = sequences
        by_length = sorted(held_out, key=lambda index: len(sequences[index].token_ids))
        starts = range(0, len(by_length), _BATCH_SIZE)
        self._batches = [by_length[start : start + _BATCH_SIZE] for start in starts]
        self._weights: dict[str, Tensor] = {}
        self.evaluations: list[dict[str, float]] = []

    @property
    def best(self) -> int:
        """Place of the best evaluation, the first of equal ones."""
        alphas = [entry["alpha"] for entry in self.evaluations]
        return alphas.index(max(alphas))

    def judge(self, step: int) -> bool:
        """Evaluate after `step` steps; says whether the training should end.

        All processes call it together, and what the main one measured counts in all of them: they
        may round differently, and one that ended alone would leave the others waiting.
        """
        alpha = of_all(self._alpha())[0]
        self.evaluations.append({"step": float(step), "alpha": alpha})
        num_worse = len(self.evaluations) - 1 - self.best
        if num_worse == 0:
            self._weights = {name: p.detach().to("cpu", copy=True) for name, p in self._trained()}
        return num_worse >= self._patience

    @torch.no_grad()
    def restore(self) -> None:
        """Give the student its best weights."""
        for name, parameter in self._trained():
            parameter.copy_(self._weights[name])

    def copied(self) -> Callable[[Path], None]:
        """What adds the state as it is now to a checkpoint; later evaluations do not change it."""
        weights, record = self._weights, json.dumps(self.evaluations)

        def save(folder: Path) -> None:
            if weights:
                save_file(weights, folder / _WEIGHTS)
            write_text(folder / _RECORD, record)

        return save

    def load(self, folder: Path) -> None:
        """Take the state from a checkpoint; where part of it cannot be read, nothing."""
        evaluations = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        self._weights = load_file(folder / _WEIGHTS) if evaluations else {}
        self.evaluations = evaluations

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._objective.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def _alpha(self) -> float:
        device = next(self._objective.parameters()).device
        agreed, num_positions = 0.0, 0
        for indices in self._batches:
            batch = collate(self._sequences, indices)
            _, alphas = self._objective(batch, self._signals.signal(batch), device)
            agreed += float(alphas)
            num_positions += int(batch.mask.sum())
        return agreed / num_positions
