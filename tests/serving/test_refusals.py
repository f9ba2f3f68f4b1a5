"""Whatever is sent, the answer is a clear refusal in OpenAI's shape, and the server lives on."""

from __future__ import annotations

import json
import threading

import openai
import pytest
import requests

from draftsmith.errors import ConfigError, DecodingError
from draftsmith.registry.loading import load_pair
from draftsmith.serving import api
from draftsmith.serving.settings import read_keys
from tests.serving.service import (
    NAME,
    PINNED,
    QUESTIONS,
    chat,
    client_of,
    engine_held,
    is_idle,
    open_stream,
    post,
    serving,
    wait_until,
)

QUESTION = QUESTIONS[0]


def without(name):
    body = chat(QUESTION)
    del body[name]
    return body


def message(**given):
    return chat(QUESTION, messages=[{"role": "user", "content": "hi", **given}])


WRONG = [
    (chat(QUESTION, model="gpt-4"), 404, "model"),
    (chat(QUESTION, model=7), 400, "model"),
    (without("model"), 400, "model"),
    (without("messages"), 400, "messages"),
    (chat(QUESTION, messages=[]), 400, "messages"),
    (chat(QUESTION, messages="hi"), 400, "messages"),
    (message(role="tool"), 400, "messages.0.role"),
    (message(content=None), 400, "messages.0.content"),
    (message(content=[{"type": "image_url"}]), 400, "messages.0.content.0.type"),
    (message(name="bob"), 400, "messages.0.name"),
    (message(Name="bob"), 400, "messages.0.Name"),
    (chat(QUESTION, maxTokens=9), 400, "maxTokens"),
    (chat(QUESTION, temperature="0.7"), 400, "temperature"),
    (chat(QUESTION, temperature=True), 400, "temperature"),
    (chat(QUESTION, temperature=-0.1), 400, "temperature"),
    (chat(QUESTION, temperature=2.1), 400, "temperature"),
    (chat(QUESTION, temperature=1e-9), 400, "temperature"),
    (chat(QUESTION, top_p=0), 400, "top_p"),
    (chat(QUESTION, top_k=-1), 400, "top_k"),
    (chat(QUESTION, top_k=1 << 70), 400, "top_k"),
    (chat(QUESTION, min_p=1), 400, "min_p"),
    (chat(QUESTION, repetition_penalty=0), 400, "repetition_penalty"),
    (chat(QUESTION, presence_penalty=2.5), 400, "presence_penalty"),
    (chat(QUESTION, max_tokens=0), 400, "max_tokens"),
    (chat(QUESTION, max_tokens=1.5), 400, "max_tokens"),
    (chat(QUESTION, max_tokens=257), 400, "messages"),
    (chat(QUESTION, max_completion_tokens=3), 400, "max_tokens"),
    (chat(QUESTION, min_tokens=25), 400, "min_tokens"),
    (chat(QUESTION, n=0), 400, "n"),
    (chat(QUESTION, n=100), 400, "n"),
    (chat(QUESTION, seed=1 << 64), 400, "seed"),
    (chat(QUESTION, stop=""), 400, "stop.0"),
    (chat(QUESTION, stop=["a", 1]), 400, "stop.1"),
    (chat(QUESTION, stop=["a"] * 17), 400, "stop"),
    (chat(QUESTION, bad_words=["a", ""]), 400, "bad_words.1"),
    (chat(QUESTION, bad_words="fox"), 400, "bad_words"),
    (chat(QUESTION, bad_words=["a"] * 129), 400, "bad_words"),
    (chat(QUESTION, logit_bias={"999999": 1}), 400, "logit_bias"),
    (chat(QUESTION, logit_bias={"fox": 1}), 400, "logit_bias"),
    (chat(QUESTION, logit_bias={"1": 101}), 400, "logit_bias"),
    (chat(QUESTION, top_logprobs=3), 400, "top_logprobs"),
    (chat(QUESTION, logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (chat(QUESTION, stream="yes"), 400, "stream"),
    (chat(QUESTION, stream_options={"include_usage": True}), 400, "stream_options"),
    (chat(QUESTION, tools=[{"type": "function"}]), 400, "tools"),
    (chat(QUESTION, response_format={"type": "json_object"}), 400, "response_format.type"),
    (chat(QUESTION, num_beams=2), 400, "num_beams"),
    (["no", "object"], 400, None),
]


def refused(done, status, param):
    assert done.status_code == status, done.text
    error = done.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    return error


@pytest.mark.parametrize(("body", "status", "param"), WRONG, ids=lambda value: str(value)[-40:])
def test_a_wrong_field_is_named(server, body, status, param):
    assert refused(post(server, body), status, param)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        ([0, -1], "prompt"),
        ([9999], "prompt"),
        (7, "prompt"),
    ],
)
def test_a_prompt_that_is_none_is_refused(server, prompt, param):
    done = post(server, {"model": NAME, "prompt": prompt}, "/v1/completions")
    error = refused(done, 400, done.json()["error"]["param"])
    assert error["param"].split(".")[0] == param


@pytest.mark.parametrize("field", [{"echo": True}, {"best_of": 3}, {"suffix": "end"}])
def test_what_completions_cannot_do_is_refused_by_name(server, field):
    done = post(server, {"model": NAME, "prompt": "a", **field}, "/v1/completions")
    refused(done, 400, next(iter(field)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b"[" * 100_000,
        b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_request_is_refused(server, body):
    done = post(server, body)
    assert done.status_code == 400
    assert done.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_refused(server, number):
    body = json.dumps(chat(QUESTION, temperature=0.123)).replace("0.123", number)
    refused(post(server, body.encode()), 400, "temperature")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
def test_another_content_type_is_refused(server, content_type):
    done = post(server, chat(QUESTION), headers={"Content-Type": content_type})
    assert done.status_code == 400


def test_paths_and_methods_that_are_none_are_refused_in_the_same_shape(server):
    for done, status in (
        (requests.get(f"{server.url}/v1/nothing", timeout=9), 404),
        (requests.get(f"{server.url}/v1/chat/completions", timeout=9), 405),
        (requests.get(f"{server.url}/v1/models/other", timeout=9), 404),
    ):
        assert done.status_code == status
        assert done.json()["error"]["message"]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused_and_the_client_reads_it(server, is_chunked):
    huge = json.dumps(chat("a" * (3 << 20))).encode()
    content = (huge[i : i + 65536] for i in range(0, len(huge), 65536)) if is_chunked else huge
    headers = {"Content-Type": "application/json"}
    done = requests.post(
        f"{server.url}/v1/chat/completions", data=content, headers=headers, timeout=60
    )
    refused(done, 413, None)


def test_a_prompt_beyond_the_context_is_refused_before_anything_is_decoded(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**chat("where does the fox go? " * 100))
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"


def test_an_engine_that_fails_is_not_the_callers_fault(server, monkeypatch):
    def broken():
        raise DecodingError("decoding", found="a bug", expected="none", remedy="mend it")

    with monkeypatch.context() as patch:
        patch.setattr(server.state.gateway.served.engine, "step", broken)
        refused(post(server, chat(QUESTION)), 500, None)
    assert post(server, chat(QUESTION)).status_code == 200


def test_what_cannot_be_counted_is_answered(server, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(server.state.gateway.records, "ended", lambda *_, **__: 1 // 0)
        assert post(server, chat(QUESTION)).status_code == 200
    assert "event=not_counted" in caplog.text


def test_after_all_that_the_server_answers(server, client, project):
    assert is_idle(server)
    expected = load_pair(PINNED, root=project.root).generate(QUESTION, max_new_tokens=24).text
    done = client.chat.completions.create(**chat(QUESTION))
    assert done.choices[0].message.content == expected


def test_keys_open_the_api_and_nothing_else_does(project, caplog):
    keys = (b"first-key", b"second-key")
    with serving(project.root, keys=keys) as server:
        for key in ("first-key", "second-key"):
            assert client_of(server, api_key=key).models.list().data[0].id == NAME
        for key in ("wrong", "first-ke", "first-keys"):
            with pytest.raises(openai.AuthenticationError, match="another key"):
                client_of(server, api_key=key).models.list()
        done = requests.get(f"{server.url}/v1/models", timeout=9)
        assert done.status_code == 401
        assert "no key" in done.json()["error"]["message"]
        for path in ("/health", "/ready", "/metrics"):
            assert requests.get(server.url + path, timeout=9).status_code == 200
    assert "first-key" not in caplog.text


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# of the team\n alpha \n\nbeta\n")
    monkeypatch.setenv("DRAFTSMITH_API_KEYS", "gamma, delta")
    assert read_keys(file) == (b"alpha", b"beta")
    assert read_keys(None) == (b"gamma", b"delta")
    file.write_text("# none\n")
    monkeypatch.setenv("DRAFTSMITH_API_KEYS", " , ")
    for bad in (file, tmp_path / "nothing", None):
        with pytest.raises(ConfigError, match="API keys"):
            read_keys(bad)
    monkeypatch.delenv("DRAFTSMITH_API_KEYS")
    assert read_keys(None) == ()


@pytest.fixture(scope="module")
def narrow(project):
    """Room for one sample and one that waits, and little patience with clients."""
    limits = {"max_rows": 1, "max_queue": 1, "request_timeout_s": 1, "client_timeout_s": 1}
    with serving(project.root, limits=limits) as running:
        yield running


def test_more_than_there_is_room_for_is_refused_with_the_time_to_come_back(narrow, monkeypatch):
    with engine_held(narrow), monkeypatch.context() as patch:
        first = open_stream(narrow, chat(QUESTION, n=2, stream=True))
        wait_until(lambda: len(narrow.state.gateway._calls) == 2)
        patch.setattr(api, "encode", lambda *_: 1 // 0)  # nobody reads its prompt
        done = post(narrow, chat(QUESTION))
        assert refused(done, 429, None)["code"] == "rate_limit_exceeded"
        assert 1 <= int(done.headers["Retry-After"]) <= 60
    first.read_all()
    assert post(narrow, chat(QUESTION)).status_code == 200
    refused(post(narrow, chat(QUESTION, n=3)), 400, "n")
    body = {"model": NAME, "prompt": ["a", ""], "n": 2}
    refused(post(narrow, body, "/v1/completions"), 400, "n")
    body = {"model": NAME, "prompt": ["a", "b", "c"]}
    refused(post(narrow, body, "/v1/completions"), 400, "prompt")


def test_a_request_that_takes_too_long_is_given_up(narrow):
    with engine_held(narrow):
        done = post(narrow, chat(QUESTION))
        assert refused(done, 504, None)["code"] == "timeout"
        streamed = post(narrow, chat(QUESTION, stream=True))
        assert '"code":"timeout"' in streamed.text
        assert "[DONE]" not in streamed.text
    wait_until(lambda: is_idle(narrow))
    assert 'requests_refused_total{status="504"} 2' in narrow.state.exposition()


def test_the_time_begins_with_the_request_and_not_with_its_tokens(narrow, monkeypatch):
    answered = threading.Event()

    def slow(*arguments):
        answered.wait(60)
        return encode(*arguments)

    encode = api.encode
    with monkeypatch.context() as patch:
        patch.setattr(api, "encode", slow)
        try:
            assert refused(post(narrow, chat(QUESTION)), 504, None)["code"] == "timeout"
        finally:
            answered.set()
    assert is_idle(narrow)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_while_it_waits_frees_its_place(narrow, stream):
    with engine_held(narrow):
        gone = open_stream(narrow, chat(QUESTION, stream=stream))
        wait_until(lambda: narrow.state.gateway.num_waiting == 1)
        gone.close()
    wait_until(lambda: is_idle(narrow))
    assert post(narrow, chat(QUESTION)).status_code == 200
    assert 'status="499"' not in narrow.state.exposition()


def test_a_client_that_goes_away_in_mid_answer_frees_its_row(server):
    gone = open_stream(server, chat(QUESTION, stream=True, max_tokens=200, min_tokens=200))
    gone.read_some()
    gone.close()
    wait_until(lambda: is_idle(server))


def test_a_client_that_does_not_send_its_body_is_refused(narrow):
    slow = open_stream(narrow, chat(QUESTION), num_withheld=5)
    assert b"408" in slow.read_all().splitlines()[0]
    assert post(narrow, chat(QUESTION)).status_code == 200


def test_a_client_that_reads_nothing_holds_nobody_up(narrow):
    """Its answer goes into buffers; the row is free when the answer ends, not when it is read."""
    slow = open_stream(narrow, chat(QUESTION, stream=True, logprobs=True, top_logprobs=20))
    wait_until(lambda: is_idle(narrow))
    assert post(narrow, chat(QUESTION)).status_code == 200
    slow.close()
