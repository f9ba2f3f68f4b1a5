"""One server process: loads a pair, tests it, listens, and on a signal drains before it ends."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from draftsmith.errors import ConfigError
from draftsmith.serving.api import make_app
from draftsmith.serving.connections import Connection
from draftsmith.serving.follower import Follower, FollowOptions
from draftsmith.serving.gateway import Gateway
from draftsmith.serving.guard import Guard
from draftsmith.serving.records import Records
from draftsmith.serving.served_pair import EngineOptions, ServedPair, prepare, self_test
from draftsmith.serving.settings import Limits
from draftsmith.serving.source import PairSource
from draftsmith.serving.state import ServerState

_GRACE_S = 5  # for callers to be told that they get no answer
_LOOPBACK = ("127.", "::1", "localhost")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeOptions:
    """What a server serves, and how.

    Attributes:
        source: The pair.
        engine: How it decodes.
        limits: What is taken on.
        host: Address to listen on.
        port: 0 takes a free one.
        telemetry: File that gets a line a request.
        keys: API keys; without any /v1/ is open.
        poll_s: Seconds between two looks at an alias; 0 never looks.
        drain_s: On a signal, so long for what was begun.
    """

    source: PairSource
    engine: EngineOptions = EngineOptions()
    limits: Limits = Limits()
    host: str = "127.0.0.1"
    port: int = 8000
    telemetry: Path | None = None
    keys: tuple[bytes, ...] = ()
    poll_s: float = 2.0
    drain_s: int = 60


class PairServer:
    """A server; made, it has its address and its pair, but answers nobody before `run`.

    Args:
        options: What it serves, and how.

    Raises:
        ConfigError: The address cannot be listened on.
        DraftsmithError: The pair cannot be loaded.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._socket = _bound(options.host, options.port)
        self._served = self._first_pair()
        self._server: uvicorn.Server | None = None
        self.state: ServerState | None = None  # while it runs

    @property
    def url(self) -> str:
        """Where it answers."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Test the pair, then serve until a signal or `stop`.

        Args:
            on_ready: Called once it answers.

        Raises:
            EvidenceError: The pair does not pass its test.
        """
        asyncio.run(self._run(on_ready))

    def stop(self) -> None:
        """Take no more requests, answer those that were begun, and end; from any thread."""
        if self._server is not None:
            self._server.should_exit = True

    def _first_pair(self) -> ServedPair:
        options, source = self._options, self._options.source
        version = source.version()
        pair = source.load(version)
        return prepare(pair, source.name, version, options=options.engine, limits=options.limits)

    async def _run(self, on_ready: Callable[[], None]) -> None:
        options = self._options
        records = Records(options.telemetry)
        gateway = Gateway(self._served, options.limits, records)
        text_work = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")
        self.state = state = ServerState(gateway, text_work)
        gateway.thread.start()
        follower = self._follower(state)
        try:
            await asyncio.wrap_future(gateway.thread.run(self_test(self._served)))
            del self._served  # the gateway's alone, so that it can be freed
            await self._serve(state, follower, on_ready)
        finally:
            if follower is not None:
                follower.close()
            await asyncio.to_thread(gateway.thread.close)
            await asyncio.to_thread(records.close)
            text_work.shutdown()
            self._socket.close()
        _LOG.info("event=ended")

    def _follower(self, state: ServerState) -> Follower | None:
        options = self._options
        if not options.source.is_alias or not options.poll_s:
            return None
        follow = FollowOptions(options.source, options.engine, options.limits, options.poll_s)
        return Follower(state, follow, asyncio.get_running_loop().call_soon_threadsafe)

    async def _serve(
        self, state: ServerState, follower: Follower | None, on_ready: Callable[[], None]
    ) -> None:
        options, limits = self._options, self._options.limits
        app = Guard(
            make_app(state),
            limits=limits,
            keys=options.keys,
            on_refusal=state.gateway.records.metrics.refused,
            is_ending=lambda: state.gateway.is_draining,
        )
        config = uvicorn.Config(
            app,
            lifespan="off",
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=math.ceil(limits.client_timeout_s),
            timeout_graceful_shutdown=options.drain_s + 2 * _GRACE_S,  # should ours not be heard
        )

        def started() -> None:
            self._announce(state.gateway.served)
            if follower is not None:
                follower.start()
            on_ready()

        self._server = _Server(config, state.gateway, started, drain_s=options.drain_s)
        await self._server.serve(sockets=[self._socket])

    def _announce(self, served: ServedPair) -> None:
        options = self._options
        if not options.keys and not options.host.startswith(_LOOPBACK):
            _LOG.warning("event=open_to_all host=%s keys=none", options.host)
        facts = self.url, served.name, served.version, served.draft_length
        _LOG.info("event=serving url=%s model=%s version=%s draft_length=%s", *facts)


class _Server(uvicorn.Server):
    """Uvicorn's server, which on a signal answers what was begun, and probes, before it ends.

    Args:
        config: Uvicorn's.
        gateway: Learns that the server drains, and when it gives up.
        started: Called once it listens.
        drain_s: So long for what was begun.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Gateway,
        started: Callable[[], None],
        *,
        drain_s: float,
    ) -> None:
        super().__init__(config)
        self._gateway, self._started, self._drain_s = gateway, started, drain_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # of the drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._started()

    async def on_tick(self, counter: int) -> bool:
        """Whether to leave: only once all samples have ended, or were given up in time."""
        if not await super().on_tick(counter):
            return False
        if self._timer is None:
            self._gateway.is_draining = True
            self._timer = self._loop.call_later(self._drain_s, self._give_up)
        return self._gateway.is_idle or self.force_exit

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait until the last answers have been sent."""
        await super().shutdown(sockets)
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self) -> None:
        self._gateway.give_up()
        self._loop.call_later(_GRACE_S, self._leave)

    def _leave(self) -> None:
        self.force_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  uvicorn's
        """Drain on the first signal, give up what is left on the second."""
        _LOG.info("event=signal number=%d", sig)
        if self.should_exit:
            self._loop.call_soon_threadsafe(self._give_up)
        self.should_exit = self._gateway.is_draining = True


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address and does not listen yet, so that nobody waits for a load."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"listening on {host}:{port}",
            found=getattr(error, "strerror", None) or str(error),
            expected="an address of this machine and a free port",
            remedy="choose others with --host and --port (0 takes a free port)",
        ) from error
    return bound
