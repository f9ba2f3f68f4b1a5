"""The costs of a pair by batch and context, and predictions held against real decoding.

Works within a budget of seconds, the cells that tell most first, and keeps each on disk, so that a
run that was stopped goes on where it was. What decodes, and on which prompts, is handed in.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftsmith.artifacts import read_json, write_json
from draftsmith.decoding import Lengths
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.cost_model import RoundCosts
from draftsmith.evaluation.profiling import (
    costs_from_json,
    forward_costs,
    interpolated,
    measured_widths,
)
from draftsmith.evaluation.timing import Arm, interleave, median_ms, speed_ratio
from draftsmith.evaluation.workload import DeviceCosts, PrefillMs, Workload

_LOG = logging.getLogger(__name__)
_REPEATS = 5
_CLEAR = 0.1  # a speedup this far from 1 is a gain or a loss

OnDone = Callable[[int], None]


@dataclass(frozen=True)
class Axes:
    """Measured batch sizes and contexts; grids within them grow from their corners."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    def grids(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Whole grids, each holding the one before: corners first, then what lies between."""
        depth = max(len(self.rows), len(self.contexts)).bit_length() + 1
        for level in range(depth + 1):
            yield _spread(self.rows, 2**level), _spread(self.contexts, 2**level)


def _spread(points: Sequence[int], gaps: int) -> tuple[int, ...]:
    """Points at `gaps` equal steps through a sequence, its ends included.

    Example: (1, 4, 16, 64) with one gap is (1, 64); with two (1, 16, 64); with four all of them.
    """
    last = len(points) - 1
    return tuple(points[i] for i in sorted({round(last * step / gaps) for step in range(gaps + 1)}))


@dataclass(frozen=True)
class CostSweep:
    """Measures the costs of rounds and prefills.

    Attributes:
        target: Live target.
        draft: Live draft.
        axes: Where.
        max_width: Most positions of a verification.
        folder: Where finished cells are kept.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    axes: Axes
    max_width: int
    folder: Path

    def run(self, *, seconds: float, on_done: OnDone = lambda _done: None) -> DeviceCosts:
        """The largest whole grid that fits the time; the corners are always measured."""
        end = time.monotonic() + seconds
        held: dict[tuple[int, int], dict[str, Any]] = {}
        whole: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        for grid in self.axes.grids():
            for cell in itertools.product(*grid):
                if cell in held:
                    continue
                if whole is not None and time.monotonic() > end and not self._path(*cell).exists():
                    return self._costs(held, whole)
                held[cell] = self._cell(*cell)
                on_done(1)
            whole = grid
        assert whole is not None  # there is at least one grid
        return self._costs(held, whole)

    def _path(self, rows: int, context: int) -> Path:
        return self.folder / f"cost-{rows}-{context}.json"

    def _cell(self, rows: int, context: int) -> dict[str, Any]:
        path = self._path(rows, context)
        if not path.exists():
            rounds = forward_costs(
                self.target,
                self.draft,
                measured_widths(self.max_width),
                batch_size=rows,
                context=context,
                repeats=_REPEATS,
            )
            prefill = self._prefill(rows, context)
            write_json(path, {"rounds": asdict(rounds), "prefill": asdict(prefill)})
        return read_json(path)

    @torch.inference_mode()
    def _prefill(self, rows: int, context: int) -> PrefillMs:
        places = torch.arange(context, device=self.target.device).expand(rows, context)
        actions: dict[str, Callable[[], object]] = {}
        for name, model in (("target", self.target), ("draft", self.draft)):
            slots = SlotModel(model)
            slots.reserve(rows=rows, slots=context)
            tokens = places % 100
            actions[name] = partial(slots.forward, tokens, places, span=context, keep=0)
        times = median_ms(actions, repeats=1)
        return PrefillMs(times["target"], times["draft"])

    def _costs(
        self,
        held: dict[tuple[int, int], dict[str, Any]],
        grid: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> DeviceCosts:
        cells = list(itertools.product(*grid))
        rounds = {
            cell: interpolated(costs_from_json(held[cell]["rounds"]), self.max_width)
            for cell in cells
        }
        prefill = {cell: PrefillMs(**held[cell]["prefill"]) for cell in cells}
        return DeviceCosts(RoundCosts(*grid, rounds), prefill)


@dataclass(frozen=True)
class Trial:
    """A workload that was really decoded, with and without speculation.

    Attributes:
        workload: Which.
        lengths: Draft and copy lengths.
        predicted: Speedup that was expected.
        measured: Speedup that was seen.
    """

    workload: Workload
    lengths: Lengths
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.measured - 1

    @property
    def has_sign_error(self) -> bool:
        """Whether a clear gain was taken for a loss, or a clear loss for a gain."""
        return abs(self.measured - 1) > _CLEAR and (self.predicted - 1) * (self.measured - 1) < 0


@dataclass(frozen=True)
class TrialRun:
    """Decodes workloads.

    Attributes:
        contestants: The pair at a temperature and copy length. Nothing may stop its answers, so
            that they are as long as asked.
        prompts: Called with a number of tokens: real texts of about that length, in a circle.
        folder: Where finished trials are kept.
        repeats: Times that both ways are timed, in turn.
    """

    contestants: Callable[[float, int], Contestants]
    prompts: Callable[[int], Iterator[list[int]]]
    folder: Path
    repeats: int = 2

    def run(self, workload: Workload, lengths: Lengths, *, predicted: float) -> Trial:
        """Decode it, unless it was decoded before."""
        name = "-".join(str(part) for part in (*asdict(workload).values(), *lengths))
        path = self.folder / f"trial-{name}.json"
        if not path.exists():
            write_json(path, {"measured": self._measure(workload, lengths)})
        return Trial(workload, lengths, predicted, float(read_json(path)["measured"]))

    def _measure(self, workload: Workload, lengths: Lengths) -> float:
        contestants = self.contestants(workload.temperature, lengths.copy)
        size, tokens = workload.batch_size, workload.new_tokens
        arms: dict[str, Arm] = {
            "plain": contestants.engine(0, max_new_tokens=tokens, batch_size=size),
            "speculative": contestants.engine(
                lengths.draft, max_new_tokens=tokens, batch_size=size
            ),
        }
        circle = self.prompts(workload.context)
        groups = [list(itertools.islice(circle, size)) for _ in range(self.repeats)]
        timings = interleave(arms, groups)
        return speed_ratio(timings["speculative"], timings["plain"], seed=0).mean


def check(
    trials: TrialRun,
    planned: Sequence[tuple[Workload, Lengths, float]],
    *,
    seconds: float,
    on_done: OnDone = lambda _done: None,
) -> list[Trial]:
    """Decode workloads until the time is over; the first is always decoded.

    Args:
        trials: Decodes them.
        planned: Workload, lengths and expected speedup, most telling first.
        seconds: Budget; no trial is begun that would last longer than what is left if it took as
            long as the last one.
        on_done: Called with 1 after each.
    """
    end = time.monotonic() + seconds
    done: list[Trial] = []
    last_s = 0.0
    for workload, lengths, predicted in planned:
        start = time.monotonic()
        if done and start + last_s > end:
            _LOG.info("event=budget_used trials=%d planned=%d", len(done), len(planned))
            break
        done.append(trials.run(workload, lengths, predicted=predicted))
        last_s = time.monotonic() - start
        on_done(1)
    return done
