"""Requests that arrive, are taken out and are put back decode to what they would alone."""

from __future__ import annotations

import itertools
import random

import pytest

from draftsmith.decoding import Engine, Event, Request, SamplingParams
from draftsmith.errors import DecodingError
from tests.decoding.arrivals import (
    CONTEXT,
    LONGEST_PROMPT,
    Day,
    live_through,
    random_requests,
)
from tests.decoding.laws import build_proposer


def engine_of(models, kind: str = "draft", *, rows: int = 4, draft_length: int = 3) -> Engine:
    proposer = build_proposer(kind, models)
    return Engine(models.target, proposer, max_rows=rows, draft_length=draft_length)


@pytest.fixture
def engine(llama):
    made = engine_of(llama)
    made.open(CONTEXT)
    return made


def run_alone(engine, requests):
    return {request.request_id: engine.generate([request])[0].token_ids for request in requests}


def assert_equal_to_alone(day: Day, alone: dict[str, list[int]]) -> None:
    assert day.answers == {name: alone[name] for name in alone if name not in day.aborted}
    for name, tokens in day.aborted.items():
        assert alone[name][: len(tokens)] == tokens


# ------------------------------------------------------------------- neighbours, arrivals, chunks


@pytest.mark.parametrize(
    ("kind", "draft_length", "rows", "chunk"),
    [("draft", 3, 4, 7), ("lookup", 5, 3, 16)],
)
def test_two_hundred_random_requests_decode_as_each_would_alone(
    llama, kind, draft_length, rows, chunk
):
    engine = engine_of(llama, kind, rows=rows, draft_length=draft_length)
    requests = random_requests(200)
    alone = run_alone(engine, requests)
    engine.open(CONTEXT, prefill_chunk=chunk)
    day = live_through(engine, requests, random.Random(1))
    assert len(day.aborted) > 10
    assert day.num_preempted > 30
    assert_equal_to_alone(day, alone)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["draft", "lookup", "lookup_first", "none"])
def test_whatever_the_engines_parameters_requests_decode_as_each_would_alone(llama, kind, seed):
    chance = random.Random(seed)
    engine = engine_of(llama, kind, rows=chance.randint(1, 9), draft_length=chance.randint(0, 6))
    requests = random_requests(12, seed=100 + seed)
    alone = run_alone(engine, requests)
    engine.open(CONTEXT, prefill_chunk=chance.choice([1, 2, 3, 5, 11, 20, 39, None]))
    day = live_through(engine, requests, chance, preempt=0.3)
    assert_equal_to_alone(day, alone)


@pytest.mark.parametrize("kind", ["gemma3", "gpt2", "mistral"])
def test_chunks_change_nothing_in_other_families(family, kind):
    engine = engine_of(family(kind))
    requests = random_requests(15, seed=5)
    alone = run_alone(engine, requests)
    engine.open(CONTEXT, prefill_chunk=6)
    assert_equal_to_alone(live_through(engine, requests, random.Random(2)), alone)


# ------------------------------------------------------------------------------- reading in pieces

CHUNK = 8


def plain(name: str, length: int, num_new: int = 6) -> Request:
    prompt = [(5 * place + 3) % 60 for place in range(length)]
    return Request(name, prompt, SamplingParams(max_new_tokens=num_new))


@pytest.fixture
def chunked(llama):
    made = engine_of(llama)
    made.open(CONTEXT, prefill_chunk=CHUNK)
    return made


def names(events: list[Event]) -> set[str]:
    return {event.request_id for event in events}


@pytest.fixture
def widths(llama):
    """`[rows, width]` of every forward of the target."""
    found = []
    hook = llama.target.register_forward_pre_hook(
        lambda _module, _args, keywords: found.append(tuple(keywords["input_ids"].shape)),
        with_kwargs=True,
    )
    yield found
    hook.remove()


def test_rows_in_flight_decode_between_the_pieces_of_a_long_prompt(chunked, widths):
    chunked.submit([plain("short", 3, num_new=24)])
    chunked.step()
    chunked.submit([plain("long", 4 * CHUNK)])  # 31 tokens are read: pieces of 8, 8, 8 and 7
    widths.clear()
    seen = [names(chunked.step()) for _ in range(4)]
    assert seen == [{"short"}] * 3 + [{"short", "long"}]
    assert widths == [(1, 8), (1, 4), (1, 8), (1, 4), (1, 8), (1, 4), (1, 7), (2, 4)]


@pytest.mark.parametrize("length", range(2 * CHUNK - 1, 2 * CHUNK + 4))
def test_a_prompt_is_read_in_as_many_pieces_as_it_takes(chunked, widths, length):
    chunked.submit([plain("long", length)])
    num_steps = next(step for step in itertools.count(1) if chunked.step())
    assert num_steps == -(-(length - 1) // CHUNK)
    pieces = [width for rows, width in widths][:num_steps]
    assert sum(pieces) == length - 1
    assert max(pieces) <= CHUNK


def test_shorter_prompts_pass_a_long_one_that_is_being_read(chunked):
    chunked.submit([plain("long", LONGEST_PROMPT), plain("short", 5)])
    assert names(chunked.step()) == {"short"}
    chunked.submit([plain("later", 3)])
    assert names(chunked.step()) == {"short", "later"}


def test_one_long_prompt_is_read_at_a_time_in_order_of_arrival(chunked):
    chunked.submit([plain(name, 3 * CHUNK) for name in "abc"])
    first = []
    while chunked.is_busy:
        first += [name for name in sorted(names(chunked.step())) if name not in first]
    assert first == ["a", "b", "c"]


def test_a_long_prompt_holds_a_row_while_it_is_read(chunked):
    chunked.submit([plain("long", LONGEST_PROMPT)])
    chunked.submit([plain(f"short{index}", 2, num_new=20) for index in range(4)])
    assert names(chunked.step()) == {"short0", "short1", "short2"}  # of four rows


def test_short_prompts_are_read_together_as_far_as_a_chunk_goes(chunked, widths):
    lengths = {"a": 3, "b": 5, "c": 4, "d": 2}  # 2, 4, 3 and 1 tokens are read, padded to 4
    chunked.submit([plain(name, length) for name, length in lengths.items()])
    assert names(chunked.step()) == {"a", "b"}
    assert names(chunked.step()) == {"a", "b", "c", "d"}
    assert widths == [(2, 4), (2, 4), (2, 3), (4, 4)]  # a prefill and a verification each


def test_without_a_chunk_all_prompts_are_read_in_one_forward(llama, widths):
    engine = engine_of(llama)
    engine.open(CONTEXT, prefill_chunk=None)
    engine.submit([plain(name, length) for name, length in zip("abcd", (3, 40, 9, 1), strict=True)])
    assert names(engine.step()) == set("abcd")
    assert widths[0] == (4, 39)


def test_requests_that_are_given_all_at_once_are_read_in_one_forward(llama, widths):
    next(engine_of(llama).stream([plain("a", 3), plain("b", 40), plain("c", 9)]))
    assert widths[0] == (3, 39)


def test_a_single_row_reads_a_long_prompt_in_place(llama):
    engine = engine_of(llama, rows=1)
    requests = [plain("long", LONGEST_PROMPT), plain("short", 3)]
    alone = run_alone(engine, requests)
    engine.open(CONTEXT, prefill_chunk=CHUNK)
    assert live_through(engine, requests, random.Random(0), abort=0).answers == alone


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
@pytest.mark.parametrize("leave", ["abort", "preempt"])
def test_a_row_may_leave_while_its_prompt_is_read(llama, num_steps, leave):
    engine = engine_of(llama)
    requests = [plain("long", 39), plain("other", 5, num_new=20), plain("next", 39)]
    alone = run_alone(engine, requests)
    engine.open(CONTEXT, prefill_chunk=CHUNK)
    engine.submit(requests)
    for _ in range(num_steps):
        assert names(engine.step()) == {"other"}
    if leave == "abort":
        assert engine.abort("long").token_ids == []
        del alone["long"]
    else:
        engine.preempt("long")
    answers = {}
    while engine.is_busy:
        answers |= {e.request_id: e.result.token_ids for e in engine.step() if e.result}
    assert answers == alone


def test_a_preempted_row_with_a_long_answer_is_read_in_pieces_again(llama, widths):
    engine = engine_of(llama, "none", draft_length=0)
    request = plain("a", 3, num_new=24)
    (alone,) = run_alone(engine, [request]).values()
    engine.open(CONTEXT, prefill_chunk=CHUNK)
    engine.submit([request])
    committed = [token for _ in range(20) for event in engine.step() for token in event.token_ids]
    engine.preempt("a")
    widths.clear()
    assert [engine.step(), engine.step()] == [[], []]  # 22 tokens in pieces of 8, 8 and 6
    assert widths == [(1, 8), (1, 8)]
    (event,) = engine.step()
    assert [*committed, *event.token_ids] == alone[:21]


@pytest.mark.parametrize(("name", "value"), [("prefill_chunk", 0), ("max_context", 1)])
def test_parameters_of_open_out_of_range_are_refused_by_name(llama, name, value):
    with pytest.raises(DecodingError, match=f"engine parameter {name}: found {value}"):
        engine_of(llama).open(**{"max_context": 9, name: value})


# ------------------------------------------------------------------------------- who enters when


def test_an_aborted_request_frees_its_row_for_the_next_in_line(engine):
    long, waiting = random_requests(2)
    params = SamplingParams(max_new_tokens=24)
    engine.submit([Request(f"long{i}", long.prompt_ids, params) for i in range(4)])
    engine.submit([waiting])
    engine.step()
    assert engine.abort("long2").finish_reason == "abort"
    assert waiting.request_id in names(engine.step())


def test_a_request_can_be_aborted_before_it_was_admitted(engine):
    first, second = random_requests(2)
    engine.submit([first, second])
    assert engine.abort(second.request_id).token_ids == []
    while engine.is_busy:
        assert names(engine.step()) == {first.request_id}


def full_engine(llama, **options):
    """32 rows in flight, and five requests that wait."""
    engine = engine_of(llama, "none", rows=32, draft_length=0)
    engine.open(CONTEXT, **options)
    engine.submit([plain(f"first{index}", 2, num_new=24) for index in range(32)])
    engine.step()
    engine.submit([plain(f"next{index}", 2, num_new=24) for index in range(5)])
    return engine


def test_a_row_of_a_service_is_free_for_whoever_waits(llama):
    engine = full_engine(llama)
    for index in range(5):
        engine.abort(f"first{index}")
        assert f"next{index}" in names(engine.step())


def test_few_free_rows_are_kept_for_a_common_prefill_only_while_more_wait(llama):
    engine = full_engine(llama, prefill_chunk=None)  # an eighth is 4
    for index in range(3):
        engine.abort(f"first{index}")
        assert not any(name.startswith("next") for name in names(engine.step()))
    engine.abort("next0")
    engine.abort("next1")
    assert names(engine.step()) >= {"next2", "next3", "next4"}  # as many as there is room for


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


def test_the_id_of_a_prompt_that_is_being_read_is_taken(chunked):
    chunked.submit([plain("long", LONGEST_PROMPT)])
    assert chunked.step() == []
    assert chunked.is_busy
    with pytest.raises(DecodingError, match="an id that another request has"):
        chunked.submit([plain("long", 2)])


def test_an_idle_engine_steps_without_events(engine):
    assert (engine.step(), engine.is_busy) == ([], False)


def test_every_row_in_flight_has_one_event_a_step_and_its_last_carries_the_result(engine):
    engine.submit(random_requests(20))
    ended = []
    while engine.is_busy:
        events = engine.step()
        assert len(events) == len(names(events)) <= 4
        assert not names(events) & set(ended)
        ended += [event.request_id for event in events if event.result is not None]
    assert sorted(ended) == sorted(request.request_id for request in random_requests(20))


def test_a_request_beyond_the_reserved_context_is_refused_and_nothing_waits(engine):
    fits, _ = random_requests(2)
    too_long = Request("long", [1] * CONTEXT, SamplingParams(max_new_tokens=1))
    with pytest.raises(DecodingError, match=f"1 to {CONTEXT} tokens"):
        engine.submit([fits, too_long])
    assert not engine.is_busy


def test_an_engine_that_was_not_opened_takes_no_request(llama):
    with pytest.raises(DecodingError, match=r"request a: .* call open\(max_context\) first"):
        engine_of(llama).submit([plain("a", 3)])


def test_taking_out_an_unknown_request_names_those_that_are_held(engine):
    with pytest.raises(DecodingError, match="found no request"):
        engine.abort("x")
    engine.submit(random_requests(1))
    with pytest.raises(DecodingError, match="found requests r0"):
        engine.preempt("x")


# -------------------------------------------------------------------------------- failing forwards


def test_a_prefill_that_fails_loses_no_request(chunked, llama, monkeypatch):
    requests = [plain("long", LONGEST_PROMPT), plain("short", 4)]
    alone = run_alone(engine_of(llama), requests)
    chunked.submit(requests)
    with monkeypatch.context() as patch:
        patch.setattr(chunked._target, "forward", _out_of_memory)
        for _ in range(2):
            with pytest.raises(MemoryError):
                chunked.step()
    answers = {}
    while chunked.is_busy:
        answers |= {e.request_id: e.result.token_ids for e in chunked.step() if e.result}
    assert answers == alone


def _out_of_memory(*_args, **_keywords):
    raise MemoryError
