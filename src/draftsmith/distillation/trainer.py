"""The training loop: `accelerate` for devices and precision, exact resume, a history.

Knows nothing of recipes or registries. The data order follows from the step, there is no dropout
and no other randomness, so a killed run that resumes ends with the draft that an unbroken one would
have given. Several processes share each step's sequences and take the step that one would take.
"""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from draftsmith.distillation.batches import TokenBatch, TrainingSequence, collate, step_indices
from draftsmith.distillation.checkpoints import Run, Trained
from draftsmith.distillation.early_stop import EarlyStop
from draftsmith.distillation.processes import join
from draftsmith.distillation.settings import DistillConfig
from draftsmith.distillation.signals import SignalSource
from draftsmith.errors import CorpusError

_LOG = logging.getLogger(__name__)
_DECAY_SHARE = 0.2
_BYTES_PER_GB = 1e9

OnStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class TrainingOutcome:
    """What a run leaves besides the weights.

    Attributes:
        history: Step, loss, alpha, tokens/s and memory, one entry every `log_steps` steps.
        resumed_at: The step that a checkpoint was found at, 0 for none.
        num_tokens: Tokens that the sequences which were trained on predict.
        mask_coverage: Their share of all tokens.
        evaluations: Step and alpha on what was held out; empty without early stopping.
        best: Place of the evaluation whose weights were kept.
    """

    history: list[dict[str, float]]
    resumed_at: int
    num_tokens: int
    mask_coverage: float
    evaluations: Sequence[dict[str, float]] = ()
    best: int = -1


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
    held_out: Sequence[int] = (),
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
        held_out: Sequences that the training is judged by instead; none where it runs all steps.
        on_step: Called after every optimizer step with loss, alpha, tokens/s and memory in GB.

    Raises:
        CorpusError: No position is masked, or the loss is not finite.
        ArtifactError: The disk refused a checkpoint; the one before it stays. Or not all processes
            find the same one to go on from.
    """
    optimization = _Optimization(objective, config)
    early_stop = optimization.early_stop(sequences, held_out, signals)
    trained = sorted(set(range(len(sequences))) - set(held_out))
    lengths = [len(sequences[index].token_ids) for index in trained]
    clock = _Clock(optimization.accelerator.device)
    with Run(optimization.trained, checkpoints, config, early_stop) as run:
        resumed_at = run.resume()
        for step in range(resumed_at, config.steps):
            chosen = step_indices(lengths, config.batch_size, seed=config.seed, step=step)
            indices = [trained[place] for place in chosen]
            num_positions = sum(sequences[index].num_predicted for index in indices)
            _require(num_positions > 0, step, found="no response position")
            optimization.set_rate(step)
            loss, alpha = optimization.step(sequences, indices, signals, num_positions)
            _require(math.isfinite(loss), step, found=f"a loss of {loss}")
            metrics = {"loss": loss, "alpha": alpha, **clock.read(num_positions)}
            is_over = run.after_step(step, metrics)
            on_step(step, metrics)
            if is_over:
                break
    return _outcome(run, [sequences[index] for index in trained], resumed_at, early_stop)


def _require(holds: bool, step: int, *, found: str) -> None:
    if not holds:
        raise CorpusError(
            f"training step {step}",
            found=found,
            expected="response tokens under the mask and a finite loss",
            remedy="check the corpus (prompt and response boundaries) and the learning rate",
        )


class _Clock:
    """What the progress bar shows beside the loss."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._last = device, time.perf_counter()

    def read(self, num_tokens: int) -> dict[str, float]:
        """Tokens/s since the last reading, and the most memory held so far."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return {"tokens_per_s": num_tokens / seconds, "memory_gb": self._peak() / _BYTES_PER_GB}

    def _peak(self) -> int:
        """Bytes of the accelerator's tensors, or of the whole process."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _Optimization:
    """The prepared objective with its optimizer.

    Accumulation is counted here and not by `accelerate`, whose counter would run over the end of an
    epoch, where the last batch may have fewer parts than the others.
    """

    def __init__(self, objective: nn.Module, config: DistillConfig) -> None:
        join()
        self.accelerator = Accelerator(
            mixed_precision=config.mixed_precision, cpu=not torch.cuda.is_available()
        )
        self._config, self._objective = config, objective
        named = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(
            named.values(),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.trained = Trained(named, optimizer)
        self._module, self._optimizer = self.accelerator.prepare(objective, optimizer)
        self._module.eval()  # the mode without dropout

    def early_stop(
        self, sequences: Sequence[TrainingSequence], held_out: Sequence[int], signals: SignalSource
    ) -> EarlyStop | None:
        """The judge of this training; all processes measure, since a divided target asks for it."""
        if not held_out:
            return None
        return EarlyStop(
            self._objective,
            sequences,
            held_out,
            signals=signals,
            patience=self._config.early_stop_patience,
        )

    def set_rate(self, step: int) -> None:
        """Give the optimizer the learning rate of `step`."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * learning_rate_factor(step, self._config)

    def step(
        self,
        sequences: Sequence[TrainingSequence],
        indices: Sequence[int],
        signals: SignalSource,
        num_positions: int,
    ) -> tuple[float, float]:
        """One optimizer step over the sequences `indices`; mean loss and alpha by position.

        Every part's loss is divided by the positions of all parts, so that the gradient does not
        depend on how a batch is cut, and multiplied by the number of processes, whose gradients are
        averaged.
        """
        batches = self._parts(sequences, indices)
        sums = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)
            with nullcontext() if is_last else self.accelerator.no_sync(self._module):
                total, agreed = self._module(batch, signals.signal(batch), self.accelerator.device)
                share = self.accelerator.num_processes / num_positions
                self.accelerator.backward(total * share)
            sums += torch.stack([total.detach(), agreed])
        loss, alpha = (self.accelerator.reduce(sums, "sum") / num_positions).tolist()
        self.accelerator.clip_grad_norm_(
            self.trained.parameters.values(), self._config.max_grad_norm
        )
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss, alpha

    def _parts(
        self, sequences: Sequence[TrainingSequence], indices: Sequence[int]
    ) -> list[TokenBatch]:
        """This process's batches, as many as every other has: a target that is divided asks for it.

        Where there are too few sequences for all, some are without a position.
        """
        accelerator, config = self.accelerator, self._config
        processes = accelerator.num_processes
        size = -(-config.batch_size // (processes * config.gradient_accumulation))
        own = indices[accelerator.process_index :: processes]
        batches = [collate(sequences, own[i : i + size]) for i in range(0, len(own), size)]
        most = -(-len(indices) // processes)
        spare = collate(sequences, indices[:1])
        spare = replace(spare, mask=torch.zeros_like(spare.mask))
        return batches + [spare] * (-(-most // size) - len(batches))


def _outcome(
    run: Run, sequences: Sequence[TrainingSequence], resumed_at: int, early_stop: EarlyStop | None
) -> TrainingOutcome:
    """Facts for the manifest; the student has its best weights then."""
    tokens = sum(sequence.num_predicted for sequence in sequences)
    positions = sum(len(sequence.token_ids) for sequence in sequences)
    outcome = TrainingOutcome(run.history, resumed_at, tokens, tokens / positions)
    if early_stop is None:
        return outcome
    early_stop.restore()
    kept = early_stop.evaluations[early_stop.best]
    _LOG.info("best_step=%d held_out_alpha=%.3f", kept["step"], kept["alpha"])
    return replace(outcome, evaluations=early_stop.evaluations, best=early_stop.best)
