"""The end of a server: whoever gets no answer is told so, in OpenAI's shape."""

from __future__ import annotations

import json
import signal

import pytest

from tests.serving.service import QUESTIONS, chat, engine_held, open_stream, serving, wait_until


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
