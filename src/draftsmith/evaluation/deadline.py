"""A time by which work has to end, and what of the time until then a part of it may take.

Knows nothing of what is done; the clock is an argument.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_MARGIN = 1.2  # work may last so much longer than it was expected to


@dataclass(frozen=True)
class Deadline:
    """A time of a clock.

    Attributes:
        end_s: When the time is over, by that clock.
        clock: Seconds; never goes back.
    """

    end_s: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """So many seconds from now."""
        return cls(clock() + seconds, clock)

    @property
    def left_s(self) -> float:
        """Seconds until then; negative behind it."""
        return self.end_s - self.clock()

    def part(self, share: float) -> Deadline:
        """The end of a part that may take so great a share of what is left."""
        return Deadline.after(share * self.left_s, self.clock)

    def allows(self, seconds: float) -> bool:
        """Whether work that is expected to take so long ends in time, with a margin."""
        return seconds * _MARGIN <= self.left_s
