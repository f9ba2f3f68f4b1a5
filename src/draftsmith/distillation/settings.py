"""The `distill` section."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

# They change when files are written, what is logged and kept in memory, never the weights.
_OPERATIONAL = frozenset(
    {"checkpoint_steps", "gradient_checkpointing", "log_steps", "max_cache_gb"}
)


@dataclass(frozen=True)
class DistillConfig:
    """How a draft is trained. Budgets are steps, never seconds.

    Attributes:
        steps: Optimizer steps.
        warm_start_steps: The same of a training that goes on from an earlier draft; never more than
            `steps` are taken.
        batch_size: Sequences an optimizer step, over all accumulation steps and processes.
        gradient_accumulation: Forward passes an optimizer step.
        gradient_checkpointing: What is in the draft's layers, or in the blocks of heads, is
            computed again in the backward pass instead of kept.
        learning_rate: Peak rate of AdamW.
        weight_decay: Of AdamW.
        warmup_steps: Linear warm-up.
        schedule: cosine, or wsd (warm-up, stable, linear decay over the last fifth).
        max_grad_norm: Clipping.
        mixed_precision: bf16 or no.
        loss: The divergence that is minimised; acceptance is -log of the acceptance rate.
        js_beta: Of jensen_shannon: towards 0 like forward_kl, towards 1 like reverse_kl.
        prompt_positions: The tokens of prompts are learned, too, behind what all prompts begin
            with; each prompt once. Held-out prompts are judged by their responses alone.
        signal: cache (last hidden states of the target on disk), topk (its largest probabilities
            on disk, the rest as one) or online (a target forward in every step).
        topk: Probabilities a position that signal topk keeps.
        max_cache_gb: The cache is refused above this size.
        early_stop_patience: So many evaluations without a better held-out alpha end the training;
            the best weights are kept. 0 trains all steps on all prompts.
        early_stop_steps: Steps between evaluations.
        checkpoint_steps: A checkpoint every so many steps.
        log_steps: A line of history every so many steps.
        seed: Of data order.
    """

    steps: int
    batch_size: int
    gradient_accumulation: int
    gradient_checkpointing: bool
    learning_rate: float
    weight_decay: float
    warmup_steps: int
    schedule: Literal["cosine", "wsd"]
    max_grad_norm: float
    mixed_precision: Literal["bf16", "no"]
    loss: Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "acceptance"]
    js_beta: float
    signal: Literal["cache", "topk", "online"]
    topk: int
    max_cache_gb: float
    early_stop_patience: int
    early_stop_steps: int
    checkpoint_steps: int
    log_steps: int
    seed: int
    prompt_positions: bool = False
    warm_start_steps: int = 400

    def __post_init__(self) -> None:
        """Check ranges."""
        if min(self.steps, self.batch_size, self.gradient_accumulation) < 1:
            raise ValueError("steps, batch_size and gradient_accumulation must be at least 1")
        if self.warm_start_steps < 1:
            raise ValueError("warm_start_steps must be at least 1")
        if min(self.checkpoint_steps, self.log_steps, self.early_stop_steps) < 1:
            raise ValueError("checkpoint_steps, log_steps and early_stop_steps must be at least 1")
        if self.batch_size % self.gradient_accumulation:
            raise ValueError("batch_size must be a multiple of gradient_accumulation")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError("warmup_steps must lie between 0 and steps")
        if self.topk < 1:
            raise ValueError("topk must be at least 1")
        if not 0 < self.js_beta < 1:
            raise ValueError("js_beta must lie between 0 and 1")
        if self.early_stop_patience < 0:
            raise ValueError("early_stop_patience must be 0 (off) or more")

    def reseeded(self, by: int) -> DistillConfig:
        """The settings of a training that shall give another draft from the same data."""
        return replace(self, seed=self.seed + by)

    def warm_started(self) -> DistillConfig:
        """The settings of a training that goes on from an earlier draft."""
        steps = min(self.steps, self.warm_start_steps)
        return replace(self, steps=steps, warmup_steps=min(self.warmup_steps, steps))

    def decisive(self) -> dict[str, Any]:
        """The settings that decide the weights: no operation, nothing that another switches off."""
        idle = {*_OPERATIONAL, "warm_start_steps"}  # which are the `steps` of a warm start
        if self.loss != "jensen_shannon":
            idle.add("js_beta")
        if self.signal != "topk":
            idle.add("topk")
        if self.early_stop_patience == 0:
            idle.add("early_stop_steps")
        if not self.prompt_positions:
            idle.add("prompt_positions")  # as if it were not there: older drafts are still known
        return {key: value for key, value in asdict(self).items() if key not in idle}
