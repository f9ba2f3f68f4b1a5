"""Stop strings end an answer exactly, wherever they fall in tokens, rounds and neighbours."""

from __future__ import annotations

import copy
import random

import pytest

from draftsmith.decoding import (
    DraftModelProposer,
    Engine,
    NoProposer,
    Request,
    SamplingParams,
    StopStrings,
)
from draftsmith.decoding.trace import block_efficiency
from draftsmith.errors import DecodingError
from tests.decoding.test_token_text import ids_of, random_ids

PROMPT = [34, 48, 29]  # its greedy continuation keeps changing
NUM_NEW = 24


def spelled(token_text, token_ids: list[int]) -> bytes:
    return b"".join(map(token_text.spelled, token_ids))


def completes(token_text, tokenizer, strings: list[str], *tokens: str):
    stops = StopStrings(strings, token_text)
    token_ids = ids_of(tokenizer, *tokens)
    before = [stops.completed(token_ids[:n]) for n in range(1, len(tokens))]
    assert before == [None] * len(before), "completed too early"
    return stops.completed(token_ids)


@pytest.mark.parametrize(
    ("strings", "tokens", "string", "num_bytes"),
    [
        (["stop"], ["a", "stop"], "stop", 4),
        (["stop"], ["st", "op"], "stop", 4),
        (["top"], ["a", "s", "to", "pped"], "top", 6),  # ends inside `pped`
        (["tab"], ["a", "st", "ab"], "tab", 3),  # begins inside `st`
        (["t"], ["stop"], "t", 3),  # inside one token
        (["e€"], ["th", "eâ", "Ĥ", "¬e"], "e€", 5),  # the character is cut in three
        (["b", "abc", "c"], ["a", "b"], "b", 1),
        (["ab", "b"], ["ab"], "ab", 2),  # both end there: the longer
        (["o", "to"], ["stop"], "to", 3),
        (["p", "to"], ["stop"], "to", 3),  # `to` ends first
        (["d>"], ["a", "<end>"], "d>", 2),  # a special token counts by its name
    ],
)
def test_the_token_that_completes_a_stop_string_is_found(
    token_text, tokenizer, strings, tokens, string, num_bytes
):
    match = completes(token_text, tokenizer, strings, *tokens)
    assert (match.string, match.num_bytes) == (string, num_bytes)


@pytest.mark.parametrize(
    ("string", "tokens"),
    [
        ("stop", ["st", "o", "a", "p"]),
        ("€", ["eâ", "Ĥ"]),  # two of its three bytes
        ("€", ["Ĥ", "¬"]),
        ("\ufffd", ["eâ", "a"]),  # a broken character is no replacement mark
    ],
)
def test_what_only_resembles_a_stop_string_is_not_found(token_text, tokenizer, string, tokens):
    assert completes(token_text, tokenizer, [string], *tokens) is None


def test_it_is_found_at_the_token_where_the_text_first_holds_it(token_text):
    num_found = 0
    for seed in range(300):
        chance, token_ids = random.Random(seed), random_ids(seed, 12)
        text = spelled(token_text, token_ids).decode(errors="ignore")
        start = chance.randrange(len(text) - 4)
        string = text[start : start + chance.randint(1, 4)]
        texts = [spelled(token_text, token_ids[:n]) for n in range(1, 13)]
        holds = [string.encode() in one for one in texts]
        stops = StopStrings([string], token_text)
        found = [stops.completed(token_ids[:n]) for n in range(1, 13)]
        if any(holds):
            place = holds.index(True)
            assert found[:place] == [None] * place
            assert texts[place][-found[place].num_bytes :].startswith(string.encode())
            num_found += 1
        else:
            assert not any(found)
    assert num_found > 250


def test_bytes_are_held_exactly_while_they_begin_a_stop_string(token_text):
    chance = random.Random(0)
    num_held = set()
    for seed in range(300):
        token_ids = random_ids(seed, 12)
        text = spelled(token_text, token_ids)
        ending = text[-chance.randint(1, 3) :].decode(errors="ignore")
        strings = [ending + "zq", "stop"]
        begun = [
            n
            for n in range(1, 8)
            if any(len(s.encode()) > n and s.encode().startswith(text[-n:]) for s in strings)
        ]
        held = StopStrings(strings, token_text).num_held(token_ids)
        assert held == max(begun, default=0)
        num_held.add(held)
    assert {0, 1, 2, 3} <= num_held


# ------------------------------------------------------------------------------ through the engine


@pytest.fixture(scope="module")
def oracle(llama):
    """The target as its own draft: every round is a full accept."""
    return DraftModelProposer(copy.deepcopy(llama.reference))


@pytest.fixture(scope="module")
def greedy(llama, continue_greedily):
    return continue_greedily(llama.reference, PROMPT, NUM_NEW)


@pytest.fixture(scope="module")
def run(llama, oracle, token_text):
    def call(*, draft_length=4, prompt=PROMPT, **params):
        engine = Engine(
            llama.target, oracle, max_rows=2, draft_length=draft_length, token_text=token_text
        )
        values = SamplingParams(**{"max_new_tokens": NUM_NEW, **params})
        return engine.generate([Request("a", list(prompt), values)])[0]

    return call


def strings_inside(token_text, token_ids: list[int]) -> list[str]:
    """Texts of two to five characters from everywhere in an answer."""
    text = token_text.text(token_ids)
    pieces = [text[i : i + 2 + i % 4] for i in range(len(text) - 5)]
    return [piece for piece in pieces if "\ufffd" not in piece]


def num_tokens_with(token_text, token_ids: list[int], string: str) -> int:
    """The shortest start of an answer that holds the string."""
    holds = (string.encode() in spelled(token_text, token_ids[:n]) for n in range(len(token_ids)))
    return next((n for n, found in enumerate(holds) if found), len(token_ids))


@pytest.mark.parametrize("draft_length", [0, 1, 3, 8])
def test_a_stop_string_ends_the_result_wherever_it_stands_in_a_round(
    run, greedy, token_text, draft_length
):
    strings = strings_inside(token_text, greedy)
    assert len(strings) > 15
    ends = set()
    for string in strings:
        result = run(draft_length=draft_length, stop_strings=(string,))
        num_tokens = num_tokens_with(token_text, greedy, string)
        assert result.token_ids == greedy[:num_tokens]
        assert (result.finish_reason, result.stopped_by) == ("stop", string)
        assert sum(result.trace.committed) == num_tokens
        assert block_efficiency([result.trace]) == num_tokens / result.trace.num_rounds
        ends.add(num_tokens % (draft_length + 1))
    assert len(ends) >= min(draft_length + 1, 4), "too few places of a round were met"


def test_the_string_that_ends_first_is_the_one_that_is_reported(run, greedy, token_text):
    early, late = (token_text.text(greedy[n : n + 2]) for n in (3, 12))
    result = run(stop_strings=(late, early))
    assert result.stopped_by == early
    assert run(stop_strings=(late,)).stopped_by == late


def test_an_answer_without_a_stop_string_goes_on_to_its_length(run, greedy):
    result = run(stop_strings=("zqzq",))
    assert result.token_ids == greedy
    assert (result.finish_reason, result.stopped_by) == ("length", None)


def test_a_stop_string_in_the_last_allowed_token_counts_as_stop(run, greedy, token_text):
    string = token_text.text(greedy[:3])
    result = run(stop_strings=(string,), max_new_tokens=3)
    assert (result.finish_reason, result.stopped_by) == ("stop", string)


def test_a_stop_token_says_which_one_it_was(run, greedy):
    result = run(stop_token_ids=(greedy[2], 62))
    assert (result.finish_reason, result.stopped_by) == ("stop", greedy[2])


def test_a_stop_token_that_completes_a_stop_string_counts_as_the_string(run, greedy, token_text):
    string = token_text.text(greedy[:3])[-1]
    place = num_tokens_with(token_text, greedy, string)
    result = run(stop_token_ids=(greedy[place - 1],), stop_strings=(string,))
    assert result.stopped_by == string


@pytest.mark.parametrize("draft_length", [0, 4])
def test_a_stop_string_before_the_minimum_is_text_like_any_other(
    run, greedy, token_text, draft_length
):
    string = token_text.text(greedy[1:3])
    end = num_tokens_with(token_text, greedy, string)
    for least in range(end + 1):
        result = run(draft_length=draft_length, stop_strings=(string,), min_new_tokens=least)
        assert result.token_ids == greedy[:end]
    result = run(draft_length=draft_length, stop_strings=(string,), min_new_tokens=end + 1)
    assert len(result.token_ids) > end


def test_the_prompt_completes_nothing_not_even_half(run, greedy, token_text):
    whole = token_text.text(PROMPT)
    result = run(stop_strings=(whole, whole[-1] + token_text.text(greedy[:1])[:1]))
    assert result.token_ids[:2] == greedy[:2]


def test_a_stopped_row_leaves_its_neighbours_alone(
    llama, oracle, token_text, ragged_prompts, continue_greedily
):
    answers = [continue_greedily(llama.reference, prompt, NUM_NEW) for prompt in ragged_prompts]
    strings = [token_text.text(answer[5:8])[1:3] for answer in answers]
    requests = [
        Request(str(i), p, SamplingParams(max_new_tokens=NUM_NEW, stop_strings=(s,) * (i % 2)))
        for i, (p, s) in enumerate(zip(ragged_prompts, strings, strict=True))
    ]
    engine = Engine(llama.target, oracle, max_rows=3, draft_length=4, token_text=token_text)
    for index, result in enumerate(engine.generate(requests)):
        end = num_tokens_with(token_text, answers[index], strings[index])
        assert result.token_ids == (answers[index][:end] if index % 2 else answers[index])


def test_a_stop_string_across_a_preemption_is_found(llama, oracle, greedy, token_text):
    engine = Engine(llama.target, oracle, max_rows=2, draft_length=1, token_text=token_text)
    engine.open(64)
    string = token_text.text(greedy[2:8])
    params = SamplingParams(max_new_tokens=NUM_NEW, stop_strings=(string,))
    engine.submit([Request("a", PROMPT, params)])
    results = []
    while engine.is_busy:
        results += [event.result for event in engine.step() if event.result is not None]
        if engine.is_busy:
            engine.preempt("a")
    assert results[0].token_ids == greedy[: num_tokens_with(token_text, greedy, string)]
    assert results[0].stopped_by == string


def test_an_engine_that_knows_no_spelling_refuses_stop_strings_before_it_starts(llama):
    engine = Engine(llama.target, NoProposer(), max_rows=1, draft_length=0)
    params = SamplingParams(max_new_tokens=2, stop_strings=("a",))
    with pytest.raises(DecodingError, match="request a: found stop_strings.*token_text"):
        engine.generate([Request("a", [1], params)])
