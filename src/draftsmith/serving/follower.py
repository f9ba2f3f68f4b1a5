"""Follows an alias: another pair is loaded beside the one that serves, tested, and takes over.

Runs in a thread of its own and asks the registry now and then. A pair that cannot be loaded or does
not pass its test is refused until the alias names another version; the old one goes on serving.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass

import torch

from draftsmith.errors import DraftsmithError, RegistryError
from draftsmith.serving.served_pair import EngineOptions, ServedPair, prepare, self_test
from draftsmith.serving.settings import Limits
from draftsmith.serving.source import PairSource
from draftsmith.serving.state import ServerState

_DRAIN_POLL_S = 0.05
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
            self.look()

    def look(self) -> None:
        """Ask the registry once, and swap where another version is named."""
        swap = self._state.swap
        try:
            version = self._options.source.version()
        except DraftsmithError as error:
            if swap.unreachable is None:
                _LOG.warning("event=registry_unreachable error=%s", error)
            swap.unreachable = str(error)
            return
        swap.unreachable = None
        if version == self._state.gateway.served.version:
            swap.refused = None
        elif swap.refused is None or swap.refused["version"] != version:
            self._try(str(version))

    def _try(self, version: str) -> None:
        try:
            served = self._prepared(version)
        except CancelledError:
            return  # the server ends
        except Exception as error:
            self._refuse(version, error)
            return
        old = self._state.gateway.served
        self._state.swap.refused = None
        self._on_loop(lambda: self._state.gateway.replace(served))
        self._count("taken over")
        _LOG.info("event=swapped version=%s pair=%s", version, served.digest)
        self._drain(old)
        del old
        _free_memory()
        _LOG.info("event=drained")

    def _prepared(self, version: str) -> ServedPair:
        options, old = self._options, self._state.gateway.served
        pair = options.source.load(version, beside=old.pair)
        engine = options.engine
        if engine.draft_length == "adaptive" and not pair.has_costs(options.limits.max_rows):
            # Measuring beside a service would measure the service.
            engine = EngineOptions(None, engine.verify)
        served = prepare(pair, old.name, version, options=engine, limits=options.limits)
        self._state.gateway.thread.run(self_test(served)).result()
        return served

    def _refuse(self, version: str, error: Exception) -> None:
        # A registry that went away says nothing about the pair: it is asked again.
        if type(error) is RegistryError:
            self._state.swap.unreachable = str(error)
        else:
            self._state.swap.refused = {"version": version, "reason": str(error)}
            self._count("refused")
        known = isinstance(error, DraftsmithError)
        _LOG.error("event=pair_refused version=%s error=%s", version, error, exc_info=not known)

    def _count(self, outcome: str) -> None:
        metrics = self._state.gateway.records.metrics
        self._on_loop(lambda: metrics.swapped(outcome))

    def _drain(self, old: ServedPair) -> None:
        """Wait until the old pair has answered what it began."""
        while self._state.gateway.num_of(old) and not self._stop.wait(_DRAIN_POLL_S):
            pass


def _free_memory() -> None:
    """Give back what only the old pair held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
