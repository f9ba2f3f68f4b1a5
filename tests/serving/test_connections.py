"""Connections that are slow, too many or no HTTP: a clear end, and others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import select
import socket
import threading

import pytest
import requests
import uvicorn

from draftsmith.serving.connections import MOST_WAITING, Connection
from draftsmith.serving.guard import Guard
from draftsmith.serving.settings import Limits
from tests.serving.service import QUESTIONS, chat, open_stream, post, serving, wait_until

BEGIN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
MOST_BYTES = 2000  # of a client that trickles; a server that lets it is found out
READY = b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n"
BURST = 40


@pytest.fixture(scope="module")
def impatient(project):
    with serving(project.root, limits={"max_rows": 2, "client_timeout_s": 1}) as running:
        yield running
        assert post(running, chat(QUESTIONS[0])).status_code == 200


def connected(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def heard(connection):
    """All that the server says until it closes the connection."""
    pieces = []
    try:
        while piece := connection.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def trickled(connection, content):
    """What the server says to a client that sends byte by byte until it says something."""
    for byte in itertools.islice(content, MOST_BYTES):
        if select.select([connection], [], [], 0.03)[0]:
            return heard(connection)
        connection.sendall(bytes([byte]))
    return pytest.fail("the server goes on waiting")


def refused(said, status):
    """The error of a response in OpenAI's shape."""
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), said
    assert b"content-type: application/json" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def test_headers_that_trickle_in_are_not_waited_for(impatient):
    with connected(impatient) as slow:
        assert trickled(slow, BEGIN + b"X-Pad: " + b"a" * MOST_BYTES) == b""


def test_nor_are_those_of_a_second_request(impatient):
    with connected(impatient) as slow:
        slow.sendall(READY)
        said = b""
        while not said.endswith(b"}"):
            said += slow.recv(1000)
        assert said.startswith(b"HTTP/1.1 200 ")
        assert trickled(slow, BEGIN + b"X-Pad: " + b"a" * MOST_BYTES) == b""


@pytest.mark.parametrize(
    ("framing", "content"),
    [
        (b"Content-Length: 100000\r\n\r\n", b"a" * MOST_BYTES),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * MOST_BYTES),
    ],
    ids=["whole", "chunked"],
)
def test_a_body_that_trickles_in_is_refused(impatient, framing, content):
    with connected(impatient) as slow:
        slow.sendall(BEGIN + framing)
        assert "within 1 s" in refused(trickled(slow, content), 408)["message"]


def test_bytes_behind_a_request_do_not_end_its_answer(impatient):
    body = json.dumps(chat(QUESTIONS[0], stream=True, max_tokens=24)).encode()
    length = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connected(impatient) as chatty:
        chatty.sendall(BEGIN + length + body)
        said = chatty.recv(100)
        chatty.sendall(b"\r\n")
        assert b"data: [DONE]" in said + heard(chatty)


@pytest.mark.parametrize(
    "headers",
    [b"X-Pad: " + b"a" * 40_000, b"".join(b"X-%d: a\r\n" % number for number in range(4000))],
    ids=["one", "many"],
)
def test_headers_without_end_are_refused(impatient, headers):
    with connected(impatient) as bomber:
        bomber.sendall(BEGIN + headers)
        refused(heard(bomber), 431)


@pytest.mark.parametrize(
    "content",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        BEGIN + b"X Y: a\r\n\r\n",
        BEGIN + b"Content-Length: few\r\n\r\n{}",
        BEGIN + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        BEGIN + b"Transfer-Encoding: gzip\r\n\r\n{}",
        BEGIN + b"Transfer-Encoding: chunked\r\n\r\nmany\r\n{}",
    ],
    ids=lambda content: repr(content[-24:]),
)
def test_what_is_no_http_is_refused(impatient, content):
    with connected(impatient) as stranger:
        stranger.sendall(content)
        assert "no valid HTTP" in refused(heard(stranger), 400)["message"]


def is_closed(connection):
    """Whether the server has closed it; reads a byte of what was said."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    finally:
        connection.settimeout(60)


def test_a_burst_closes_those_that_have_waited_longest_and_no_others(project):
    with serving(project.root, limits={"client_timeout_s": 600}) as server:
        silent = [connected(server) for _ in range(MOST_WAITING + BURST)]
        try:
            for one in (silent[-1], silent[BURST]):
                one.sendall(READY)
                assert one.recv(12) == b"HTTP/1.1 200"
            wait_until(lambda: all(map(is_closed, silent[:BURST])))
            assert not any(map(is_closed, silent[BURST:]))
        finally:
            for one in silent:
                one.close()


def said_by(connection):
    """A whole answer in JSON, on a connection that goes on."""
    said = b""
    while not said.endswith(b"}"):
        said += connection.recv(1000)
    return said


def test_who_has_no_key_is_told_so_by_the_headers_and_may_go_on(project):
    with serving(project.root, keys=(b"a-key",), limits={"client_timeout_s": 3}) as server:
        with connected(server) as stranger:
            stranger.sendall(BEGIN + b"Content-Length: 200000\r\n\r\n" + b"a" * 10)
            assert refused(said_by(stranger), 401)["code"] == "invalid_api_key"
            stranger.sendall(b"a" * 199_990 + READY)
            assert said_by(stranger).startswith(b"HTTP/1.1 200 ")
        with connected(server) as slow:
            slow.sendall(BEGIN + b"Content-Length: 100000\r\n\r\n")
            refused(said_by(slow), 401)
            assert trickled(slow, b"a" * MOST_BYTES) == b""
        whole = post(server, b"a" * (3 << 20))
        assert whole.status_code == 401
        for request, status in ((BEGIN, 401), (READY.removesuffix(b"\r\n"), 200)):
            with connected(server) as waiting:
                waiting.sendall(request + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
                said = heard(waiting)  # to the end: what would come next is not the body
                assert said.startswith(b"HTTP/1.1 %d " % status)


def test_requests_that_come_together_are_answered_one_after_the_other(project):
    with serving(project.root) as server, connected(server) as client:
        client.sendall(READY * 3)
        said = b""
        while said.count(b"HTTP/1.1 200 ") < 3 and (piece := client.recv(65536)):
            said += piece
        assert said.count(b"HTTP/1.1 200 ") == 3


@contextlib.contextmanager
def answering(app):
    """Uvicorn over our connections, before any app, in a thread."""
    config = uvicorn.Config(app, lifespan="off", http=Connection, ws="none", log_config=None)
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))

    def run():
        asyncio.run(server.serve(sockets=[listening]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield server, listening.getsockname()
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)


def test_a_stream_whose_reader_has_stalled_ends_without_waiting_for_it(caplog):
    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})

    guard = Guard(
        endless,
        limits=Limits(client_timeout_s=0.2),
        keys=(),
        on_refusal=lambda status: None,
        is_ending=lambda: False,
    )
    with answering(guard) as (server, address), socket.create_connection(address, 60) as reader:
        reader.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        assert reader.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: not server.server_state.connections)
    assert "event=slow_client" in caplog.text


def test_a_crowd_is_told_to_come_back_and_probes_are_answered(project):
    limits = {"max_rows": 1, "max_queue": 0}
    with serving(project.root, limits=limits) as server:
        body, most = chat(QUESTIONS[0]), Limits(**limits).max_requests
        crowd = [open_stream(server, body, num_withheld=5) for _ in range(most)]
        try:
            wait_until(lambda: post(server, body).status_code == 503)
            done = post(server, body)
            assert done.status_code == 503
            assert done.headers["Retry-After"] == "1"
            assert done.json()["error"]["code"] == "too_many_requests"
            assert requests.get(f"{server.url}/health", timeout=60).status_code == 200
            assert 'requests_refused_total{status="503"}' in server.state.exposition()
        finally:
            for one in crowd:
                one.close()
        wait_until(lambda: post(server, body).status_code == 200)
