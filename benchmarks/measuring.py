"""What the speed benchmarks share: budgets in seconds, groups of prompts, tables of text."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from draftsmith.evaluation.timing import Arm, timed

Groups = Iterator[list[list[int]]]

_LOG = logging.getLogger(__name__)


class Budget:
    """Seconds that a run may take, handed out as shares of what is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the end; negative behind it."""
        return self._end - time.monotonic()

    def share(self, part: float) -> float:
        """The time (of `time.monotonic`) at which so great a part of what is left is used up."""
        return time.monotonic() + part * max(0.0, self.left_s)


def within(
    prompts: Sequence[list[int]], size: int, *, until: float, at_least: int, at_most: int = 1000
) -> Groups:
    """Groups of `size` prompts, taken in a circle, until the time is over.

    Args:
        prompts: All prompts.
        size: Prompts of a group.
        until: A time of `time.monotonic`.
        at_least: Groups that come however long they take.
        at_most: Groups that come at most.
    """
    circle = itertools.cycle(prompts)
    for index in range(at_most):
        if index >= at_least and time.monotonic() > until:
            return
        yield list(itertools.islice(circle, size))


def usable(
    arms: Mapping[str, Arm], group: list[list[int]]
) -> tuple[dict[str, Arm], dict[str, float], dict[str, str]]:
    """Run each arm once on a group: those that work, the seconds it took, what the others raised.

    Whatever software of others raises on this machine is a result, not the end of the run.
    """
    working: dict[str, Arm] = {}
    seconds, refused = {}, {}
    for name, arm in arms.items():
        try:
            seconds[name] = timed(partial(arm, group))[0]
            working[name] = arm
        except Exception as error:  # noqa: BLE001  see above
            refused[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            _LOG.warning("arm=%s refused=%s", name, refused[name])
    return working, seconds, refused


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
