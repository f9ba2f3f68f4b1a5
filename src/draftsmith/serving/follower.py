"""Follows an alias: another pair is loaded beside the one that serves, tested, and takes over.

Runs in a thread of its own and asks the registry now and then. A pair that is damaged or does not
pass its test is refused until the alias names another version; what failed for another reason is
tried again, less and less often. The old pair goes on serving. Two pairs are in memory at most.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass

import torch

from draftsmith.errors import (
    DamagedPairError,
    DraftError,
    DraftsmithError,
    EvidenceError,
    RegistryError,
    TargetError,
)
from draftsmith.serving.served_pair import EngineOptions, ServedPair, prepare, self_test
from draftsmith.serving.settings import Limits
from draftsmith.serving.source import PairSource
from draftsmith.serving.state import Refusal, ServerState

_MOST_BETWEEN_S = 300.0  # two tries of a version
_WAIT_S = 1.0  # between two looks at whether the server ends
# What the pair itself is to blame for: it fails in the same way the next time.
_FINAL = (EvidenceError, DamagedPairError, DraftError, TargetError)
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class FollowOptions:
    """How an alias is followed.

    Attributes:
        source: The address.
        engine: How the new engine decodes.
        limits: Of the server.
        poll_s: Seconds between two looks at the registry.
    """

    source: PairSource
    engine: EngineOptions
    limits: Limits
    poll_s: float


class Follower:
    """Replaces the served pair when the alias moves.

    Args:
        state: The server.
        options: What is followed, and how.
        on_loop: Runs a callable on the server's event loop.
    """

    def __init__(
        self,
        state: ServerState,
        options: FollowOptions,
        on_loop: Callable[[Callable[[], None]], object],
    ) -> None:
        self._state, self._options, self._on_loop = state, options, on_loop
        self._stop = threading.Event()
        self._old: ServedPair | None = None  # answers what it began
        self._between_s = self._next_try_s = 0.0
        self._tried: str | None = None  # the version that was tried last
        self._broken_off: str | None = None  # why it could not be fetched
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        state.swap.followed = options.source.uri

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; a load that is going on ends with the process."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._options.poll_s):
            try:
                self.look()
            except Exception as error:  # a follower that died would be noticed by nobody
                if not self._stop.is_set() and self._state.swap.unreachable != repr(error):
                    _LOG.exception("event=follower_failed")
                    self._state.swap.unreachable = repr(error)

    def look(self) -> None:
        """Ask the registry once, and swap where another version is named."""
        swap = self._state.swap
        try:
            version = self._options.source.version()
        except DraftsmithError as error:
            self._let_go()
            if swap.unreachable is None:
                _LOG.warning("event=registry_unreachable error=%s", error)
            swap.unreachable = str(error)
            return
        swap.unreachable = self._broken_off if str(version) == self._tried else None
        if self._old is not None and version == self._old.version:
            self._replace(self._old)  # it only has to come back
            return
        self._let_go()
        if version == self._state.gateway.served.version:
            swap.refused = swap.unreachable = self._tried = None
        elif self._old is None and self._may_try(str(version)):
            # A third pair waits until there is room for it.
            self._try(str(version))

    def _may_try(self, version: str) -> bool:
        if version != self._tried:
            self._tried, self._broken_off = version, None
            self._between_s = self._options.poll_s
            return True
        refused = self._state.swap.refused
        is_final = refused is not None and refused.version == version and refused.is_final
        return not is_final and time.monotonic() >= self._next_try_s

    def _let_go(self) -> None:
        """Free the old pair once it has answered what it began."""
        if self._old is not None and not self._state.gateway.num_of(self._old):
            self._old = None
            _free_memory()
            _LOG.info("event=drained")

    def _try(self, version: str) -> None:
        try:
            if self._takes_over(version):
                return
        except CancelledError:
            return  # the server ends
        except Exception as error:
            self._refuse(version, error)
        _free_memory()  # here, where the error holds no frames any more, and they no pair

    def _takes_over(self, version: str) -> bool:
        """Load and test a pair, and swap unless the alias has moved on meanwhile."""
        served = self._prepared(version)
        named = self._options.source.version()
        if named != version:
            _LOG.info("event=overtaken version=%s named=%s", version, named)
            self._tried = None
            return False
        self._replace(served)
        return True

    def _replace(self, served: ServedPair) -> None:
        """Let a pair take over, and wait until it has."""
        gateway, has_taken_over = self._state.gateway, threading.Event()

        def replace() -> None:
            gateway.replace(served)
            gateway.records.metrics.swapped("taken over")
            has_taken_over.set()

        self._old = gateway.served
        self._on_loop(replace)
        while not has_taken_over.wait(_WAIT_S):
            if self._stop.is_set():
                return
        self._state.swap.refused = None
        facts = served.version, served.digest, served.draft_length
        _LOG.info("event=swapped version=%s pair=%s draft_length=%s", *facts)

    def _prepared(self, version: str) -> ServedPair:
        options, old = self._options, self._state.gateway.served
        start = time.monotonic()
        pair = options.source.load(version, beside=old.pair)
        engine = options.engine
        if engine.draft_length == "adaptive" and not pair.has_costs(options.limits.max_rows):
            # Measuring beside a service would measure the service.
            engine = EngineOptions(None, engine.verify)
        served = prepare(pair, old.name, version, options=engine, limits=options.limits)
        if old.draft_length == "adaptive" and served.draft_length != "adaptive":
            reason = "no costs of its shapes were measured here"
            _LOG.warning("event=lengths_fixed version=%s reason=%r", version, reason)
        loaded = time.monotonic()
        self._state.gateway.thread.run(self_test(served)).result()
        spent_s = loaded - start, time.monotonic() - loaded
        _LOG.info("event=tested version=%s load_s=%.1f test_s=%.1f", version, *spent_s)
        return served

    def _refuse(self, version: str, error: Exception) -> None:
        swap = self._state.swap
        self._between_s = min(2 * self._between_s, _MOST_BETWEEN_S)
        self._next_try_s = time.monotonic() + self._between_s
        # A registry that went away says nothing about the pair.
        self._broken_off = str(error) if type(error) is RegistryError else None
        if self._broken_off is not None:
            swap.unreachable = self._broken_off
            return
        reason = str(error) or repr(error)
        refusal = Refusal(version, reason, isinstance(error, _FINAL))
        if swap.refused == refusal:
            return  # as the last time
        if swap.refused is None or swap.refused.version != version:
            metrics = self._state.gateway.records.metrics
            self._on_loop(lambda: metrics.swapped("refused"))
        swap.refused = refusal
        known = isinstance(error, DraftsmithError)
        _LOG.error("event=pair_refused version=%s error=%s", version, reason, exc_info=not known)


def _free_memory() -> None:
    """Give back what only a pair held that is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":  # the GNU C library keeps what lies below anything still in use
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
