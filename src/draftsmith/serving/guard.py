"""What stands before the app: crowds, keys, size of bodies, and clients that are too slow.

A body is waited for where it is wanted: of the API, from who may ask. It is read to its end within
the client's time, even where it is refused, so that the client reads the refusal and no broken
connection; only where too many are in hand nothing is read. Whoever has no key is told so by the
headers alone and holds no place, however slowly a body comes: what comes behind an answer is
dropped by the connection. Keys are compared in constant time and never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftsmith.serving.api_errors import GONE, ApiError
from draftsmith.serving.settings import Limits

_PROTECTED = "/v1/"
_FIRST_ERROR = 400
_PROBES = 16  # requests besides those of the API: nobody may end a server because it is busy
_LOG = logging.getLogger(__name__)


class Guard:
    """An app behind it gets whole bodies within the limits, and answers who may ask.

    Args:
        app: What is guarded.
        limits: Of bodies and clients.
        keys: Any of them opens /v1/; without keys it is open.
        on_refusal: Called with the status of every answer that is an error and has a reader.
        is_ending: Whether /v1/ is closed; probes are answered to the end.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        keys: Sequence[bytes],
        on_refusal: Callable[[int], None],
        is_ending: Callable[[], bool],
    ) -> None:
        self._app, self._limits, self._keys = app, limits, tuple(keys)
        self._on_refusal, self._is_ending = on_refusal, is_ending
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sending = self._watched(send)
        self._num_held += 1
        try:
            with contextlib.suppress(ConnectionAbortedError):  # it is in the log
                await self._answer(scope, receive, sending)
        finally:
            self._num_held -= 1

    async def _answer(self, scope: Scope, receive: Receive, sending: Send) -> None:
        most = self._limits.max_requests + (0 if _is_protected(scope) else _PROBES)
        if self._num_held > most:
            await _crowded(most).response(scope, receive, sending)
            return
        refusal = self._locked_out(scope)
        if refusal is None and _is_protected(scope) and self._is_ending():
            refusal = _ending()
        body: bytes | None = b""
        if refusal is None and _is_protected(scope):
            body, refusal = await self._body(receive)
        elif any(name == b"expect" for name, _ in scope["headers"]):
            sending = _closing(sending)
        if refusal is not None:
            await refusal.response(scope, receive, sending)
        elif body is not None:
            await self._app(scope, _replayed(body, receive), sending)

    def _locked_out(self, scope: Scope) -> ApiError | None:
        if not self._keys or not _is_protected(scope):
            return None
        given = b"".join(value for name, value in scope["headers"] if name == b"authorization")
        kind, _, key = given.partition(b" ")
        # Every key is compared, so that the time tells nothing of which one was nearly right.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if kind.lower() == b"bearer" and any(matches):
            return None
        found = "another key" if given else "no key"
        message = f"Authorization: found {found}; expected `Bearer` and a key of this server"
        headers = {"WWW-Authenticate": "Bearer"}
        return ApiError(401, message, code="invalid_api_key", headers=headers)

    async def _body(self, receive: Receive) -> tuple[bytes | None, ApiError | None]:
        """The body within the client's time, None when the client has gone; or a refusal."""
        seconds = self._limits.client_timeout_s
        try:
            async with asyncio.timeout(seconds):
                return await self._read(receive)
        except TimeoutError:
            headers = {"Connection": "close"}
            text = f"the body did not come within {seconds:g} s"
            return None, ApiError(408, text, headers=headers)

    async def _read(self, receive: Receive) -> tuple[bytes | None, ApiError | None]:
        limit = self._limits.max_body_bytes
        refusal: ApiError | None = None
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None, None
            size += len(message.get("body", b""))
            if size > limit and refusal is None:
                text = f"the body has more than {limit} bytes, which is the most that is read"
                refusal = ApiError(413, text, code="request_too_large")
            if refusal is None:
                pieces.append(message.get("body", b""))
            else:
                pieces.clear()
            if not message.get("more_body", False):
                return b"".join(pieces), refusal

    def _watched(self, send: Send) -> Send:
        """Sends within the client's time; a client that takes nothing loses its answer."""

        async def sending(message: Message) -> None:
            status = message["status"] if message["type"] == "http.response.start" else 0
            if status >= _FIRST_ERROR and status != GONE:
                self._on_refusal(status)
            try:
                async with asyncio.timeout(self._limits.client_timeout_s):
                    await send(message)
            except TimeoutError:
                _LOG.warning("event=slow_client timeout_s=%g", self._limits.client_timeout_s)
                raise ConnectionAbortedError("the client takes nothing") from None

        return sending


def _is_protected(scope: Scope) -> bool:
    return str(scope["path"]).startswith(_PROTECTED)


def _closing(send: Send) -> Send:
    """Ends the connection with the answer.

    A client that waits to be told to go on may leave the body out that nobody waited for; what it
    asks next would be read as that body.
    """

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            message = {**message, "headers": headers}
        await send(message)

    return sending


def _ending() -> ApiError:
    text = "the server ends and takes nothing on"
    headers = {"Connection": "close"}
    return ApiError(503, text, code="server_ending", headers=headers)


def _crowded(most: int) -> ApiError:
    return ApiError(
        503,
        f"{most} requests are in hand; try again in a second",
        code="too_many_requests",
        headers={"Retry-After": "1", "Connection": "close"},
    )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then what comes from the client."""
    pending = [body]

    async def receiving() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return receiving
