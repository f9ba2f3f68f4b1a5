"""How a stage talks to the person who started it: logging, progress bars, one clear line for an error."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from draftsmith.errors import DraftsmithError

EXIT_USER_ERROR = 2
_LOG_STEPS = 100


def run_stage(stage: Callable[[], int | None]) -> None:
    """Run a stage's function and exit: 0, its own status, or 2 with one clear error."""
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stderr)
    for noisy in ("alembic", "httpx", "filelock", "fsspec", "urllib3", "mlflow.store"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        status = stage()
    except DraftsmithError as error:
        sys.stderr.write(f"\ndraftsmith: {error}\n")
        sys.exit(EXIT_USER_ERROR)
    sys.exit(status or 0)


class Progress:
    """A progress bar that is silent when nobody watches a terminal, where a line a phase is logged instead.

    Args:
        name: What is going on.
        total: Units of work.
        unit: Name of a unit.
    """

    def __init__(self, name: str, total: int, *, unit: str = "prompts") -> None:
        self._bar = tqdm(total=total, desc=name, unit=unit, disable=None, dynamic_ncols=True)
        self._tokens = 0
        if self._bar.disable:
            logging.getLogger(__name__).info("phase=%s total=%d", name.replace(" ", "_"), total)

    def advance(self, done: int, *, tokens: int = 0, **figures: Any) -> None:  # noqa: ANN401  shown as they are
        """Add finished units and tokens; figures are shown behind the bar."""
        self._tokens += tokens
        if self._tokens:
            seconds = max(1e-9, float(self._bar.format_dict["elapsed"] or 0))
            figures["tokens_per_s"] = f"{self._tokens / seconds:.0f}"
        if figures:
            self._bar.set_postfix(figures, refresh=False)
        self._bar.update(int(done))
        if self._bar.n >= (self._bar.total or 0):
            self._bar.close()


    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Show a training step (from 0) with its loss and alpha."""
        self._bar.n = step
        shown = {"loss": f"{metrics['loss']:.3f}", "alpha": f"{metrics['alpha']:.3f}"}
        self.advance(1, **shown, tokens_per_s=f"{metrics['tokens_per_s']:.0f}")
        if self._bar.disable and (step + 1) % _LOG_STEPS == 0:
            logging.getLogger(__name__).info("step=%d %s", step + 1, shown)


def count_phase(name: str, total: int) -> Callable[[int], None]:
    """A bar as the callback that measuring code takes: called with the number of finished units."""
    bar = Progress(name, total)
    return lambda done: bar.advance(done)
