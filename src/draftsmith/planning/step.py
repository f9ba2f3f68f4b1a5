"""Working memory of a training step and of the target's signals, as the trainer's code makes it.

The step runs on fake tensors: the same objective, forward and backward, in chunks, under autocast.
What its tensors would take is counted, and nothing is taken. Every sequence is taken to be as long
as the longest. What kernels need for themselves and what an allocator keeps is not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from draftsmith.distillation.batches import TokenBatch
from draftsmith.distillation.building import Objective, build_draft, in_float32, objective_of
from draftsmith.distillation.settings import DistillConfig
from draftsmith.distillation.signals import TOKENS_PER_FORWARD, OnlineSignals, Signal
from draftsmith.distillation.topk_signals import TopKSignal
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.medusa import MedusaHeads
from draftsmith.drafts.settings import EagleConfig, StudentConfig, TrainedConfig
from draftsmith.planning.memory import (
    FUSED,
    PLAIN,
    KnownMasks,
    PeakMemory,
    fake_tensors,
    register_attentions,
)
from draftsmith.planning.models import draft_layers, draft_vocabulary, meta_target

_LOG = logging.getLogger(__name__)
_CPU = torch.device("cpu")  # where fake tensors claim to be: autocast of any device rounds alike

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class StepShape:
    """The sequences of one forward pass.

    Attributes:
        rows: Sequences.
        prompt: Tokens of a prompt, 2 or more.
        response: Tokens of a response.
    """

    rows: int
    prompt: int
    response: int

    @property
    def width(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.response

    @property
    def num_positions(self) -> int:
        """Positions that a loss is taken at."""
        return self.rows * self.response

    def batch(self) -> TokenBatch:
        """Sequences of this shape; made of fake tensors where these are made."""
        token_ids = torch.zeros(self.rows, self.width, dtype=torch.long)
        return TokenBatch(list(range(self.rows)), token_ids, token_ids.bool())

    def masks(self) -> KnownMasks:
        """What the batch's masks select; the first of it is read as an entry of a feature head."""
        return KnownMasks(self.num_positions, first=self.prompt - 2)


@dataclass(frozen=True)
class PlannedStep:
    """A training step of a recipe.

    Attributes:
        directory: Holds the target's config.
        dtype: The target's.
        recipe: The recipe.
        config: The distill section.
        device_type: Where it is to run.
        shape: The sequences of a forward pass.
    """

    directory: Path
    dtype: str
    recipe: TrainedConfig
    config: DistillConfig
    device_type: DeviceType
    shape: StepShape

    def training_bytes(self) -> int | None:
        """The most bytes that a step holds besides weights and optimizer, gradients included.

        None where the model's class does not run without numbers.
        """
        return _counted(self._train)

    def signal_bytes(self) -> int | None:
        """The most bytes that a forward pass of the target for its signals holds, as above.

        A cache is filled in passes of their own size; signals that are not cached are made for the
        step's own sequences.
        """
        return _counted(self._signals)

    def _train(self) -> int:
        target = meta_target(self.directory, self.dtype)
        token_ids = draft_vocabulary(self.recipe, target)
        with torch.device("meta"):
            layers = draft_layers(self.recipe, target)
            draft = build_draft(self.recipe, target, layers, token_ids)
        in_float32(draft)
        if not isinstance(draft, MedusaHeads):  # which have no attention
            draft.set_attn_implementation(PLAIN if self.device_type == "cpu" else FUSED)
        with fake_tensors(target, draft):
            objective = objective_of(self.recipe, self.config, draft, target, token_ids)
            objective.device_type = self.device_type
            return self._peak(objective, lambda: self._signal(target, draft))

    def _peak(self, objective: Objective, make_signal: Callable[[], Signal | TopKSignal]) -> int:
        """Bytes of a forward and a backward pass, its inputs included."""
        batch, is_mixed = self.shape.batch(), self.config.mixed_precision == "bf16"
        with self.shape.masks(), PeakMemory() as memory:
            signal = make_signal()
            # Gradients of a part before are there while the next part runs.
            for _ in range(min(2, self.config.gradient_accumulation)):
                with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                    loss, _ = objective(batch, signal, _CPU)
                loss.backward()
        peak: int = memory.peak  # torch says that leaving a mode may be of any type
        return peak

    def _signal(self, target: PreTrainedModel, draft: PreTrainedModel) -> Signal | TopKSignal:
        count = self.shape.num_positions
        if self.config.signal == "topk" and isinstance(self.recipe, StudentConfig):
            shape = (count, self.config.topk)
            return TopKSignal(torch.zeros(shape, dtype=torch.long), torch.zeros(shape))
        width = int(target.config.get_text_config().hidden_size)
        features = None
        if isinstance(draft, EagleHead):
            joined = width * len(draft.feature_layers)
            features = torch.zeros(
                self.shape.rows, self.shape.width - 1, joined, dtype=target.dtype
            )
        hidden = torch.zeros(count, width, dtype=target.dtype)
        return Signal(hidden, torch.zeros(count), features)

    def _signals(self) -> int:
        target = meta_target(self.directory, self.dtype)
        target.set_attn_implementation(FUSED)
        layers = draft_layers(self.recipe, target) if isinstance(self.recipe, EagleConfig) else ()
        shape = self.shape
        if self.config.signal != "online":
            rows = max(1, TOKENS_PER_FORWARD // shape.width)
            shape = StepShape(rows, shape.prompt, shape.response)
        with fake_tensors(target):
            batch = shape.batch()
            with shape.masks(), PeakMemory() as memory:
                OnlineSignals(target, layers).signal(batch)
        peak: int = memory.peak
        return peak


def _counted(run: Callable[[], int]) -> int | None:
    """What `run` counts on fake tensors; None where a model's class needs numbers.

    Any class of Transformers may be asked for, and what it does with a tensor is its own.
    """
    register_attentions()
    try:
        return run()
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        _LOG.warning("working_memory=unknown reason=%s: %s", type(error).__name__, reason)
        return None
