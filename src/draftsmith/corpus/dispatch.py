"""Work shared out among workers that may fail: bounds, pauses, and who is left out.

Knows nothing of what a worker is: the task calls it, and says by `TransientFault` that the work is
worth another try. One thread, the caller's, decides; others only wait for a worker. So no more
tasks are begun than there is room for, and none while the caller is busy with an answer.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from threading import Thread
from typing import Generic, TypeVar

W = TypeVar("W")
T = TypeVar("T")

FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_MOST_FAILURES = 8  # in a row; the pauses between them add up to a minute
_JITTER = 0.5  # of a pause, either way
_LOG = logging.getLogger(__name__)


class TransientFault(Exception):
    """A worker failed, and the same task may succeed there later, or elsewhere now.

    Args:
        reason: A word for counts.
        found: What was found, for people.
        wait_s: The worker asked to be left alone for so long.
    """

    def __init__(self, reason: str, found: str, *, wait_s: float = 0.0) -> None:
        super().__init__(found)
        self.reason, self.found, self.wait_s = reason, found, wait_s


class AllLeftOutError(Exception):
    """No worker is left; the last fault says why."""


@dataclass
class Lane(Generic[W]):
    """A worker, how much it is given, and how it fares. Pure: told the time, it asks no clock.

    Failures that come in while it is left alone belong to those that it is left alone for: only one
    of a task that was begun later counts anew. Its room is halved by each failure that counts and
    grows by about one for as many answers as there is room for, up to `limit`.

    Attributes:
        worker: Who works.
        name: For the log.
        limit: Tasks at once, at most.
        first_pause_s: After the first failure in a row; doubles with each further one.
        num_running: Tasks that are with it.
        num_answers: Tasks that it did.
        faults: How often which reason was given.
        num_failures: In a row.
        last_fault: What was found last.
        resumes_s: Until then nothing more is begun.
        is_out: It failed too often in a row; nothing is begun any more.
    """

    worker: W
    name: str
    limit: int
    first_pause_s: float = FIRST_PAUSE_S
    num_running: int = 0
    num_answers: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    num_failures: int = 0
    last_fault: str = ""
    resumes_s: float = float("-inf")
    is_out: bool = False

    def __post_init__(self) -> None:
        """Begin with all the room."""
        self._room = float(self.limit)
        self._failed_s = float("-inf")

    @property
    def has_room(self) -> bool:
        """Whether it may be given a task, its pause left aside."""
        return not self.is_out and self.num_running < int(self._room)

    def answered(self) -> None:
        """A task was done."""
        self.num_answers += 1
        self.num_failures = 0
        self._room = min(float(self.limit), self._room + 1 / self._room)

    def failed(
        self, fault: TransientFault, *, begun_s: float, now_s: float, stretch: float
    ) -> None:
        """A task was not done.

        Args:
            fault: Why.
            begun_s: When the task was begun.
            now_s: Now.
            stretch: Factor of the pause, so that several callers do not come back at once.
        """
        self.faults[fault.reason] += 1
        self.last_fault = fault.found
        pause_s = 0.0
        if begun_s >= self._failed_s:
            self.num_failures += 1
            self._failed_s = now_s
            self._room = max(1.0, self._room / 2)
            doubled = self.first_pause_s * 2.0 ** (self.num_failures - 1)
            pause_s = stretch * min(doubled, _LONGEST_PAUSE_S)
            self.is_out = self.num_failures >= _MOST_FAILURES
        self.resumes_s = max(self.resumes_s, now_s + pause_s, now_s + fault.wait_s)


@dataclass(frozen=True)
class _Begun(Generic[W, T]):
    """A task that is with a worker."""

    task: Callable[[W], T]
    lane: Lane[W]
    begun_s: float


def dispatch(lanes: Sequence[Lane[W]], tasks: Sequence[Callable[[W], T]]) -> Iterator[T]:
    """Do all tasks, in any order, each by any worker; yields what they return.

    A task whose worker failed goes to the end of the queue. Whatever else a task raises ends the
    work; what other workers do meanwhile is dropped.

    Raises:
        AllLeftOutError: Every worker failed too often in a row.
    """
    waiting, running = deque(tasks), dict[Future[T], _Begun[W, T]]()
    while waiting or running:
        if waiting and all(lane.is_out for lane in lanes):
            raise AllLeftOutError("; ".join(f"{lane.name}: {lane.last_fault}" for lane in lanes))
        while waiting and (lane := _next_lane(lanes)) is not None:
            begun = _Begun(waiting.popleft(), lane, time.monotonic())
            lane.num_running += 1
            running[_in_thread(begun.task, lane.worker)] = begun
        for future in _finished(running, _pause_s(lanes) if waiting else None):
            begun = running.pop(future)
            begun.lane.num_running -= 1
            try:
                answer = future.result()
            except TransientFault as fault:
                waiting.append(begun.task)
                _note(begun, fault)
                continue
            begun.lane.answered()
            yield answer


def _next_lane(lanes: Sequence[Lane[W]]) -> Lane[W] | None:
    """Who is given the next task: one that does not fail, then the one with least to do."""
    now_s = time.monotonic()
    free = [lane for lane in lanes if lane.has_room and lane.resumes_s <= now_s]
    return min(free, key=_burden, default=None)


def _burden(lane: Lane[W]) -> tuple[int, float]:
    return lane.num_failures, lane.num_running / lane.limit


def _pause_s(lanes: Sequence[Lane[W]]) -> float | None:
    """Seconds until somebody with room may be given a task; None where nobody has room."""
    resumes = [lane.resumes_s for lane in lanes if lane.has_room]
    return max(0.0, min(resumes) - time.monotonic()) if resumes else None


def _finished(running: dict[Future[T], _Begun[W, T]], pause_s: float | None) -> list[Future[T]]:
    """What is finished once anything is, or none when the pause is over."""
    if not running:
        time.sleep(pause_s or 0.0)
        return []
    return list(wait(running, timeout=pause_s, return_when=FIRST_COMPLETED).done)


def _note(begun: _Begun[W, T], fault: TransientFault) -> None:
    lane, now_s = begun.lane, time.monotonic()
    before = lane.num_failures
    stretch = random.uniform(1 - _JITTER, 1 + _JITTER)  # decides no token, so it needs no seed
    lane.failed(fault, begun_s=begun.begun_s, now_s=now_s, stretch=stretch)
    if lane.num_failures == before:
        return
    if lane.is_out:
        _LOG.warning("endpoint=%s state=left_out fault=%s", lane.name, fault.found)
    else:
        pause_s = lane.resumes_s - now_s
        _LOG.warning("endpoint=%s fault=%s pause_s=%.1f", lane.name, fault.found, pause_s)


def _in_thread(task: Callable[[W], T], worker: W) -> Future[T]:
    """Begin a task; its thread keeps no process alive that gives it up."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(task(worker))
        except Exception as error:  # whoever reads the future gets it
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future
