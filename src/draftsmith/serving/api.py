"""The routes: OpenAI's API, health, and metrics."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from draftsmith.provenance import package_version
from draftsmith.serving import api_errors
from draftsmith.serving.answers import Answer
from draftsmith.serving.api_errors import GONE, MOST_SHOWN, ApiError
from draftsmith.serving.description import (
    ERRORS,
    HEALTH,
    READINESS,
    ChatCompletion,
    Completion,
    Model,
    ModelList,
    streamed,
)
from draftsmith.serving.gateway import Call, Gateway
from draftsmith.serving.parameters import Body, encode, requests_of
from draftsmith.serving.schema import ChatRequest, CompletionRequest
from draftsmith.serving.state import ServerState

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def make_app(state: ServerState) -> FastAPI:
    """The app over a gateway that is running."""
    version = package_version("draftsmith") or "0"
    app = FastAPI(title="draftsmith", version=version, redoc_url=None, responses=ERRORS)
    api_errors.install(app)
    gateway = state.gateway

    @app.post("/v1/chat/completions", responses=streamed(ChatCompletion))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Continue a chat."""
        return await _complete(body, request, gateway, state.text_work)

    @app.post("/v1/completions", responses=streamed(Completion))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        return await _complete(body, request, gateway, state.text_work)

    @app.get("/v1/models", responses={200: {"model": ModelList}})
    async def models() -> JSONResponse:
        """What is served."""
        return JSONResponse({"object": "list", "data": [state.described()]})

    @app.get("/v1/models/{name:path}", responses={200: {"model": Model}})
    async def model(name: str) -> JSONResponse:
        """One model."""
        _require_known(name, gateway)
        return JSONResponse(state.described())

    @app.get("/health", responses=HEALTH)
    async def health() -> JSONResponse:
        """Whether it lives, which pair answers, and why another one does not."""
        return JSONResponse(state.health(), 200 if gateway.thread.is_alive else 503)

    @app.get("/ready", responses=READINESS)
    async def ready() -> JSONResponse:
        """Whether new requests are welcome."""
        is_ready = gateway.thread.is_alive and not gateway.is_draining
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Counters as Prometheus text."""
        return PlainTextResponse(state.exposition(), media_type=_PROMETHEUS)

    return app


async def _complete(
    body: Body, request: Request, gateway: Gateway, text_work: Executor
) -> Response:
    served = gateway.served  # of this call, whoever takes over meanwhile
    _require_known(body.model, gateway)
    call_id = f"{'chatcmpl' if isinstance(body, ChatRequest) else 'cmpl'}-{uuid.uuid4().hex}"
    loop = asyncio.get_running_loop()
    domain = body.metadata.get("domain") or None
    call = Call(served, body.num_samples, domain, num_prompts=body.num_prompts)
    async with gateway.arrival(call):
        encoded = await loop.run_in_executor(text_work, partial(encode, body, served))
        call.requests = requests_of(body, encoded, served, call_id=call_id)
        answer = Answer(body, call, call_id, sum(map(len, encoded.prompts)))
        gateway.enter(call)
    if body.stream:
        return EventStream(answer.stream(gateway), partial(gateway.leave, call))
    try:
        whole = await _unless_gone(request, answer.whole(gateway))
    finally:
        gateway.leave(call)
    return Response(status_code=GONE) if whole is None else JSONResponse(whole)


class EventStream(StreamingResponse):
    """Server-sent events; however the stream ends, also before it began, the call is left.

    Args:
        events: As text.
        leave: Called at the end.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


async def _unless_gone(request: Request, answer: Any) -> dict[str, Any] | None:  # noqa: ANN401  a coroutine
    """The answer; None where the client goes away before it is there."""
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _require_known(name: str, gateway: Gateway) -> None:
    known = gateway.served.name
    if name != known:
        message = f"model: found {name[:MOST_SHOWN]!r}; expected {known!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
