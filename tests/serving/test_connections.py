"""Connections that are slow, too many or no HTTP: a clear end, and others are answered."""

from __future__ import annotations

import itertools
import json
import select
import socket

import pytest
import requests

from draftsmith.serving.connections import MOST_WAITING
from draftsmith.serving.settings import Limits
from tests.serving.service import QUESTIONS, chat, open_stream, post, serving, wait_until

BEGIN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
MOST_BYTES = 2000  # of a client that trickles; a server that lets it is found out


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
        slow.sendall(b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n")
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


def test_who_has_waited_longest_makes_room(project):
    with serving(project.root, limits={"client_timeout_s": 600}) as server:
        silent = [connected(server) for _ in range(MOST_WAITING + 1)]
        try:
            assert silent[0].recv(1) == b""
            for one in (silent[1], silent[-1]):
                one.sendall(b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n")
                assert one.recv(12) == b"HTTP/1.1 200"
        finally:
            for one in silent:
                one.close()


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
