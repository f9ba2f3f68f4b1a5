"""What a plan is made for, apart from the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftsmith.distillation.settings import DistillConfig
from draftsmith.planning.corpus import CorpusSize
from draftsmith.planning.models import CacheShape
from draftsmith.planning.step import DeviceType, StepShape


@dataclass(frozen=True)
class Machine:
    """What it is to run on.

    Attributes:
        device_type: cpu or cuda.
        memory: Bytes of a device; None where nothing is said of it.
        shards: Devices that divide a target; 1, or in a training all of its processes.
        processes: Processes of a training, each with a device and a draft.
    """

    device_type: DeviceType
    memory: int | None = None
    shards: int = 1
    processes: int = 1


@dataclass(frozen=True)
class Rates:
    """What was measured, and what it costs; None is not known.

    Attributes:
        rollout_tokens_per_s: Of stage corpus.
        training_tokens_per_s: Of stage distill, over all processes.
        price_per_device_hour: In any currency.
    """

    rollout_tokens_per_s: float | None = None
    training_tokens_per_s: float | None = None
    price_per_device_hour: float | None = None


@dataclass(frozen=True)
class Job:
    """A distillation of one target.

    Attributes:
        directory: Holds the target's config.
        dtype: "auto", bfloat16, float16 or float32.
        config: The distill section.
        corpus: How many tokens there are.
        cache: What a decoder is to hold.
        machine: What it is to run on.
        is_copied: Whether a snapshot of the target is kept.
    """

    directory: Path
    dtype: str
    config: DistillConfig
    corpus: CorpusSize
    cache: CacheShape
    machine: Machine
    is_copied: bool = True

    def shape(self, config: DistillConfig) -> StepShape:
        """The sequences of a forward pass under these settings, all as long as the longest."""
        parts = self.machine.processes * config.gradient_accumulation
        rows = -(-config.batch_size // parts)
        prompt, response = self.corpus.longest_prompt, self.corpus.longest_response
        learned = prompt - 2 if config.prompt_positions else 0
        return StepShape(rows, prompt - learned, learned + response)

    def shard(self, num_bytes: int) -> int:
        """A device's part of what the target's devices divide."""
        return -(-num_bytes // self.machine.shards)
