"""A corpus whose responses come from endpoints, over real HTTP, whatever these do."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import threading
from collections import Counter

import pytest

from draftsmith.artifacts import digest_directory
from draftsmith.corpus.build import CorpusBuilder
from draftsmith.corpus.dataset import read_split
from draftsmith.corpus.endpoint import Endpoint
from draftsmith.corpus.endpoint_check import EndpointCheck, Probe
from draftsmith.corpus.endpoint_decoder import EndpointDecoder
from draftsmith.corpus.settings import CorpusConfig, SourceConfig
from draftsmith.decoding import Engine, NoProposer, Request, SamplingParams
from draftsmith.errors import CorpusError
from tests.corpus.small_target import small_model
from tests.faulty_endpoint import (
    KEY,
    MODEL,
    FaultyEndpoint,
    answers_of,
    broken_json,
    cut_body,
    hang_up,
    slow,
    status,
)
from tests.tiny_target import conversations

DIGEST = "5" * 64
NUM_QUESTIONS = 16
NUM_PROBES = 2
PAUSE_S = 0.002
TEMPERATURES = (0.0, 0.7)
ROWS = 6


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    rows = conversations("home")[:NUM_QUESTIONS]
    lines = [json.dumps({"prompt": text, "domain": domain}) for domain, text, _ in rows]
    path = tmp_path_factory.mktemp("sources") / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def sound(target, tokenizer):
    """Answers of the target, by a model of its own: the test's thread decodes too."""
    return answers_of(copy.deepcopy(target), tokenizer)


@pytest.fixture
def serve(sound):
    """`serve(complete=, plan=)`: an endpoint that ends with the test."""
    servers = []

    def start(complete=sound, **options):
        servers.append(FaultyEndpoint(complete, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def probes(chat):
    params = SamplingParams(max_new_tokens=8, stop_token_ids=chat.stop_ids)
    made = []
    for place, (_, text, _) in enumerate(conversations("home")[-NUM_PROBES:]):
        ids = chat.tokenizer(f"<|user|>{text}<|end|><|assistant|>").input_ids
        words = chat.tokenizer(text, add_special_tokens=False).input_ids
        made.append(Probe(Request(f"probe-{place}", ids, params), text, words))
    return made


@pytest.fixture
def decoder(target, probes):
    """`decoder(server, ...)`: asks these endpoints."""

    def make(*servers, fits=True, timeout_s=20.0, max_requests=ROWS, patience_s=0.0):
        size = target.get_input_embeddings().num_embeddings
        return EndpointDecoder(
            [Endpoint(one.url, MODEL, size, timeout_s, KEY) for one in servers],
            max_requests=max_requests,
            check=EndpointCheck(probes, (lambda: target) if fits else None),
            first_pause_s=PAUSE_S,
            patience_s=patience_s,
        )

    return make


@pytest.fixture
def build(target, chat, prompts_file, tmp_path):
    """`build(folder name, decoder=None)` -> facts; without a decoder by the engine here."""
    engine = Engine(target, NoProposer(), max_rows=ROWS, draft_length=0)

    def run(name, decoder=None, *, sources=(), temperatures=TEMPERATURES, partial="", **settings):
        config = CorpusConfig(
            sources=(SourceConfig(kind="jsonl", path=str(prompts_file)), *sources),
            eval_fraction=0.4,
            train_temperatures=temperatures,
            train_answers=len(temperatures),
            eval_temperatures=temperatures,
            max_prompt_tokens=200,
            max_new_tokens=6,
            min_eval_prompts=2,
            batch_size=ROWS,
            shard_size=4,
            seed=0,
            backend="local" if decoder is None else "openai",
            endpoints=("http://somewhere/v1",),
            endpoint_model=MODEL,
            **settings,
        )
        folder = tmp_path / f"partial-{partial or name}"
        builder = CorpusBuilder(config, DIGEST, decoder or engine, chat, folder)
        return builder.build(tmp_path / name)

    return run


def rows(folder):
    return read_split(folder, "train") + read_split(folder, "eval")


def asked_for(bodies):
    """Prompts with their temperatures, probes left out, and how often each."""
    wanted = [body for body in bodies if body["max_tokens"] == 6]
    return Counter((tuple(body["prompt"]), body["temperature"]) for body in wanted)


def test_greedy_responses_are_those_of_the_engine_here(build, decoder, serve, tmp_path):
    here = build("here", temperatures=(0.0,))
    there = build("there", decoder(serve()), temperatures=(0.0,))
    assert rows(tmp_path / "there") == rows(tmp_path / "here")
    assert there == here | {"digest": there["digest"], "backend": "openai"}


def test_sampled_responses_differ_in_their_draws_and_end_as_the_target_ends(
    build, decoder, serve, chat, tmp_path
):
    build("here", temperatures=(0.7,))
    build("there", decoder(serve()), temperatures=(0.7,))
    here, there = rows(tmp_path / "here"), rows(tmp_path / "there")
    assert [row.key for row in here] == [row.key for row in there]
    assert [row.response_ids for row in here] != [row.response_ids for row in there]
    for row in there:
        assert row.finished == (row.response_ids[-1] in chat.stop_ids)


def test_the_corpus_is_known_by_the_kind_of_its_backend_and_not_by_the_address(
    build, decoder, serve, tmp_path
):
    local = build("local")
    first = build("first", decoder(serve()))
    second = build("second", decoder(serve(), serve()))
    assert first["digest"] == second["digest"] != local["digest"]
    assert digest_directory(tmp_path / "first") == digest_directory(tmp_path / "second")
    for server_url in ("127.0.0.1", "somewhere"):
        assert not any(server_url in path.read_text("latin-1") for path in files(tmp_path))


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def planned(server):
    """Of the responses every second one fails the first time, each otherwise."""
    faults = [
        status(429, Retry_After="0.01"),
        status(500, KEY),
        status(503),
        broken_json,
        cut_body,
        hang_up,
        slow(1.5),
    ]
    seen = set()

    def plan(number):
        wanted = set(asked_for([server.asked[number - 1]]))
        with server.lock:
            is_new = not wanted <= seen
            seen.update(wanted)
            count = len(seen)
        return faults[count // 2 % len(faults)] if is_new and count % 2 else None

    return plan


def test_faults_of_an_endpoint_cost_time_and_nothing_else(build, decoder, serve, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    build("sound", decoder(serve()))
    server = serve()
    server.plan = planned(server)
    build("faulty", decoder(server, timeout_s=1.0))
    assert digest_directory(tmp_path / "faulty") == digest_directory(tmp_path / "sound")
    answered = asked_for(server.answered)
    assert set(answered) == {(tuple(r.prompt_ids), r.temperature) for r in rows(tmp_path / "sound")}
    retries = len(server.asked) - len(server.answered)
    assert retries >= len(answered) // 2
    (summary,) = [m for m in messages(caplog) if f"endpoint={server.url} answers=" in m]
    assert f" answers={len(rows(tmp_path / 'sound'))} retries=" in summary
    for reason in ("broken_body", "connection", "http_429", "http_500", "http_503", "timeout"):
        assert f"{reason}=" in summary
    kept = "".join(path.read_text("latin-1") for path in files(tmp_path)) + caplog.text
    assert KEY not in kept
    assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in server.headers)


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def test_no_endpoint_has_more_requests_at_once_than_the_bound(build, decoder, serve):
    servers = [serve(), serve()]
    build("corpus", decoder(*servers, max_requests=3))
    assert all(1 <= server.most_running <= 3 for server in servers)


def test_an_endpoint_that_dies_is_left_out_and_the_other_does_its_work(
    build, decoder, serve, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    build("sound", decoder(serve()))
    dying = serve(plan=lambda number: hang_up if number > NUM_PROBES + 5 else None)
    # The healthy one waits until the dying one is given up, or it might do all the work first.
    given_up = threading.Event()

    def patient(number):
        if number > NUM_PROBES:
            given_up.wait(30)

    handler = Watching(f"endpoint={dying.url} state=left_out", given_up)
    logging.getLogger("draftsmith.corpus.dispatch").addHandler(handler)
    try:
        build("survived", decoder(dying, serve(plan=patient)))
    finally:
        logging.getLogger("draftsmith.corpus.dispatch").removeHandler(handler)
    assert given_up.is_set()
    assert digest_directory(tmp_path / "survived") == digest_directory(tmp_path / "sound")


class Watching(logging.Handler):
    """Sets an event when something is logged."""

    def __init__(self, start, event):
        super().__init__()
        self._start, self._event = start, event

    def emit(self, record):
        if record.getMessage().startswith(self._start):
            self._event.set()


def test_when_all_die_the_next_run_asks_elsewhere_for_what_is_missing_alone(
    build, decoder, serve, tmp_path
):
    build("sound", decoder(serve()))
    dying = serve(plan=lambda number: hang_up if number > NUM_PROBES + 11 else None)
    with pytest.raises(CorpusError) as caught:
        build("corpus", decoder(dying), partial="kept")
    assert dying.url in caught.value.found
    assert "rerun" in caught.value.remedy
    assert not (tmp_path / "corpus").exists()
    other = serve()
    build("corpus", decoder(other), partial="kept")
    assert digest_directory(tmp_path / "corpus") == digest_directory(tmp_path / "sound")
    answered = asked_for(dying.answered), asked_for(other.answered)
    assert answered[0].total() == 11
    assert not set(answered[0]) & set(answered[1])
    assert set((answered[0] + answered[1]).values()) == {1}


def test_a_finished_corpus_asks_nobody(build, decoder, serve, tmp_path):
    build("corpus", decoder(serve()), partial="kept")
    nobody = serve()
    nobody.stop()
    build("again", decoder(nobody), partial="kept")
    assert digest_directory(tmp_path / "again") == digest_directory(tmp_path / "corpus")
    assert nobody.asked == []


def test_self_written_prompts_come_from_the_endpoints_too(build, decoder, serve, tmp_path):
    server = serve()
    own = SourceConfig(kind="self", count=16)
    facts = build("corpus", decoder(server), sources=(own,))
    assert facts["prompts"]["train"]["self-written"] >= 1
    written = [body for body in server.answered if body["max_tokens"] > 8]
    assert len(written) == 16
    assert len({tuple(body["prompt"]) for body in written}) == 1
    assert len({body["seed"] for body in written}) == 16


def backwards(tokenizer):
    """Another tokenizer of the same vocabulary."""
    return lambda text, **options: tokenizer(text[::-1], **options)


class TestCheck:
    def refused(self, decoder, *requests):
        with pytest.raises(CorpusError) as caught:
            list(decoder.stream(requests))
        return caught.value

    @pytest.fixture
    def request_(self, probes):
        return dataclasses.replace(probes[0].request, request_id="a")

    def test_an_endpoint_of_another_target_is_named_and_gets_no_work(
        self, decoder, serve, tokenizer, request_
    ):
        other = serve(answers_of(small_model(tokenizer)))
        error = self.refused(decoder(other), request_)
        assert other.url in error.what
        assert "nats a token" in error.found
        assert len(other.asked) == NUM_PROBES

    def test_nor_does_one_that_comes_back_as_another(
        self, build, decoder, serve, tokenizer, tmp_path
    ):
        """Killed and started again with another checkpoint, under the same name."""
        server, other = serve(), answers_of(small_model(tokenizer))

        def killed(number):
            if number != NUM_PROBES + 4:
                return None
            server.complete = other
            return hang_up

        server.plan = killed
        with pytest.raises(CorpusError) as caught:
            build("corpus", decoder(server, max_requests=1), partial="kept")
        assert server.url in caught.value.what
        assert "nats a token" in caught.value.found
        assert asked_for(server.answered).total() == 3
        assert asked_for(server.asked[-NUM_PROBES:]).total() == 0
        build("sound", decoder(serve()))
        build("corpus", decoder(serve()), partial="kept")
        assert digest_directory(tmp_path / "corpus") == digest_directory(tmp_path / "sound")

    def test_where_the_target_does_not_fit_its_tokenizer_and_the_round_trip_of_ids_are_checked(
        self, decoder, serve, tokenizer, request_, caplog
    ):
        model = small_model(tokenizer)
        (event,) = decoder(serve(answers_of(model, tokenizer)), fits=False).stream([request_])
        assert event.token_ids
        assert "probes=not_compared" in caplog.text
        assert "tokenizer=not_compared" not in caplog.text
        server = serve(answers_of(model, backwards(tokenizer)))
        error = self.refused(decoder(server, fits=False), request_)
        assert server.url in error.what
        assert "another tokenizer" in error.found

        def another_prompt(body):
            answer = answers_of(model, tokenizer)(body)
            answer["choices"][0]["prompt_token_ids"] = [0, *body["prompt"]]
            return answer

        server = serve(another_prompt)
        error = self.refused(decoder(server, fits=False), request_)
        assert server.url in error.what
        assert "another prompt" in error.found

    def test_an_endpoint_that_takes_no_text_is_told(self, decoder, serve, sound, request_, caplog):
        def ids_alone(body):
            return (400, "no text") if isinstance(body["prompt"], str) else sound(body)

        server = serve(ids_alone)
        assert len(list(decoder(server, fits=False).stream([request_]))) == 1
        assert f"endpoint={server.url} tokenizer=not_compared" in caplog.text

    def test_a_model_of_another_name_is_refused(self, decoder, serve, request_):
        error = self.refused(decoder(serve(models=("base",))), request_)
        assert "base" in error.found
        assert MODEL in error.expected

    def test_an_endpoint_that_is_away_is_left_out_and_all_away_is_an_error(
        self, decoder, serve, request_
    ):
        away = serve()
        away.stop()
        here = serve()
        (event,) = decoder(away, here).stream([request_])
        assert event.request_id == "a"
        assert away.url in self.refused(decoder(away), request_).found

    def test_it_is_made_once(self, decoder, serve, request_):
        server = serve()
        one = decoder(server)
        requests = [dataclasses.replace(request_, request_id=name) for name in "ab"]
        for request in requests:
            assert len(list(one.stream([request]))) == 1
        assert len(server.asked) == NUM_PROBES + len(requests)


def test_an_endpoint_that_is_away_for_a_while_is_waited_for(build, decoder, serve, tmp_path):
    """It fails more often in a row than an endpoint may that others stand in for."""
    build("sound", decoder(serve()))
    away = range(NUM_PROBES + 4, NUM_PROBES + 4 + 15)
    server = serve(plan=lambda number: hang_up if number in away else None)
    build("corpus", decoder(server, patience_s=60.0))
    assert digest_directory(tmp_path / "corpus") == digest_directory(tmp_path / "sound")


def test_a_request_that_always_fails_is_named_and_the_others_are_kept(
    build, decoder, serve, tmp_path
):
    build("sound", decoder(serve()))
    poison = rows(tmp_path / "sound")[5]

    def sick():
        server = serve()

        def plan(number):
            body = server.asked[number - 1]
            asked = body["prompt"], body["temperature"]
            return status(500) if asked == (poison.prompt_ids, poison.temperature) else None

        server.plan = plan
        return server

    with pytest.raises(CorpusError) as caught:
        build("corpus", decoder(sick(), sick()), partial="kept")
    assert poison.key in caught.value.what
    assert "HTTP 500" in caught.value.found
    assert str(poison.prompt_ids[-1]) in caught.value.found
    assert "finished responses are kept" in caught.value.remedy
    well = serve()
    build("corpus", decoder(well), partial="kept")
    assert set(asked_for(well.asked)) == {(tuple(poison.prompt_ids), poison.temperature)}
    assert digest_directory(tmp_path / "corpus") == digest_directory(tmp_path / "sound")
