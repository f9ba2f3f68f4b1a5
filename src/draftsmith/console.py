"""How a stage talks to the person who started it: logging, progress bars, one line for an error."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from draftsmith.errors import DraftsmithError

EXIT_USER_ERROR = 2
_LOG = logging.getLogger(__name__)


def run_stage(stage: Callable[[], int | None]) -> None:
    """Run a stage's function and exit: 0, its own status, or 2 with one clear error."""
    level = logging.INFO if _is_main_process() else logging.WARNING
    logging.basicConfig(level=level, format="%(name)s %(message)s", stream=sys.stderr)
    for noisy in (
        "accelerate.checkpointing",
        "alembic",
        "httpx",
        "filelock",
        "fsspec",
        "mlflow.store",
    ):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # the error tells the last retry
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        status = stage()
    except DraftsmithError as error:
        sys.stderr.write(f"\ndraftsmith: {error}\n")
        sys.exit(EXIT_USER_ERROR)
    sys.exit(status or 0)


class Progress:
    """A progress bar; where nobody watches a terminal, a line of log every tenth instead.

    Args:
        name: What is going on.
        total: Units of work.
        unit: Name of a unit.
    """

    def __init__(self, name: str, total: int, *, unit: str = "prompts") -> None:
        is_hidden = None if _is_main_process() else True  # None: unless somebody watches
        self._bar = tqdm(total=total, desc=name, unit=unit, disable=is_hidden, dynamic_ncols=True)
        self._name, self._total = name.replace(" ", "_"), total
        self._start = time.perf_counter()
        self._done = self._tokens = self._logged_tenths = self._resumed_at = 0
        if self._bar.disable:
            _LOG.info("phase=%s total=%d", self._name, total)

    def advance(self, done: int, *, tokens: int = 0, **figures: str) -> None:
        """Add finished units and tokens; figures are shown as they are."""
        self._done += int(done)
        self._tokens += tokens
        if self._tokens:
            rate = self._tokens / (time.perf_counter() - self._start)
            figures["tokens_per_s"] = f"{rate:.0f}"
        if self._bar.disable:
            self._log(figures)
            return
        self._bar.set_postfix(figures, refresh=False)
        self._bar.update(int(done))
        if self._done >= self._total:
            self._bar.close()

    def _log(self, figures: dict[str, str]) -> None:
        tenths = 10 * self._done // max(1, self._total)
        if tenths > self._logged_tenths:
            self._logged_tenths = tenths
            shown = " ".join(f"{key}={value}" for key, value in figures.items())
            _LOG.info("phase=%s done=%d/%d %s", self._name, self._done, self._total, shown)

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Show a training step (from 0) with its figures; a resumed run starts late."""
        if self._done == 0 and step > 0:
            # Steps of an earlier run took none of this one's time.
            self._done = self._resumed_at = self._bar.initial = self._bar.n = step
        figures = {
            "loss": f"{metrics['loss']:.3f}",
            "alpha": f"{metrics['alpha']:.3f}",
            "tokens_per_s": f"{metrics['tokens_per_s']:.0f}",
            "memory_gb": f"{metrics['memory_gb']:.1f}",
        }
        if self._bar.disable:  # a bar shows the time left itself
            figures["left"] = tqdm.format_interval(self._seconds_left(step + 1))
        self.advance(step + 1 - self._done, tokens=0, **figures)

    def _seconds_left(self, done: int) -> float:
        elapsed = time.perf_counter() - self._start
        return elapsed / (done - self._resumed_at) * (self._total - done)


def _is_main_process() -> bool:
    """Whether this process speaks for all that a launcher started; most runs have one."""
    return os.environ.get("RANK", "0") == "0"


def count_phase(name: str, total: int) -> Callable[[int], None]:
    """A bar as the callback that measuring code takes: called with the number of finished units."""
    return Progress(name, total).advance
