"""How a worker that may fail fares: room, pauses, whether it is to be trusted with work.

Pure: told the time, it asks no clock. Knows nothing of what a worker is, or of who else works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

W = TypeVar("W")
Kind = Literal["busy", "away", "failed"]
Verdict = Callable[[], None]

FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_MOST_FAILURES = 8  # in a row; the pauses between them add up to a minute


class TransientFault(Exception):
    """A worker failed, and the same task may succeed there later, or elsewhere now.

    Args:
        reason: A word for counts.
        found: What was found, for people.
        wait_s: The worker asked to be left alone for so long.
        kind: busy: it has no room, whatever the task. away: it was not there, or may not have been;
            who is there next may be another. failed: anything else.
    """

    def __init__(
        self,
        reason: str,
        found: str,
        *,
        wait_s: float = 0.0,
        kind: Kind = "failed",
    ) -> None:
        super().__init__(found)
        self.reason, self.found, self.wait_s, self.kind = reason, found, wait_s, kind


@dataclass
class Lane(Generic[W]):
    """A worker, how much it is given, and how it fares.

    It is given tasks only once its check has passed, and again after it was away or left out.
    Failures that come in while it is left alone belong to those that it is left alone for: only one
    of a task that was begun later counts anew. Its room is halved by each failure that counts and
    grows by about one for as many answers as there is room for, up to `limit`.

    Attributes:
        worker: Who works.
        name: For the log.
        limit: Tasks at once, at most.
        check: Called with the worker before it is given tasks; raises what a task may raise. Gives
            what is called next, by whoever shares the work out, and raises where the worker is none
            to be trusted.
        first_pause_s: After the first failure in a row; doubles with each further one.
        num_running: Tasks that are with it, its check among them.
        num_answers: Tasks that it did.
        faults: How often which reason was given.
        num_failures: In a row.
        last_fault: What was found last.
        resumes_s: Until then nothing more is begun.
        is_proven: Its check has passed, and nothing since was against it.
        was_proven: Its check has passed before.
        is_checking: Its check is under way.
    """

    worker: W
    name: str
    limit: int
    check: Callable[[W], Verdict]
    first_pause_s: float = FIRST_PAUSE_S
    num_running: int = 0
    num_answers: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    num_failures: int = 0
    last_fault: str = ""
    resumes_s: float = float("-inf")
    is_proven: bool = False
    was_proven: bool = False
    is_checking: bool = False

    def __post_init__(self) -> None:
        """Begin with all the room."""
        self._room = float(self.limit)
        self._failed_s = float("-inf")

    @property
    def has_room(self) -> bool:
        """Whether it may be given something, its pause left aside: a task, or its check."""
        return not self.is_checking and self.num_running < int(self._room)

    @property
    def is_out(self) -> bool:
        """It failed too often in a row: it is left out, but for its check now and then."""
        return self.num_failures >= _MOST_FAILURES

    def answered(self) -> None:
        """A task was done."""
        self.num_answers += 1
        self.num_failures = 0
        self._room = min(float(self.limit), self._room + 1 / self._room)

    def proved(self) -> None:
        """Its check has passed."""
        self.is_proven = self.was_proven = True
        self.num_failures = 0

    def failed(
        self, fault: TransientFault, *, begun_s: float, now_s: float, stretch: float
    ) -> None:
        """A task or the check was not done.

        Args:
            fault: Why.
            begun_s: When it was begun.
            now_s: Now.
            stretch: Factor of the pause, so that several callers do not come back at once.
        """
        self.faults[fault.reason] += 1
        self.last_fault = fault.found
        pause_s = 0.0
        if begun_s >= self._failed_s:
            self.num_failures = min(self.num_failures + 1, _MOST_FAILURES)
            self._failed_s = now_s
            self._room = max(1.0, self._room / 2)
            doubled = self.first_pause_s * 2.0 ** (self.num_failures - 1)
            pause_s = stretch * min(doubled, _LONGEST_PAUSE_S)
        if fault.kind == "away" or self.is_out:
            self.is_proven = False
        self.resumes_s = max(self.resumes_s, now_s + pause_s, now_s + fault.wait_s)
