"""The `distill` section."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class DistillConfig:
    """How a draft is trained. Budgets are steps, never seconds.

    Attributes:
        steps: Optimizer steps.
        batch_size: Sequences an optimizer step, over all accumulation steps.
        gradient_accumulation: Forward passes an optimizer step.
        learning_rate: Peak rate of AdamW.
        weight_decay: Of AdamW.
        warmup_steps: Linear warm-up.
        schedule: cosine, or wsd (warm-up, stable, linear decay over the last fifth).
        max_grad_norm: Clipping.
        mixed_precision: bf16 or no.
        signal: cache (last hidden states of the target on disk) or online (a target forward in
            every step).
        max_cache_gb: The cache is refused above this size.
        checkpoint_steps: A checkpoint every so many steps.
        log_steps: A line of history every so many steps.
        seed: Of data order.
    """

    steps: int
    batch_size: int
    gradient_accumulation: int
    learning_rate: float
    weight_decay: float
    warmup_steps: int
    schedule: Literal["cosine", "wsd"]
    max_grad_norm: float
    mixed_precision: Literal["bf16", "no"]
    signal: Literal["cache", "online"]
    max_cache_gb: float
    checkpoint_steps: int
    log_steps: int
    seed: int

    def __post_init__(self) -> None:
        """Check ranges."""
        if min(self.steps, self.batch_size, self.gradient_accumulation) < 1:
            raise ValueError("steps, batch_size and gradient_accumulation must be at least 1")
        if min(self.checkpoint_steps, self.log_steps) < 1:
            raise ValueError("checkpoint_steps and log_steps must be at least 1")
        if self.batch_size % self.gradient_accumulation:
            raise ValueError("batch_size must be a multiple of gradient_accumulation")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError("warmup_steps must lie between 0 and steps")

    def reseeded(self, by: int) -> DistillConfig:
        """The settings of a training that shall give another draft from the same data."""
        return replace(self, seed=self.seed + by)
