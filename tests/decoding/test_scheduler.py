"""Requests that arrive, are taken out and are put back decode to what they would alone."""

from __future__ import annotations

import random

import pytest

from draftsmith.decoding import DraftModelProposer, Engine, Request, SamplingParams
from draftsmith.errors import DecodingError

CONTEXT = 64


def random_requests(count: int, seed: int = 0) -> list[Request]:
    chance = random.Random(seed)
    requests = []
    for index in range(count):
        params = SamplingParams(
            max_new_tokens=chance.randint(1, 24),
            temperature=chance.choice([0.0, 0.0, 0.7, 1.2]),
            top_k=chance.choice([0, 0, 5]),
            top_p=chance.choice([1.0, 1.0, 0.9]),
            min_p=chance.choice([0.0, 0.0, 0.05]),
            repetition_penalty=chance.choice([1.0, 1.0, 1.3]),
            presence_penalty=chance.choice([0.0, 0.0, 0.6]),
            seed=chance.randint(0, 3),
            stop_token_ids=tuple(chance.sample(range(64), 2)),
        )
        prompt = [chance.randrange(64) for _ in range(chance.randint(1, 30))]
        requests.append(Request(f"r{index}", prompt, params))
    return requests


@pytest.fixture
def engine(llama):
    made = Engine(llama.target, DraftModelProposer(llama.draft), max_rows=4, draft_length=3)
    made.open(CONTEXT)
    return made


def run_alone(engine, requests):
    return {request.request_id: engine.generate([request])[0].token_ids for request in requests}


def test_arrivals_aborts_and_preemptions_change_no_other_answer(engine):
    requests = random_requests(200)
    alone = run_alone(engine, requests)
    chance = random.Random(1)
    engine.open(CONTEXT)
    arriving, results, aborted = list(requests), {}, {}
    while arriving or engine.is_busy:
        if arriving and chance.random() < 0.7:
            number = chance.randint(1, 3)
            engine.submit(arriving[:number])
            del arriving[:number]
        for event in engine.step():
            if event.result is not None:
                results[event.request_id] = event.result.token_ids
        flying = [row.request.request_id for row in engine._batch.rows]
        if flying and chance.random() < 0.15:
            engine.preempt(chance.choice(flying))
        elif flying and chance.random() < 0.05:
            taken = chance.choice(flying)
            aborted[taken] = engine.abort(taken).token_ids
    assert len(aborted) > 5
    assert results == {name: alone[name] for name in alone if name not in aborted}
    assert all(alone[name][: len(tokens)] == tokens for name, tokens in aborted.items())


def test_an_aborted_request_frees_its_row_for_the_next_in_line(engine):
    long, waiting = random_requests(2)
    params = SamplingParams(max_new_tokens=30)
    engine.submit([Request(f"long{i}", long.prompt_ids, params) for i in range(4)])
    engine.submit([waiting])
    engine.step()
    assert engine.abort("long2").finish_reason == "abort"
    assert waiting.request_id in {event.request_id for event in engine.step()}


def test_a_request_can_be_aborted_before_it_was_admitted(engine):
    first, second = random_requests(2)
    engine.submit([first, second])
    assert engine.abort(second.request_id).token_ids == []
    while engine.is_busy:
        assert {event.request_id for event in engine.step()} == {first.request_id}


def test_an_id_may_be_used_again_once_its_request_has_ended(engine):
    (request,) = random_requests(1)
    answers = []
    for _ in range(2):
        engine.submit([request])
        with pytest.raises(DecodingError, match="an id that another request has"):
            engine.submit([request])
        while engine.is_busy:
            answers += [e.result.token_ids for e in engine.step() if e.result is not None]
    assert answers[0] == answers[1]


def test_an_idle_engine_steps_without_events(engine):
    assert (engine.step(), engine.is_busy) == ([], False)


def test_a_request_beyond_the_reserved_context_is_refused_and_nothing_waits(engine):
    fits, _ = random_requests(2)
    too_long = Request("long", [1] * CONTEXT, SamplingParams(max_new_tokens=1))
    with pytest.raises(DecodingError, match=f"1 to {CONTEXT} tokens"):
        engine.submit([fits, too_long])
    assert not engine.is_busy


def test_taking_out_an_unknown_request_names_those_that_are_held(engine):
    with pytest.raises(DecodingError, match="found no request"):
        engine.abort("x")
    engine.submit(random_requests(1))
    with pytest.raises(DecodingError, match="found requests r0"):
        engine.preempt("x")
