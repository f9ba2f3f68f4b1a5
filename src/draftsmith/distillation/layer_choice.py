"""Which of its target's layers a student starts from, by measured loss instead of by habit.

Greedy: the layer that alone gives the least loss, then the one that helps most beside it, and so
on. The loss is what training would minimise, on a few of its own sequences, before any training.
Deterministic: ties go to the lower layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.distillation.batches import TrainingSequence, collate
from draftsmith.distillation.divergences import Divergence
from draftsmith.distillation.objective import StudentObjective
from draftsmith.distillation.signals import OnlineSignals
from draftsmith.drafts.student import build_student, head_logits
from draftsmith.errors import DraftError

_LOG = logging.getLogger(__name__)
_NUM_SEQUENCES = 16

Layers = tuple[int, ...]


@dataclass(frozen=True)
class ChosenLayers:
    """A choice.

    Attributes:
        layers: Ascending.
        losses: For every round the least loss that a layer more gave, in nats a position.
    """

    layers: Layers
    losses: tuple[float, ...]


def choose_layers(num_layers: int, count: int, loss_of: Callable[[Layers], float]) -> ChosenLayers:
    """Greedy search for the `count` layers of least loss.

    Args:
        num_layers: Layers of the target.
        count: Layers wanted.
        loss_of: Loss of a student of these layers, ascending.

    Raises:
        DraftError: The target has fewer layers.
    """
    if count > num_layers:
        raise DraftError(
            "choosing the student's layers",
            found=f"layers.choose = {count}",
            expected=f"at most the target's {num_layers} layers",
            remedy="mend `layers` in the recipe under conf/draft/",
        )
    layers: Layers = ()
    losses: list[float] = []
    for _ in range(count):
        candidates = [
            tuple(sorted((*layers, layer))) for layer in range(num_layers) if layer not in layers
        ]
        measured = [loss_of(candidate) for candidate in candidates]
        losses.append(min(measured))
        layers = candidates[measured.index(losses[-1])]
        _LOG.info("layers=%s calibration_loss=%.3f", list(layers), losses[-1])
    return ChosenLayers(layers, tuple(losses))


def calibration_loss(
    target: PreTrainedModel,
    token_ids: Tensor | None,
    sequences: Sequence[TrainingSequence],
    divergence: Divergence,
) -> Callable[[Layers], float]:
    """The loss of untrained students, teacher-forced on sequences from all over the corpus.

    Args:
        target: Live target.
        token_ids: The draft's vocabulary; None keeps the whole head.
        sequences: The training sequences.
        divergence: What training minimises.

    Returns:
        A function from layers to the mean loss a position.
    """
    places = np.linspace(0, len(sequences) - 1, min(_NUM_SEQUENCES, len(sequences)))
    batch = collate(sequences, places.astype(int).tolist())
    signal = OnlineSignals(target).signal(batch)

    @torch.no_grad()
    def loss_of(layers: Layers) -> float:
        student = build_student(target, layers, token_ids)
        objective = StudentObjective(student, lambda h: head_logits(student, h), divergence)
        loss, _ = objective(batch, signal, target.device)
        return float(loss) / int(batch.mask.sum())

    return loss_of
