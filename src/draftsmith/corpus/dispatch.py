"""Work shared out among workers that may fail: who is given what, and when it is given up.

Knows nothing of what a worker is: the task calls it, and says by `TransientFault` that the work is
worth another try. One thread, the caller's, decides; others only wait for a worker. So no more
tasks are begun than there is room for, and none while the caller is busy with an answer, nor before
all that happened meanwhile is taken note of.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from threading import Thread
from typing import Any, Generic, TypeVar

from draftsmith.corpus.lanes import Lane, TransientFault

W = TypeVar("W")
T = TypeVar("T")

PATIENCE_S = 900.0  # a large model takes minutes to start again
_MOST_TRIES = 10  # of one task; far more than faults by chance come to
_JITTER = 0.5  # of a pause, either way
_LOG = logging.getLogger(__name__)


class AllLeftOutError(Exception):
    """No worker is left; the last fault of each says why."""


class HopelessTaskError(Exception):
    """One task fails again and again, of workers that are well otherwise.

    Args:
        place: Of the task among all.
        num_tries: How often it failed.
        found: The last time.
    """

    def __init__(self, place: int, num_tries: int, found: str) -> None:
        super().__init__(f"task {place}: {found}")
        self.place, self.num_tries, self.found = place, num_tries, found


@dataclass
class _Task(Generic[W, T]):
    """Something to be done by any worker."""

    call: Callable[[W], T]
    place: int
    num_tries: int = 0


@dataclass(frozen=True)
class _Begun(Generic[W, T]):
    """What is with a worker: a task, or none where it is the worker's check."""

    lane: Lane[W]
    task: _Task[W, T] | None
    begun_s: float


def dispatch(
    lanes: Sequence[Lane[W]],
    tasks: Sequence[Callable[[W], T]],
    *,
    patience_s: float = PATIENCE_S,
) -> Iterator[T]:
    """Do all tasks, in any order, each by any worker; yields what they return.

    A task whose worker failed goes to the end of the queue. A worker that was away, or that fails
    too often in a row, is given tasks again once its check has passed; what a check leaves to be
    judged is judged in the caller's thread. Whatever else a task or a check raises ends the work;
    what other workers do meanwhile is dropped.

    Args:
        lanes: The workers.
        tasks: Each is called with a worker.
        patience_s: How long all workers may be left out, from the first failure behind the last
            answer. Workers of which none ever passed its check get none.

    Raises:
        AllLeftOutError: Every worker failed too often in a row, for so long.
        HopelessTaskError: A task failed too often, of workers that do others or pass their checks.
            All others are done then.
    """
    work = _Work(lanes, tasks, patience_s)
    try:
        while work.is_left:
            if work.has_finished:
                yield from work.settle()
            else:
                work.begin()
                work.wait()
        if work.hopeless:
            raise work.hopeless[0]
    finally:
        work.leave()


class _Work(Generic[W, T]):
    """What is to be done and what is being done."""

    def __init__(
        self, lanes: Sequence[Lane[W]], tasks: Sequence[Callable[[W], T]], patience_s: float
    ) -> None:
        self._lanes, self._patience_s = lanes, patience_s
        self._waiting = deque(_Task(call, place) for place, call in enumerate(tasks))
        self._running: dict[Future[Any], _Begun[W, T]] = {}
        self._failing_s: float | None = None  # since when nothing was answered but faults came
        self.hopeless: list[HopelessTaskError] = []  # tasks that are not tried again

    @property
    def is_left(self) -> bool:
        """Whether a task is not done; checks that are under way keep nobody."""
        running = self._running.values()
        return bool(self._waiting) or any(begun.task is not None for begun in running)

    @property
    def has_finished(self) -> bool:
        """Whether anything has ended that `settle` has not seen."""
        return any(future.done() for future in self._running)

    def begin(self) -> None:
        """Begin all that there is room for, checks first.

        Raises:
            AllLeftOutError: As `dispatch` says.
        """
        if not self._waiting:
            return
        self._require_workers()
        for lane in self._free(is_proven=False):
            lane.is_checking = True
            self._start(lane, None)
        while self._waiting and (free := self._free(is_proven=True)):
            self._start(min(free, key=_burden), self._waiting.popleft())

    def settle(self) -> Iterator[T]:
        """Take note of all that has ended; yields the answers."""
        ended = [future for future in self._running if future.done()]
        # Checks first: a worker that passed and then was away is not to be trusted.
        for future in sorted(ended, key=lambda one: self._running[one].task is not None):
            begun = self._running.pop(future)
            lane = begun.lane
            lane.num_running -= 1
            lane.is_checking = lane.is_checking and begun.task is not None
            try:
                answer = future.result()
            except TransientFault as fault:
                self._note(begun, fault)
                continue
            if begun.task is None:
                answer()
                if lane.is_out:
                    _LOG.info("endpoint=%s state=back", lane.name)
                lane.proved()
                continue
            self._failing_s = None
            lane.answered()
            yield answer

    def wait(self) -> None:
        """Wait until something ends, or may be begun."""
        pause_s = self._pause_s() if self._waiting else None
        if self._running:
            wait(self._running, timeout=pause_s, return_when=FIRST_COMPLETED)
        else:
            time.sleep(pause_s or 0.0)

    def leave(self) -> None:
        """Give up what is under way."""
        for begun in self._running.values():
            begun.lane.num_running -= 1
            begun.lane.is_checking = False

    def _start(self, lane: Lane[W], task: _Task[W, T] | None) -> None:
        lane.num_running += 1
        call: Callable[[W], object] = lane.check if task is None else task.call
        begun = _Begun(lane, task, time.monotonic())
        self._running[in_thread(lambda: call(lane.worker))] = begun

    def _free(self, *, is_proven: bool) -> list[Lane[W]]:
        """Lanes that may be given something now: a task if they are proven, else their check."""
        now_s = time.monotonic()
        lanes = [lane for lane in self._lanes if lane.is_proven == is_proven]
        return [lane for lane in lanes if lane.has_room and lane.resumes_s <= now_s]

    def _pause_s(self) -> float | None:
        """Seconds until some lane may be given something; None where nobody has room."""
        resumes = [lane.resumes_s for lane in self._lanes if lane.has_room]
        return max(0.0, min(resumes) - time.monotonic()) if resumes else None

    def _require_workers(self) -> None:
        """Raises where all are left out and none will be waited for; checks are."""
        if not all(lane.is_out and not lane.is_checking for lane in self._lanes):
            return
        now_s = time.monotonic()
        waited_s = 0.0 if self._failing_s is None else now_s - self._failing_s
        if waited_s >= self._patience_s or not any(lane.was_proven for lane in self._lanes):
            faults = "; ".join(f"{lane.name}: {lane.last_fault}" for lane in self._lanes)
            raise AllLeftOutError(faults)

    def _note(self, begun: _Begun[W, T], fault: TransientFault) -> None:
        """Something was not done: the worker gets a pause, a task is tried again."""
        lane, task, now_s = begun.lane, begun.task, time.monotonic()
        if self._failing_s is None:
            self._failing_s = now_s
        before = lane.num_failures
        stretch = random.uniform(1 - _JITTER, 1 + _JITTER)  # decides no token, so it needs no seed
        lane.failed(fault, begun_s=begun.begun_s, now_s=now_s, stretch=stretch)
        if lane.num_failures > before:
            pause_s, state = lane.resumes_s - now_s, " state=left_out" if lane.is_out else ""
            facts = lane.name, state, fault.found, pause_s
            _LOG.warning("endpoint=%s%s fault=%s pause_s=%.1f", *facts)
        if task is None:
            return
        task.num_tries += fault.kind != "busy"
        # A lane that is left out shows by its check whether the fault was the task's.
        if task.num_tries >= _MOST_TRIES and not lane.is_out:
            self.hopeless.append(HopelessTaskError(task.place, task.num_tries, fault.found))
        else:
            self._waiting.append(task)


def _burden(lane: Lane[Any]) -> tuple[int, float]:
    """Who is given the next task: one that does not fail, then the one with least to do."""
    return lane.num_failures, lane.num_running / lane.limit


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Call in a thread that keeps no process alive that gives it up."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # whoever reads the future gets it
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future
