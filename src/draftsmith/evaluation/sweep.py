"""The costs of a pair by batch and context, measured within a budget.

The cells that tell most come first, and each is kept on disk, so that a run that was stopped goes
on where it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.artifacts import read_json, write_json
from draftsmith.drafts.joined import LoadedDraft
from draftsmith.evaluation.cost_model import RoundCosts
from draftsmith.evaluation.deadline import Deadline
from draftsmith.evaluation.profiling import (
    costs_from_json,
    forward_costs,
    interpolated,
    measured_widths,
)
from draftsmith.evaluation.side_costs import judging_ms, reading_ms
from draftsmith.evaluation.workload import DeviceCosts, JudgingMs, PrefillMs

_REPEATS = 5
_GROWTH = 2  # a larger cell may take so much longer than any before it

OnDone = Callable[[int], None]


@dataclass(frozen=True)
class Axes:
    """Measured batch sizes and contexts; grids within them grow from their corners."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    def grids(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Whole grids, each holding the one before.

        The cheapest cell, the longest prompts of one row, the corners, then what lies between.
        """
        yield self.rows[:1], self.contexts[:1]
        yield self.rows[:1], _spread(self.contexts, 1)
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
        draft: Joined to it.
        axes: Where.
        max_width: Most positions of a verification.
        folder: Where finished cells are kept.
    """

    target: PreTrainedModel
    draft: LoadedDraft
    axes: Axes
    max_width: int
    folder: Path

    def run(self, deadline: Deadline, *, on_done: OnDone = lambda _done: None) -> DeviceCosts:
        """The largest whole grid that fits the time; its first cell is always measured.

        Args:
            deadline: A cell is begun only if it ends in time though it take longer than all before.
            on_done: Called with 1 after each cell, and with the number of those left out.
        """
        held: dict[tuple[int, int], dict[str, Any]] = {}
        whole: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        longest_s = 0.0
        for grid in self.axes.grids():
            for cell in itertools.product(*grid):
                if cell in held:
                    continue
                is_free = whole is None or self._path(*cell).exists()
                if not is_free and not deadline.allows(_GROWTH * longest_s):
                    on_done(len(self.axes.rows) * len(self.axes.contexts) - len(held))
                    assert whole is not None  # the first cell is free
                    return self._costs(held, whole)
                held[cell] = self._cell(*cell, deadline.clock)
                longest_s = max(longest_s, float(held[cell]["seconds"]))
                on_done(1)
            whole = grid
        assert whole is not None  # there is at least one grid
        return self._costs(held, whole)

    def _path(self, rows: int, context: int) -> Path:
        return self.folder / f"cost-{rows}-{context}.json"

    def _cell(self, rows: int, context: int, clock: Callable[[], float]) -> dict[str, Any]:
        path = self._path(rows, context)
        if not path.exists():
            begin_s = clock()
            rounds = forward_costs(
                self.target,
                self.draft.model,
                measured_widths(self.max_width),
                batch_size=rows,
                context=context,
                repeats=_REPEATS,
            )
            prefill = reading_ms(self.target, self.draft, rows=rows, context=context)
            seconds = clock() - begin_s
            cell = {"rounds": asdict(rounds), "prefill": asdict(prefill), "seconds": seconds}
            write_json(path, cell)
        return read_json(path)

    def _judging(self) -> JudgingMs:
        path = self.folder / "judging.json"
        if not path.exists():
            middle = self.axes.rows[len(self.axes.rows) // 2]
            write_json(path, asdict(judging_ms(self.target, rows=middle)))
        return JudgingMs(**read_json(path))

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
        return DeviceCosts(RoundCosts(*grid, rounds), prefill, self._judging())
