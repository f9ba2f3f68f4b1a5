"""One endpoint over real HTTP: what it is asked, and which answers are taken."""

from __future__ import annotations

import email.utils
import time

import pytest

from draftsmith.corpus.endpoint import Endpoint
from draftsmith.corpus.lanes import TransientFault
from draftsmith.decoding import Request, SamplingParams
from draftsmith.errors import CorpusError
from tests.faulty_endpoint import (
    KEY,
    MODEL,
    FaultyEndpoint,
    broken_json,
    cut_body,
    hang_up,
    slow,
    status,
    trickle,
)

VOCAB_SIZE = 50
STOP, OTHER_STOP = 1, 7
PROMPT = [3, 4, 5]
PARAMS = SamplingParams(
    max_new_tokens=4, temperature=0.7, seed=3, stop_token_ids=(STOP, OTHER_STOP)
)
REQUEST = Request("first@0.7", PROMPT, PARAMS)


def choice(ids=(8, 9, 10, 11), reason="length", **given):
    return {"index": 0, "finish_reason": reason, "token_ids": list(ids)} | {
        "prompt_token_ids": PROMPT,
        **given,
    }


def answering(*choices):
    return lambda _body: {"choices": list(choices)}


@pytest.fixture
def ask():
    """`ask(complete, plan=, request=, key=)` -> what the endpoint gives, and the server."""

    def run(complete=None, *, request=REQUEST, key="", timeout_s=5.0, **options):
        with FaultyEndpoint(complete or answering(choice()), **options) as server:
            endpoint = Endpoint(server.url, MODEL, VOCAB_SIZE, timeout_s, key)
            return endpoint.complete(request), server

    return run


def test_the_exact_ids_and_the_whole_law_are_asked_for(ask):
    _, server = ask()
    (body,) = server.asked
    seed = body.pop("seed")
    assert 0 <= seed < 1 << 31
    assert body == {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 4,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "stop_token_ids": [STOP, OTHER_STOP],
        "return_token_ids": True,
    }


def test_a_seed_is_of_the_request_and_the_corpus(ask):
    def seed_of(name, seed):
        params = SamplingParams(max_new_tokens=4, temperature=0.7, seed=seed, stop_token_ids=(1,))
        return ask(request=Request(name, PROMPT, params))[1].asked[0]["seed"]

    seeds = [seed_of("a", 0), seed_of("b", 0), seed_of("a", 1)]
    assert len(set(seeds)) == 3
    assert seed_of("a", 0) == seeds[0]


@pytest.mark.parametrize(
    ("ids", "reason", "finish"),
    [
        ((8, 9, 10, 11), "length", "length"),
        ((8, STOP), "stop", "stop"),
        ((OTHER_STOP,), "stop", "stop"),
        ((8, 9, 10, STOP), "stop", "stop"),
        ((8, 9, 10, STOP), "length", "stop"),  # engines differ in what they look at first
    ],
)
def test_an_answer_is_its_ids_and_how_it_ended(ask, ids, reason, finish):
    event, _ = ask(answering(choice(ids, reason)))
    assert event.request_id == event.result.request_id == REQUEST.request_id
    assert event.token_ids == event.result.token_ids == list(ids)
    assert event.result.finish_reason == finish


@pytest.mark.parametrize(
    ("fault", "reason", "kind"),
    [
        (status(429), "http_429", "busy"),
        (status(500), "http_500", "failed"),
        (status(502, "<html>bad gateway</html>"), "http_502", "away"),
        (status(503), "http_503", "away"),
        (status(408), "http_408", "busy"),
        (broken_json, "broken_body", "failed"),
        (status(200, "[1]"), "broken_body", "failed"),
        (status(200, ""), "broken_body", "failed"),
        (cut_body, "connection", "away"),
        (hang_up, "connection", "away"),
        (slow(3.0), "timeout", "away"),
        (trickle(0.1), "timeout", "away"),
        (trickle(0.1, b"HTTP/1.1 200 OK\r\nX-Slow: "), "timeout", "away"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_may_pass_is_worth_another_try(ask, fault, reason, kind):
    with pytest.raises(TransientFault) as caught:
        ask(plan=lambda _number: fault, timeout_s=0.5 if reason == "timeout" else 20.0)
    assert (caught.value.reason, caught.value.kind) == (reason, kind)
    assert caught.value.wait_s == 0
    assert caught.value.found


def test_nobody_there_is_worth_another_try():
    server = FaultyEndpoint(answering(choice()))
    server.stop()
    with pytest.raises(TransientFault) as caught:
        Endpoint(server.url, MODEL, VOCAB_SIZE, 1.0).complete(REQUEST)
    assert (caught.value.reason, caught.value.kind) == ("connection", "away")


def test_an_answer_that_the_server_gave_up_is_worth_another_try(ask):
    with pytest.raises(TransientFault, match="abort"):
        ask(answering(choice((8,), "abort")))


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("7", 7, 7),
        ("0.25", 0.25, 0.25),
        ("-3", 0, 0),
        ("soon", 0, 0),
        ("nan", 0, 0),
        ("inf", 86400, 86400),
        (lambda: email.utils.formatdate(time.time() + 3600, usegmt=True), 3000, 3600),
        (lambda: email.utils.formatdate(time.time() - 3600, usegmt=True), 0, 0),
    ],
)
def test_an_endpoint_says_how_long_it_wants_to_be_left_alone(ask, text, least, most):
    asked = text() if callable(text) else text
    with pytest.raises(TransientFault) as caught:
        ask(plan=lambda _number: status(429, Retry_After=asked))
    assert least <= caught.value.wait_s <= most


def refused(ask, *arguments, **options):
    """The error, which names the endpoint and says what to do."""
    with pytest.raises(CorpusError) as caught:
        ask(*arguments, **options)
    assert "http://127.0.0.1:" in caught.value.what
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    "given",
    [
        {"token_ids": None},
        {"prompt_token_ids": None},
        {"token_ids": []},
        {"token_ids": [8, 9, VOCAB_SIZE, 10]},
        {"token_ids": [8, 9, -1, 10]},
        {"token_ids": [8, 9, True, 10]},
        {"token_ids": ["8", "9", "10", "11"]},
        {"token_ids": "8 9 10 11"},
    ],
)
def test_an_answer_without_exact_ids_is_refused_and_its_text_never_tokenised(ask, given):
    error = refused(ask, answering(choice(text="some words", **given)))
    assert "no exact token ids" in error.found
    assert "tokenised again" in error.expected
    assert "vLLM" in error.remedy


@pytest.mark.parametrize(("returned", "place"), [([3, 4, 6], 2), ([2, 3, 4, 5], 0), ([3, 4], 2)])
def test_an_answer_to_another_prompt_is_refused(ask, returned, place):
    error = refused(ask, answering(choice(prompt_token_ids=returned)))
    assert f"position {place}" in error.found


@pytest.mark.parametrize(
    ("ids", "reason", "found"),
    [
        ((8, STOP, 9, 10), "length", "behind the stop id 1"),
        ((8, 9, 10, 11, 12), "length", "5 tokens"),
        ((8, 9), "length", "cut after 2"),
        ((8, 9), "stop", "stopped behind the id 9"),
    ],
)
def test_an_answer_by_another_law_is_refused(ask, ids, reason, found):
    error = refused(ask, answering(choice(ids, reason)))
    assert found in error.found
    assert "4 tokens" in error.expected


@pytest.mark.parametrize("choices", [[], [choice(), choice()], ["text"]])
def test_an_answer_with_other_than_one_choice_is_refused(ask, choices):
    assert "choices" in refused(ask, answering(*choices)).found


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (400, "what the endpoint says"),
        (401, "DRAFTSMITH_ENDPOINT_KEY"),
        (403, "DRAFTSMITH_ENDPOINT_KEY"),
        (404, "corpus.endpoints"),
        (307, "what the endpoint says"),
    ],
)
def test_a_refusal_is_told_with_what_to_do_and_without_the_key(ask, code, remedy):
    said = f"no:\n you sent {KEY}, {KEY[:2]}"
    error = refused(ask, plan=lambda _number: status(code, said, Location="/v1"), key=KEY)
    assert error.found == f"HTTP {code} no: you sent [key], {KEY[:2]}"
    assert remedy in error.remedy
    assert KEY not in str(error)


def test_the_key_goes_with_every_request_and_is_in_no_text_of_the_endpoint(ask):
    _, server = ask(key=KEY)
    assert [headers["Authorization"] for headers in server.headers] == [f"Bearer {KEY}"]
    assert KEY not in repr(Endpoint("http://a/v1", MODEL, 2, 1.0, KEY))


def test_without_a_key_none_is_sent_whatever_netrc_holds(ask, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    _, server = ask()
    assert [headers.get("Authorization") for headers in server.headers] == [None]


def test_a_model_that_is_not_listed_is_refused_with_those_that_are():
    with FaultyEndpoint(answering(), models=("other", "base")) as server:
        with pytest.raises(CorpusError) as caught:
            Endpoint(server.url, MODEL, VOCAB_SIZE, 5.0).require_model()
        assert "base, other" in caught.value.found
        assert MODEL in caught.value.expected
        assert server.url in caught.value.what
        Endpoint(server.url, "base", VOCAB_SIZE, 5.0).require_model()


class TestText:
    @pytest.fixture
    def read(self):
        """`read(complete, plan=)` -> how the endpoint reads a text, and the server."""

        def run(complete=None, **options):
            with FaultyEndpoint(complete or answering(choice()), **options) as server:
                endpoint = Endpoint(server.url, MODEL, VOCAB_SIZE, 5.0, KEY)
                return endpoint.ids_of("some words"), server

        return run

    def test_it_is_asked_for_without_anything_added_and_its_ids_are_given(self, read):
        ids, server = read()
        assert ids == PROMPT
        assert server.asked == [
            {
                "model": MODEL,
                "prompt": "some words",
                "add_special_tokens": False,
                "max_tokens": 1,
                "temperature": 0.0,
                "return_token_ids": True,
            }
        ]

    def test_an_endpoint_that_does_not_take_it_says_nothing(self, read):
        assert read(plan=lambda _number: status(400, "unknown field"))[0] is None

    def test_nor_does_one_that_shows_no_ids(self, read):
        assert read(answering(choice(prompt_token_ids=None)))[0] is None

    def test_one_that_is_away_is_asked_another_time(self, read):
        with pytest.raises(TransientFault):
            read(plan=lambda _number: status(503))
