"""Clients at the door: those that take nothing, and those whose bodies nobody waits for."""

from __future__ import annotations

import asyncio

import pytest

from draftsmith.serving.guard import Guard
from draftsmith.serving.settings import Limits

KEY = b"a-key"
HAS_KEY = [(b"authorization", b"Bearer " + KEY)]


def scope_of(path, headers=()):
    return {"type": "http", "method": "POST", "path": path, "headers": list(headers)}


def guarded(app, **options):
    given = {"limits": Limits(), "keys": (), "on_refusal": lambda status: None}
    return Guard(app, **{**given, "is_ending": lambda: False, **options})


async def withheld():
    """A body that does not come."""
    await asyncio.Event().wait()


class Client:
    """Takes what it is sent."""

    def __init__(self):
        self.statuses = []

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])


class App:
    """Answers, and keeps the bodies that it gets."""

    def __init__(self):
        self.bodies = []

    async def __call__(self, scope, receive, send):
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def test_a_client_that_takes_nothing_loses_its_answer(caplog):
    app = App()

    async def receive():
        return {"type": "http.request", "body": b"all of it", "more_body": False}

    async def send(message):
        await asyncio.Event().wait()

    guard = guarded(app, limits=Limits(client_timeout_s=0.05))
    asyncio.run(asyncio.wait_for(guard(scope_of("/v1/models"), receive, send), 60))
    assert app.bodies == [b"all of it"]
    assert "event=slow_client" in caplog.text


def asked(guard, path, headers=()):
    """The statuses of an answer to a request whose body does not come."""
    client = Client()
    asked_for = guard(scope_of(path, headers), withheld, client.send)
    asyncio.run(asyncio.wait_for(asked_for, 60))
    return client.statuses


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer another")]])
def test_who_has_no_key_is_told_so_before_a_body_comes(headers):
    app, refused = App(), []
    guard = guarded(app, keys=(KEY,), on_refusal=refused.append)
    assert asked(guard, "/v1/completions", headers) == [401]
    assert refused == [401]
    assert app.bodies == []


def test_the_body_of_who_has_a_key_is_waited_for():
    guard = guarded(App(), keys=(KEY,), limits=Limits(client_timeout_s=0.05))
    assert asked(guard, "/v1/completions", HAS_KEY) == [408]


def test_a_path_that_wants_no_body_waits_for_none():
    app = App()
    assert asked(guarded(app, keys=(KEY,)), "/health") == [200]
    assert app.bodies == [b""]


def test_keyless_bodies_that_trickle_in_hold_no_place():
    async def crowd():
        app, limits = App(), Limits(max_rows=1, max_queue=0)
        guard = guarded(app, keys=(KEY,), limits=limits)
        strangers = [
            asyncio.create_task(guard(scope_of(path), withheld, Client().send))
            for path in ("/v1/completions", "/health")
            for _ in range(limits.max_requests)
        ]
        for _ in range(10):  # turns of the loop: none of them waits for anything
            await asyncio.sleep(0)

        async def receive():
            return {"type": "http.request", "body": b"{}", "more_body": False}

        client = Client()
        await guard(scope_of("/v1/completions", HAS_KEY), receive, client.send)
        for stranger in strangers:
            stranger.cancel()
        return client.statuses, app.bodies

    statuses, bodies = asyncio.run(crowd())
    assert statuses == [200]
    assert bodies[-1] == b"{}"


def test_at_the_end_the_api_is_closed_and_probes_are_answered():
    app = App()
    guard = guarded(app, keys=(KEY,), is_ending=lambda: True)
    assert asked(guard, "/v1/completions", HAS_KEY) == [503]
    assert asked(guard, "/v1/completions") == [401]  # strangers learn nothing
    assert app.bodies == []
    assert asked(guard, "/ready") == [200]
