"""Connections: who asks nothing in time makes room, and what is no HTTP is refused as all else is.

Knows nothing of what is asked; a request whose head has come is the guard's.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from draftsmith.serving.api_errors import ApiError

MOST_WAITING = 256  # connections without a request
_TOO_LARGE = 431


class Connection(H11Protocol):
    """Uvicorn's, whatever else is installed.

    It waits for the head of a request from its beginning, and from the end of every answer, as long
    as a client may take for a body, however the head trickles in. Where too many wait, the one that
    has waited longest is closed.
    """

    _waits_since_s = 0.0
    _patience: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401  uvicorn's
        super().__init__(*arguments, **options)
        self.app = self._ending(self.app)

    def _ending(self, app: Any) -> Any:  # noqa: ANN401  uvicorn types no application
        async def answering(*channels: Any) -> None:  # noqa: ANN401
            cycle = self.cycle  # the next request's may be there when the app is done
            await app(*channels)
            if cycle is not None and not cycle.response_complete:
                # The client takes nothing: closing would wait for it to take what is unsent.
                self.transport.abort()

        return answering

    @property
    def is_waiting(self) -> bool:
        """Whether it has no request in hand."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait, and see that not too many do."""
        super().connection_made(transport)
        self._wait()
        others = (other for other in self.connections if isinstance(other, Connection))
        waiting = [o for o in others if o.is_waiting and not o.transport.is_closing()]
        waiting.sort(key=lambda other: other._waits_since_s)
        for other in waiting[: max(0, len(waiting) - MOST_WAITING)]:
            other.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        if self._patience is not None:
            self._patience.cancel()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it has come already."""
        super().on_response_complete()
        if self.is_waiting:
            self._wait()

    def _wait(self) -> None:
        self._waits_since_s = self.loop.time()
        self._have_patience()

    def _have_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        num_unsent = self.transport.get_write_buffer_size()
        self._patience = self.loop.call_later(
            self.timeout_keep_alive, self._lose_patience, self.cycle, num_unsent
        )

    def _lose_patience(self, last: RequestResponseCycle | None, num_unsent: int) -> None:
        if self.cycle is not last:  # a request has come since
            return
        if self.transport.get_write_buffer_size() < num_unsent:
            self._have_patience()  # it takes the last answer yet
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  uvicorn's, the same for all
        """Refuse what is no HTTP, and headers without end."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # Bytes behind a request that is being answered end the connection with its answer.
            if self.conn.our_state is h11.DONE:
                self.transport.close()
            return
        fault = sys.exception()
        hint = getattr(fault, "error_status_hint", None)
        status = _TOO_LARGE if hint == _TOO_LARGE else 400
        refusal = ApiError(status, f"no valid HTTP: {fault}", headers={"Connection": "close"})
        answer = refusal.response
        head = h11.Response(status_code=status, headers=answer.raw_headers)
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True  # whoever answers it is not to write behind this
