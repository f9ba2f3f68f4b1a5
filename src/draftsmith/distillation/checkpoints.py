"""Checkpoints and history of one training run, so that a killed one goes on.

Knows neither the data nor the loss.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from accelerate import Accelerator

from draftsmith.artifacts import keep_only, write_text, writing
from draftsmith.distillation.early_stop import EarlyStop
from draftsmith.distillation.settings import DistillConfig
from draftsmith.errors import ArtifactError

_LOG = logging.getLogger(__name__)


class Run:
    """Checkpoints and history of one run in one folder.

    A checkpoint counts only once its folder has its final name. Runs of another number of processes
    have a folder of their own below it: `accelerate` names weights otherwise there.

    Attributes:
        history: Metrics by step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        config: DistillConfig,
        early_stop: EarlyStop | None,
    ) -> None:
        self._accelerator, self._config, self._early_stop = accelerator, config, early_stop
        processes = accelerator.num_processes
        self._folder = folder if processes == 1 else folder / f"{processes}-processes"
        self.history: list[dict[str, float]] = []

    def resume(self) -> int:
        """Load the newest checkpoint into the prepared objects; returns the finished steps."""
        finished = sorted(self._folder.glob("step-*"))
        if not finished:
            return 0
        self._accelerator.load_state(str(finished[-1]))
        step = int(finished[-1].name.removeprefix("step-"))
        history = (finished[-1] / "history.json").read_text(encoding="utf-8")
        self.history = json.loads(history)
        if self._early_stop is not None:
            self._early_stop.load(finished[-1])
        _LOG.info("resumed_at_step=%d of=%d", step, self._config.steps)
        return step

    def after_step(self, step: int, metrics: dict[str, float]) -> bool:
        """Keep history, judge and save when due; says whether the training is over."""
        done, config = step + 1, self._config
        is_over = done == config.steps
        if self._early_stop is not None and (is_over or done % config.early_stop_steps == 0):
            is_over = self._early_stop.judge(done) or is_over
        if done % config.log_steps == 0 or is_over:
            self.history.append({"step": float(done), **metrics})
        if done % config.checkpoint_steps == 0 and not is_over:
            self._save(done)
        return is_over

    def _save(self, done: int) -> None:
        self._accelerator.wait_for_everyone()
        final = self._folder / f"step-{done:08d}"
        unfinished = self._folder / f".unfinished-{done:08d}"
        try:
            with writing(unfinished):
                self._accelerator.save_state(str(unfinished))
                self._accelerator.wait_for_everyone()
                if self._accelerator.is_main_process:
                    write_text(unfinished / "history.json", json.dumps(self.history))
                    if self._early_stop is not None:
                        self._early_stop.save(unfinished)
                    unfinished.replace(final)
        except ArtifactError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        if self._accelerator.is_main_process:
            keep_only(self._folder, final.name)
        self._accelerator.wait_for_everyone()
