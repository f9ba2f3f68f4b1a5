"""Clients that take nothing, at the door."""

from __future__ import annotations

import asyncio

from draftsmith.serving.guard import Guard
from draftsmith.serving.settings import Limits

SCOPE = {"type": "http", "method": "GET", "path": "/health", "headers": []}


def test_a_client_that_takes_nothing_loses_its_answer(caplog):
    begun = []

    async def app(scope, receive, send):
        begun.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": "http.request", "body": b"all of it", "more_body": False}

    async def send(message):
        await asyncio.Event().wait()

    limits = Limits(client_timeout_s=0.05)
    guard = Guard(app, limits=limits, keys=(), on_refusal=lambda status: None)
    asyncio.run(asyncio.wait_for(guard(SCOPE, receive, send), 60))
    assert begun == [b"all of it"]
    assert "event=slow_client" in caplog.text
