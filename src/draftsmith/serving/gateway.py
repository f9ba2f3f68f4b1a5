"""Between HTTP and the engine thread: who may enter, who gets which update, and until when.

Lives on one event loop. A sample counts against the limits from its entry until the engine says
that it has ended, so a caller who goes away frees a place exactly when the engine has freed it.
Before that a call has its room from its arrival on, so that no more prompts are read than fit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from draftsmith.decoding import Request, RequestFaultError
from draftsmith.errors import DecodingError
from draftsmith.serving.api_errors import ApiError, refused_parameter
from draftsmith.serving.engine_thread import EngineThread, Update
from draftsmith.serving.records import Records
from draftsmith.serving.served_pair import ServedPair
from draftsmith.serving.settings import Limits

_MOST_RETRY_S = 60
_MEMORY = 0.9  # of the mean duration, a request
_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Call:
    """One API call: its samples, and what the engine says of them.

    Attributes:
        served: The pair that answers, whoever takes over meanwhile.
        num_samples: What it asks for.
        domain: For telemetry.
        num_prompts: What these are of.
        requests: One a sample, once the prompts are tokens.
    """

    served: ServedPair
    num_samples: int
    domain: str | None
    num_prompts: int = 1
    requests: Sequence[Request] = ()
    arrived_s: float = field(default_factory=time.perf_counter)
    updates: asyncio.Queue[Update] = field(default_factory=asyncio.Queue)
    seen_s: dict[str, float] = field(default_factory=dict)  # a sample's last round


class Gateway:
    """Takes calls for the pair that is served now.

    Args:
        served: The first pair.
        limits: What is taken on.
        records: What is kept of it.
    """

    def __init__(self, served: ServedPair, limits: Limits, records: Records) -> None:
        self.served = served
        self.records = records
        self.is_draining = self.has_given_up = False
        self.thread = EngineThread(self._deliver)
        self._limits = limits
        self._arriving: set[Call] = set()
        self._calls: dict[str, Call] = {}  # by samples that have not ended
        self._loop = asyncio.get_running_loop()
        self._mean_s = 1.0
        records.metrics.serves(served.digest)

    def replace(self, served: ServedPair) -> None:
        """Let another pair answer new calls."""
        self.served = served
        self.records.metrics.serves(served.digest)

    @property
    def num_running(self) -> int:
        """Samples that have tokens."""
        return sum(name in call.seen_s for name, call in self._calls.items())

    @property
    def num_waiting(self) -> int:
        """Samples that have none yet."""
        return self._num_held() - self.num_running

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything."""
        return self._num_held() == 0

    def num_of(self, served: ServedPair) -> int:
        """Samples that a pair still answers; may be asked by any thread."""
        calls = [*self._arriving, *self._calls.values()]
        return sum(call.served is served for call in calls)

    def _num_held(self) -> int:
        return len(self._calls) + sum(call.num_samples for call in self._arriving)

    @contextlib.asynccontextmanager
    async def arrival(self, call: Call) -> AsyncIterator[None]:
        """Keep room for a call while its prompts become tokens; it enters inside, or never.

        Raises:
            ApiError: More than there is room for, nobody decodes any more, or the time is over.
        """
        self._require_room(call)
        self._arriving.add(call)
        try:
            async with asyncio.timeout_at(self._deadline(call)):
                yield
        except TimeoutError:
            raise self._too_late() from None
        finally:
            self._arriving.discard(call)

    def _require_room(self, call: Call) -> None:
        self._require_engine()
        room = self._limits.max_rows + self._limits.max_queue
        if call.num_samples > room:
            param = "prompt" if call.num_prompts > room else "n"
            message = f"{param}: found {call.num_samples} samples; expected at most {room}"
            raise ApiError(400, message, param=param)
        held = self._num_held()
        if held + call.num_samples > room:
            turns = held / self._limits.max_rows  # until the queue is empty
            wait = max(1, min(_MOST_RETRY_S, math.ceil(self._mean_s * turns)))
            raise ApiError(
                429,
                f"{held} samples are decoded or wait, and there is room for {room}; "
                f"try again in {wait} s",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait)},
            )

    def _require_engine(self) -> None:
        if self.has_given_up:
            raise _ending()
        if not self.thread.is_alive:
            raise ApiError(503, "the engine has ended; the server's log says how")

    def enter(self, call: Call) -> None:
        """Hand a call's samples to the engine; whoever enters must leave, however it ends.

        Raises:
            ApiError: Nobody decodes any more.
        """
        self._require_engine()
        # In this order: whoever counts from another thread misses none.
        self._calls.update({request.request_id: call for request in call.requests})
        self._arriving.discard(call)
        self.thread.submit(call.served.engine, call.requests)

    def give_up(self) -> None:
        """Take out all that is unfinished, and take nothing on; callers are told."""
        self.has_given_up = True
        self.thread.abort(list(self._calls))

    def leave(self, call: Call) -> None:
        """The caller wants no more; what is unfinished is taken out."""
        left = [r.request_id for r in call.requests if self._calls.get(r.request_id) is call]
        if left:
            self.thread.abort(left)

    async def follow(self, call: Call) -> AsyncGenerator[Update, None]:
        """The updates of a call that entered, until all its samples have ended.

        Raises:
            ApiError: A sample failed, or the time is over; then the call is to be left.
        """
        try:
            deadline = self._deadline(call)
            num_left = len(call.requests)
            while num_left:
                async with asyncio.timeout_at(deadline):
                    update = await call.updates.get()
                if update.fault is not None:
                    raise _failure(update.fault, is_refused=update.is_refused)
                if update.result is not None and update.result.finish_reason == "abort":
                    raise _ending()  # the caller has not gone, so the server goes
                num_left -= update.is_last
                yield update
        except TimeoutError:
            raise self._too_late() from None

    def _deadline(self, call: Call) -> float:
        """Of an answer, by the loop's clock."""
        age_s = time.perf_counter() - call.arrived_s
        return self._loop.time() + self._limits.request_timeout_s - age_s

    def _too_late(self) -> ApiError:
        message = f"not finished within {self._limits.request_timeout_s:g} s"
        return ApiError(504, message, code="timeout")

    def _deliver(self, updates: list[Update]) -> None:
        """On the engine thread."""
        self._loop.call_soon_threadsafe(self._sort, updates)

    def _sort(self, updates: Sequence[Update]) -> None:
        for update in updates:
            call = self._calls[update.request_id]
            if update.is_last:
                del self._calls[update.request_id]
            call.updates.put_nowait(update)
            try:
                self._count(call, update)
            except Exception:  # costs a count and no answer
                _LOG.exception("event=not_counted")

    def _count(self, call: Call, update: Update) -> None:
        metrics, name = self.records.metrics, update.request_id
        if update.token_ids:
            if name in call.seen_s:
                metrics.next_tokens(update.at_s - call.seen_s[name], len(update.token_ids))
            else:
                metrics.first_tokens(update.at_s - call.arrived_s)
            call.seen_s[name] = update.at_s
        if update.result is None:
            return
        request = next(r for r in call.requests if r.request_id == name)
        seconds = update.at_s - call.arrived_s
        self._mean_s = _MEMORY * self._mean_s + (1 - _MEMORY) * seconds
        self.records.ended(
            request, update.result, pair_digest=call.served.digest, domain=call.domain, s=seconds
        )


def _failure(fault: Exception, *, is_refused: bool) -> ApiError:
    """What a caller hears of a fault."""
    if isinstance(fault, RequestFaultError):
        message = f"the target failed on this request: {fault.found}"
        return ApiError(500, message, code="target_fault")
    if is_refused and isinstance(fault, DecodingError):
        return refused_parameter(fault)
    return ApiError(500, "the engine failed; the server's log says how")


def _ending() -> ApiError:
    return ApiError(503, "the server ends and answers no more", code="server_ending")
