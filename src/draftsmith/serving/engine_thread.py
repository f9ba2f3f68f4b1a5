"""The one thread that drives engines: commands go in by a queue, updates come out by a callback.

Several engines may be busy, while one takes over from another; they take turns, a round each, so no
model is ever run by two threads. Knows nothing of HTTP, of text, or of who waits for an update.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from draftsmith.decoding import (
    Engine,
    Event,
    Request,
    RequestFaultError,
    Result,
    TokenLogprobs,
)

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """What became of a request in a round.

    Attributes:
        request_id: The request's.
        at_s: When the round was over, by `time.perf_counter`.
        token_ids: What the round committed.
        logprobs: An entry a token, where asked for.
        result: Of the whole request; set in its last update unless it failed.
        fault: Why it failed; then this is the last update.
        is_refused: Whether it failed before anything was decoded, by what it asked for.
    """

    request_id: str
    at_s: float
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    result: Result | None = None
    fault: Exception | None = None
    is_refused: bool = False

    @property
    def is_last(self) -> bool:
        """Whether no other follows."""
        return self.result is not None or self.fault is not None


@dataclass(frozen=True)
class _Command:
    """What the thread is asked for; `refuse` answers where the thread has ended."""

    carry_out: Callable[[], None]
    refuse: Callable[[], None] = lambda: None


class EngineThread:
    """Runs engines until it is closed.

    Args:
        deliver: Called on the thread with the updates of each round; must not wait.
    """

    def __init__(self, deliver: Callable[[list[Update]], None]) -> None:
        self._deliver = deliver
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._door = threading.Lock()  # nothing comes in behind the last that was refused
        self._engines: dict[str, Engine] = {}  # by the requests that are in them
        self._chores: list[tuple[Generator[None, None, Any], Future[Any]]] = []
        self._closed = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._thread.is_alive()

    def submit(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Let requests wait in an engine that was opened; refusals come as faults."""
        names = [request.request_id for request in requests]
        refuse = partial(self._fail, names, _ended())
        self._ask(_Command(partial(self._submit, engine, list(requests)), refuse))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Take requests out; their last updates tell. Those that have ended are passed over."""
        self._ask(_Command(partial(self._abort, list(request_ids))))

    def run(self, chore: Generator[None, None, T]) -> Future[T]:
        """Advance a generator on the thread; the future gets its value.

        It gets a step between rounds, or as many as fit into the time of a round: a service that is
        busy is slowed down to half its speed at most, and the chore ends all the same. Where the
        thread ends before it does, the future gets `CancelledError`.
        """
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # whoever waits may go away; the chore is finished
        carry_out = partial(self._chores.append, (chore, done))
        self._ask(_Command(carry_out, partial(done.set_exception, CancelledError())))
        return done

    def close(self) -> None:
        """Give up what is left, and end."""
        self._ask(_Command(self._close))
        self._thread.join()

    def _ask(self, command: _Command) -> None:
        with self._door:
            if not self._has_ended:
                self._commands.put(command)
                return
        command.refuse()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._obey()
                start = time.perf_counter()
                self._decode()
                if self._chores:
                    self._advance(*self._chores[0], until=2 * time.perf_counter() - start)
        finally:  # nobody may wait for a thread that has ended, however it ended
            self._end()

    def _end(self) -> None:
        with self._door:
            self._has_ended = True
        for _, done in self._chores:
            done.set_exception(CancelledError())
        self._fail(list(self._engines), _ended())
        while not self._commands.empty():
            self._commands.get().refuse()

    def _obey(self) -> None:
        """Carry out what was asked for; waits where there is nothing else to do.

        No engine has a name here or in `_run`: an idle thread would keep it alive.
        """
        while not self._closed:
            is_idle = not self._engines and not self._chores
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return
            command.carry_out()
            del command

    def _close(self) -> None:
        self._abort(list(self._engines))
        self._closed = True

    def _submit(self, engine: Engine, requests: list[Request]) -> None:
        names = [request.request_id for request in requests]
        try:
            engine.submit(requests)
        except Exception as error:  # refused; the thread serves others
            self._fail(names, error, is_refused=True)
        else:
            self._engines.update(dict.fromkeys(names, engine))

    def _abort(self, request_ids: list[str]) -> None:
        for name in request_ids:
            engine = self._engines.get(name)
            if engine is None:
                continue
            try:
                result = engine.abort(name)
            except Exception as error:
                self._break(engine, error)
            else:
                del self._engines[name]
                self._deliver([Update(name, time.perf_counter(), result=result)])

    def _decode(self) -> None:
        """A round of every engine that has requests; by identity, for many share one."""
        for engine in {id(engine): engine for engine in self._engines.values()}.values():
            self._round(engine)

    def _round(self, engine: Engine) -> None:
        try:
            events = engine.step()
        except RequestFaultError as fault:
            self._fail(fault.request_ids, fault)
        except Exception as error:
            self._break(engine, error)
        else:
            self._report(events)

    def _break(self, engine: Engine, error: Exception) -> None:
        """An engine failed, and so does all that is in it; it starts afresh."""
        _LOG.error("event=engine_failed", exc_info=error)
        self._fail([name for name, other in self._engines.items() if other is engine], error)
        try:
            engine.open(engine.max_context)
        except Exception:  # its next requests fail as these did; other engines go on
            _LOG.exception("event=engine_not_opened")

    def _report(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        known = [event for event in events if event.request_id in self._engines]
        updates = [Update(e.request_id, now, e.token_ids, e.logprobs, e.result) for e in known]
        for update in updates:
            if update.is_last:
                del self._engines[update.request_id]
        if updates:
            self._deliver(updates)

    def _fail(
        self, request_ids: Sequence[str], fault: Exception, *, is_refused: bool = False
    ) -> None:
        for name in request_ids:
            self._engines.pop(name, None)
        now = time.perf_counter()
        if request_ids:
            failed = [Update(n, now, fault=fault, is_refused=is_refused) for n in request_ids]
            self._deliver(failed)

    def _advance(
        self, chore: Generator[None, None, Any], done: Future[Any], *, until: float
    ) -> None:
        """A step at least, and others for as long as the rounds before it took."""
        try:
            next(chore)
            while time.perf_counter() < until:
                next(chore)
        except StopIteration as end:
            self._chores.pop(0)
            done.set_result(end.value)
        except Exception as error:  # whoever waits for the chore hears of it
            self._chores.pop(0)
            done.set_exception(error)


def _ended() -> RuntimeError:
    return RuntimeError("the engine has ended")
