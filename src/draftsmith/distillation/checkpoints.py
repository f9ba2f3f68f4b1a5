"""Checkpoints and history of one training run, so that a killed one goes on.

A checkpoint holds what is trained: its weights and the optimizer's state of each, besides history
and the judge's record. Nothing in it is of the processes that share the run, so any number of them
goes on from it. The main one copies the state and writes the copy while the training goes on. Knows
neither the data nor the loss.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.artifacts import atomic_directory, flush, keep_only, write_text
from draftsmith.distillation.early_stop import EarlyStop
from draftsmith.distillation.processes import join, of_all
from draftsmith.distillation.settings import DistillConfig
from draftsmith.errors import ArtifactError

_LOG = logging.getLogger(__name__)
_STATE, _HISTORY = "state.safetensors", "history.json"
_WEIGHT = "weight"


@dataclass(frozen=True)
class Trained:
    """What a training changes.

    Attributes:
        parameters: By name, whatever wraps their module.
        optimizer: Theirs.
    """

    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer

    def copied(self) -> dict[str, Tensor]:
        """Weights and the optimizer's state, `kind:parameter`, in main memory."""
        return {
            f"{kind}:{name}": tensor.to("cpu", copy=True)
            for name, parameter in self.parameters.items()
            for kind, tensor in {
                _WEIGHT: parameter.detach(),
                **self.optimizer.state[parameter],
            }.items()
        }

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `copied` gave."""
        for key, tensor in tensors.items():
            kind, _, name = key.partition(":")
            parameter = self.parameters[name]
            if kind == _WEIGHT:
                parameter.copy_(tensor)
            else:
                self.optimizer.state[parameter][kind] = tensor.to(parameter.device, copy=True)


class Run:
    """Checkpoints and history of one run in one folder, which all its processes see.

    A checkpoint counts only once its folder has its final name; the disk has its files by then. One
    is written at a time; leaving the block waits for the last one. A failure to write is raised at
    the next step, or there.

    Attributes:
        history: Metrics by step.
    """

    def __init__(
        self,
        trained: Trained,
        folder: Path,
        config: DistillConfig,
        early_stop: EarlyStop | None,
    ) -> None:
        self._trained, self._config, self._early_stop = trained, config, early_stop
        self._folder = folder
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self.history: list[dict[str, float]] = []

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is being written; its failure is raised unless there is another one."""
        self._writer.shutdown()
        if kind is None:
            self._wait()

    def resume(self) -> int:
        """Load the newest checkpoint that can be read; returns the finished steps.

        All processes call it together. One of an older version, which held other files, is none.
        Without any the training begins afresh.

        Raises:
            ArtifactError: Not all processes find the same one.
        """
        step = self._load_newest()
        _require_one(of_all(step), self._folder)
        if step:
            _LOG.info("resumed_at_step=%d of=%d", step, self._config.steps)
        return step

    def _load_newest(self) -> int:
        for state in sorted(self._folder.glob(f"step-*/{_STATE}"), reverse=True):
            try:
                self._load(state.parent)
            except (SafetensorError, ValueError, OSError) as error:
                _LOG.warning("unreadable_checkpoint=%s reason=%s", state.parent, error)
                continue
            return int(state.parent.name.removeprefix("step-"))
        return 0

    def _load(self, folder: Path) -> None:
        """Take over a checkpoint; where part of it cannot be read, nothing."""
        tensors = load_file(folder / _STATE)
        history = json.loads((folder / _HISTORY).read_text(encoding="utf-8"))
        if self._early_stop is not None:
            self._early_stop.load(folder)
        self._trained.restore(tensors)
        self.history = history

    def after_step(self, step: int, metrics: dict[str, float]) -> bool:
        """Keep history, judge and save when due; says whether the training is over.

        Raises:
            ArtifactError: The disk refused the checkpoint before; the one before that stays.
        """
        if self._writing is not None and self._writing.done():
            self._wait()
        done, config = step + 1, self._config
        is_over = done == config.steps
        if self._early_stop is not None and (is_over or done % config.early_stop_steps == 0):
            is_over = self._early_stop.judge(done) or is_over
        if done % config.log_steps == 0 or is_over:
            self.history.append({"step": float(done), **metrics})
        if done % config.checkpoint_steps == 0 and not is_over and join().is_main_process:
            self._wait()
            self._writing = self._writer.submit(self._save_to(self._folder / f"step-{done:08d}"))
        return is_over

    def _save_to(self, final: Path) -> Callable[[], None]:
        """What writes the state as it is now."""
        tensors, history = self._trained.copied(), json.dumps(self.history)
        judged = None if self._early_stop is None else self._early_stop.copied()

        def write() -> None:
            with atomic_directory(final) as folder:
                save_file(tensors, folder / _STATE)
                write_text(folder / _HISTORY, history)
                if judged is not None:
                    judged(folder)
                flush(folder)
            keep_only(final.parent, final.name)

        return write

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def _require_one(steps: Sequence[int], folder: Path) -> None:
    """Processes at unlike steps would wait for one another for ever."""
    if len(set(steps)) > 1:
        raise ArtifactError(
            f"resuming the training in {folder}",
            found=", ".join(
                f"step {step} in {count} of {len(steps)} processes"
                for step, count in sorted(Counter(steps).items())
            ),
            expected="one checkpoint, which all processes find",
            remedy="put the project folder on a file system that all machines see; where it is on "
            "one, its listings were stale: run again",
        )
