"""The end of a server: what was begun is answered, or its callers are told, in OpenAI's shape."""

from __future__ import annotations

import json
import signal

import pytest
import requests

from tests.serving.service import (
    QUESTIONS,
    chat,
    engine_held,
    health,
    open_stream,
    post,
    serving,
    wait_until,
)


def at_the_deadline(server):
    server.stop()


def by_a_second_signal(server):
    for _ in range(2):
        server._server.handle_exit(signal.SIGTERM, None)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("end", "drain_s"), [(at_the_deadline, 0), (by_a_second_signal, 60)])
def test_who_gets_no_answer_is_told(project, end, drain_s, is_streamed):
    with serving(project.root, drain_s=drain_s) as server:
        gateway = server.state.gateway
        with engine_held(server):
            asked = open_stream(server, chat(QUESTIONS[0], stream=is_streamed))
            wait_until(lambda: gateway._calls)
            end(server)
            wait_until(lambda: gateway.has_given_up)
        head, _, body = asked.read_all().decode().partition("\r\n\r\n")
    status = 200 if is_streamed else 503
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert '"code":"server_ending"' in body
    assert "abort" not in body
    assert "[DONE]" not in body
    if not is_streamed:
        assert json.loads(body)["error"]["type"] == "server_error"


def test_while_it_drains_probes_are_answered_and_nothing_else_is_taken_on(project):
    with serving(project.root, drain_s=60) as server:
        url = f"{server.url}/health"
        with engine_held(server):
            begun = open_stream(server, chat(QUESTIONS[0], stream=True))
            wait_until(lambda: server.state.gateway._calls)
            server.stop()
            wait_until(lambda: server.state.gateway.is_draining)
            found = requests.get(f"{server.url}/ready", timeout=60)
            assert (found.status_code, found.json()) == (503, {"ready": False})
            assert health(server)["waiting"] == 1
            metrics = requests.get(f"{server.url}/metrics", timeout=60).text
            assert "draftsmith_is_draining 1" in metrics
            done = post(server, chat(QUESTIONS[1]))
            assert (done.status_code, done.headers["Connection"]) == (503, "close")
            assert done.json()["error"]["code"] == "server_ending"
        _, _, body = begun.read_all().decode().partition("\r\n\r\n")
        assert "data: [DONE]" in body
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=60)
