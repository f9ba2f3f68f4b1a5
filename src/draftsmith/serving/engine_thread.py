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
    """

    request_id: str
    at_s: float
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    result: Result | None = None
    fault: Exception | None = None

    @property
    def is_last(self) -> bool:
        """Whether no other follows."""
        return self.result is not None or self.fault is not None


class EngineThread:
    """Runs engines until it is closed.

    Args:
        deliver: Called on the thread with the updates of each round; must not wait.
    """

    def __init__(self, deliver: Callable[[list[Update]], None]) -> None:
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._engines: dict[str, Engine] = {}  # by the requests that are in them
        self._chores: list[tuple[Generator[None, None, Any], Future[Any]]] = []
        self._closed = False
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
        self._commands.put(partial(self._submit, engine, list(requests)))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Take requests out; their last updates tell. Those that have ended are passed over."""
        self._commands.put(partial(self._abort, list(request_ids)))

    def run(self, chore: Generator[None, None, T]) -> Future[T]:
        """Advance a generator on the thread, a step between rounds; the future gets its value."""
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # whoever waits may go away; the chore is finished
        self._commands.put(lambda: self._chores.append((chore, done)))
        return done

    def close(self) -> None:
        """Give up what is left, and end."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._obey()
                # By identity: requests of one engine share it.
                for engine in {id(engine): engine for engine in self._engines.values()}.values():
                    self._round(engine)
                if self._chores:
                    self._advance(*self._chores[0])
        finally:  # nobody may wait for a thread that has ended, however it ended
            self._fail(list(self._engines), RuntimeError("the engine has ended"))
            for _, done in self._chores:
                done.set_exception(CancelledError())

    def _obey(self) -> None:
        """Carry out what was asked for; waits where there is nothing else to do."""
        while True:
            is_idle = not self._engines and not self._chores
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return
            if command is None:
                self._abort(list(self._engines))
                self._closed = True
                return
            command()

    def _submit(self, engine: Engine, requests: list[Request]) -> None:
        try:
            engine.submit(requests)
        except Exception as error:  # refused; the thread serves others
            self._fail([request.request_id for request in requests], error)
        else:
            self._engines.update({request.request_id: engine for request in requests})

    def _abort(self, request_ids: list[str]) -> None:
        now = time.perf_counter()
        held = [(name, self._engines.pop(name)) for name in request_ids if name in self._engines]
        if held:
            self._deliver([Update(n, now, result=engine.abort(n)) for n, engine in held])

    def _round(self, engine: Engine) -> None:
        try:
            events = engine.step()
        except RequestFaultError as fault:
            self._fail(fault.request_ids, fault)
        except Exception as error:
            _LOG.exception("event=engine_failed")
            mine = [name for name, other in self._engines.items() if other is engine]
            self._fail(mine, error)
            engine.open(engine.max_context)
        else:
            self._report(events)

    def _report(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            if event.result is not None:
                del self._engines[event.request_id]
        updates = [Update(e.request_id, now, e.token_ids, e.logprobs, e.result) for e in events]
        if updates:
            self._deliver(updates)

    def _fail(self, request_ids: Sequence[str], fault: Exception) -> None:
        for name in request_ids:
            self._engines.pop(name, None)
        now = time.perf_counter()
        if request_ids:
            self._deliver([Update(name, now, fault=fault) for name in request_ids])

    def _advance(self, chore: Generator[None, None, Any], done: Future[Any]) -> None:
        try:
            next(chore)
        except StopIteration as end:
            self._chores.pop(0)
            done.set_result(end.value)
        except Exception as error:  # whoever waits for the chore hears of it
            self._chores.pop(0)
            done.set_exception(error)
