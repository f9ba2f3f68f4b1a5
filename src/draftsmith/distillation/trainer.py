"""The training loop: `accelerate` for devices and precision, exact resume, a history.

Knows nothing of recipes or registries. The data order follows from the step, there is no dropout
and no other randomness, so a killed run that resumes ends with the draft that an unbroken one would
have given.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.artifacts import keep_only, write_text, writing
from draftsmith.distillation.batches import TokenBatch, TrainingSequence, collate, step_indices
from draftsmith.distillation.divergences import forward_kl, overlap
from draftsmith.distillation.settings import DistillConfig
from draftsmith.distillation.signals import Signal, SignalSource
from draftsmith.drafts.student import head_logits
from draftsmith.errors import ArtifactError, CorpusError

_LOG = logging.getLogger(__name__)
_DECAY_SHARE = 0.2
_POSITIONS_PER_CHUNK = 2048

OnStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class TrainingOutcome:
    """What a run leaves besides the weights.

    Attributes:
        history: Step, loss, alpha and tokens/s, one entry every `log_steps` steps.
        resumed_at: The step that a checkpoint was found at, 0 for none.
        num_tokens: Response tokens of all sequences.
        mask_coverage: Their share of all tokens.
    """

    history: list[dict[str, float]]
    resumed_at: int
    num_tokens: int
    mask_coverage: float


def learning_rate_factor(step: int, config: DistillConfig) -> float:
    """Factor of the peak learning rate at `step` (from 0), in [0, 1]."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    span = max(1, config.steps - config.warmup_steps)
    done = (step - config.warmup_steps) / span
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return min(1.0, (1 - done) / _DECAY_SHARE)


def distill(  # noqa: PLR0913  live objects of one training run
    objective: nn.Module,
    sequences: Sequence[TrainingSequence],
    signals: SignalSource,
    *,
    config: DistillConfig,
    checkpoints: Path,
    on_step: OnStep = lambda _step, _metrics: None,
) -> TrainingOutcome:
    """Train the objective's weights that want a gradient, in place.

    Args:
        objective: A draft and its loss: called with a batch, its signal and the device, it gives
            sums of loss and alpha over the masked positions.
        sequences: Training sequences.
        signals: The target's signal for a batch.
        config: Budget and optimizer.
        checkpoints: Folder of this run's checkpoints; a finished one is resumed from.
        on_step: Called after every optimizer step with loss, alpha and tokens/s.

    Raises:
        CorpusError: No position is masked, or the loss is not finite.
        ArtifactError: The disk refused a checkpoint; the one before it stays.
    """
    optimization = _Optimization(objective, config)
    run = _Run(optimization.accelerator, checkpoints, config)
    resumed_at = run.resume()
    lengths = [len(sequence.token_ids) for sequence in sequences]
    clock = time.perf_counter()
    for step in range(resumed_at, config.steps):
        indices = step_indices(lengths, config.batch_size, seed=config.seed, step=step)
        batches = [collate(sequences, part) for part in _parts(indices, config)]
        num_positions = sum(int(batch.mask.sum()) for batch in batches)
        _require(num_positions > 0, step, found="no response position")
        loss, alpha = optimization.step(batches, signals, num_positions)
        _require(math.isfinite(loss), step, found=f"a loss of {loss}")
        now = time.perf_counter()
        metrics = {"loss": loss, "alpha": alpha, "tokens_per_s": num_positions / (now - clock)}
        clock = now
        run.after_step(step, metrics)
        on_step(step, metrics)
    return run.outcome(sequences, resumed_at)


def _parts(indices: list[int], config: DistillConfig) -> Iterator[list[int]]:
    size = config.batch_size // config.gradient_accumulation
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


def _require(holds: bool, step: int, *, found: str) -> None:
    if not holds:
        raise CorpusError(
            f"training step {step}",
            found=found,
            expected="response tokens under the mask and a finite loss",
            remedy="check the corpus (prompt and response boundaries) and the learning rate",
        )


class _Optimization:
    """The prepared objective with its optimizer and schedule.

    Accumulation is counted here and not by `accelerate`, whose counter would run over the end of an
    epoch, where the last batch may have fewer parts than the others.
    """

    def __init__(self, objective: nn.Module, config: DistillConfig) -> None:
        self.accelerator = Accelerator(
            mixed_precision=config.mixed_precision, cpu=not torch.cuda.is_available()
        )
        self._config = config
        self._trained = [p for p in objective.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            self._trained,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(0.9, 0.95),
            fused=True,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, config)
        )
        prepared = self.accelerator.prepare(objective, optimizer, scheduler)
        self._module, self._optimizer, self._scheduler = prepared
        self._module.eval()  # the mode without dropout

    def step(
        self, batches: Sequence[TokenBatch], signals: SignalSource, num_positions: int
    ) -> tuple[float, float]:
        """One optimizer step over the parts of a batch; returns mean loss and alpha by position.

        Every part's loss is divided by the positions of all parts, so that the gradient does not
        depend on how a batch is cut.
        """
        loss, alpha = 0.0, 0.0
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)
            with nullcontext() if is_last else self.accelerator.no_sync(self._module):
                total, agreed = self._module(batch, signals.signal(batch), self.accelerator.device)
                self.accelerator.backward(total / num_positions)
            loss += float(total.detach()) / num_positions
            alpha += float(agreed) / num_positions
        self.accelerator.clip_grad_norm_(self._trained, self._config.max_grad_norm)
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return loss, alpha


class StudentObjective(nn.Module):
    """Student and loss in one module, so that `accelerate` wraps both.

    Args:
        student: Float32 weights except the frozen embedding and head.
        target_head: Target logits over the draft's vocabulary from hidden states `[n, width]`.
    """

    def __init__(self, student: PreTrainedModel, target_head: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.student = student
        self._target_head = target_head

    def forward(
        self, batch: TokenBatch, signal: Signal, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Sums of loss and alpha over the masked positions."""
        hidden = self._last_hidden(batch.token_ids.to(device))[batch.mask.to(device)]
        total, agreed = hidden.new_zeros((2,), dtype=torch.float32)
        for start in range(0, len(hidden), _POSITIONS_PER_CHUNK):
            chunk = slice(start, start + _POSITIONS_PER_CHUNK)
            with torch.no_grad():
                target = self._target_head(signal.hidden[chunk].to(device)).float()
                log_p = target - signal.log_normaliser[chunk].to(device)[:, None]
            log_q = head_logits(self.student, hidden[chunk]).float().log_softmax(-1)
            total = total + forward_kl(log_p, log_q).sum()
            agreed = agreed + overlap(log_p, log_q.detach()).sum()
        return total, agreed

    def _last_hidden(self, token_ids: Tensor) -> Tensor:
        inputs = {"input_ids": token_ids}
        embedding = self.student.get_input_embeddings()
        is_mixed = torch.is_autocast_enabled(token_ids.device.type)
        if not is_mixed and embedding.weight.dtype != torch.float32:
            # The target's embedding under layers in float32, without autocast to join them.
            inputs = {"inputs_embeds": embedding(token_ids).float()}
        hidden: Tensor = self.student.base_model(**inputs, use_cache=False).last_hidden_state
        return hidden


class _Run:
    """Checkpoints and history of one run in one folder.

    A checkpoint counts only once its folder has its final name.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, config: DistillConfig) -> None:
        self._accelerator, self._folder, self._config = accelerator, folder, config
        self._history: list[dict[str, float]] = []

    def resume(self) -> int:
        """Load the newest checkpoint into the prepared objects; returns the finished steps."""
        finished = sorted(self._folder.glob("step-*"))
        if not finished:
            return 0
        self._accelerator.load_state(str(finished[-1]))
        step = int(finished[-1].name.removeprefix("step-"))
        history = (finished[-1] / "history.json").read_text(encoding="utf-8")
        self._history = json.loads(history)
        _LOG.info("resumed_at_step=%d of=%d", step, self._config.steps)
        return step

    def after_step(self, step: int, metrics: dict[str, float]) -> None:
        """Keep history; save when due."""
        done = step + 1
        if done % self._config.log_steps == 0 or done == self._config.steps:
            self._history.append({"step": float(done), **metrics})
        if done % self._config.checkpoint_steps == 0 and done < self._config.steps:
            self._save(done)

    def _save(self, done: int) -> None:
        self._accelerator.wait_for_everyone()
        final = self._folder / f"step-{done:08d}"
        unfinished = self._folder / f".unfinished-{done:08d}"
        try:
            with writing(unfinished):
                self._accelerator.save_state(str(unfinished))
                if self._accelerator.is_main_process:
                    write_text(unfinished / "history.json", json.dumps(self._history))
                    unfinished.replace(final)
        except ArtifactError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        if self._accelerator.is_main_process:
            keep_only(self._folder, final.name)
        self._accelerator.wait_for_everyone()

    def outcome(self, sequences: Sequence[TrainingSequence], resumed_at: int) -> TrainingOutcome:
        """Facts for the manifest."""
        tokens = sum(sequence.num_predicted for sequence in sequences)
        positions = sum(len(sequence.token_ids) for sequence in sequences)
        return TrainingOutcome(self._history, resumed_at, tokens, tokens / positions)
