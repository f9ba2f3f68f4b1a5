"""One sample's text and log-probabilities, however its tokens come in rounds."""

from __future__ import annotations

import pytest

from draftsmith.decoding import Request, Result, SamplingParams, TokenLogprobs
from draftsmith.decoding.trace import Trace
from draftsmith.serving.answers import usage
from draftsmith.serving.engine_thread import Update
from draftsmith.serving.samples import Sample, completion_logprobs

TEXT = "the red fox goes to the river"
NUM_STOP = 3


@pytest.fixture(scope="module")
def answer(pair):
    """Token ids of an answer, and the stop string that its last ones spell."""
    ids = pair.target.tokenizer(TEXT, add_special_tokens=False).input_ids
    return ids, b"".join(map(pair.token_text.spelled, ids[-NUM_STOP:])).decode()


def rounds(ids, cut, result):
    found = [TokenLogprobs(-0.5, ()) for _ in ids]
    yield Update("a", 0.0, ids[:cut], found[:cut])
    yield Update("a", 0.0, ids[cut:], found[cut:], result)


def test_tokens_that_a_stop_string_hides_are_shown_in_no_round(pair, answer):
    ids, stop = answer
    params = SamplingParams(max_new_tokens=64, stop_strings=(stop,))
    result = Result("a", ids, "stop", Trace(), stop)
    for cut in range(1, len(ids)):
        sample = Sample(Request("a", [1], params), pair.token_text)
        pieces = [sample.add(update) for update in rounds(ids, cut, result)]
        assert "".join(piece.text for piece in pieces) == TEXT.removesuffix(stop)
        shown = [token.token_id for piece in pieces for token in piece.tokens]
        assert shown == ids[:-NUM_STOP], cut


def test_offsets_are_those_of_the_whole_answer(pair, answer):
    """Also where the text of a token is shown in part, for the rest may begin a stop string."""
    ids, _ = answer
    begun = pair.token_text.spelled(ids[3])[-1:].decode()
    params = SamplingParams(max_new_tokens=len(ids), stop_strings=(f"{begun} never",))
    result = Result("a", ids, "length", Trace())
    spelled = [pair.token_text.spelled(token_id).decode() for token_id in ids]
    expected = [sum(map(len, spelled[:place])) for place in range(len(ids))]
    for cut in range(1, len(ids)):
        sample = Sample(Request("a", [1], params), pair.token_text)
        offsets = []
        for update in rounds(ids, cut, result):
            piece = sample.add(update)
            shown = completion_logprobs(piece.tokens, pair.token_text)
            offsets += shown["text_offset"]
        assert offsets == expected


def shown_in_rounds(pair, ids, cut, found):
    """What completions show of tokens that come in two rounds, and the text."""
    sample = Sample(Request("a", [1], SamplingParams(max_new_tokens=len(ids))), pair.token_text)
    result = Result("a", ids, "length", Trace())
    first = Update("a", 0.0, ids[:cut], found[:cut])
    pieces = [sample.add(first), sample.add(Update("a", 0.0, ids[cut:], found[cut:], result))]
    tables = [completion_logprobs(piece.tokens, pair.token_text) for piece in pieces]
    joined = {name: [entry for table in tables for entry in table[name]] for name in tables[0]}
    return "".join(piece.text for piece in pieces), joined


@pytest.fixture(scope="module")
def cut_up(pair):
    """A text, and tokens that cut its characters; the last of them is a special one."""
    text = "the 🦊 eats €3 of 蜂蜜"
    ids = pair.target.tokenizer(text, add_special_tokens=False).input_ids
    return text, [*ids, *pair.target.tokenizer("<|user|>", add_special_tokens=False).input_ids]


def test_offsets_count_the_characters_of_the_text_and_not_its_tokens(pair, cut_up):
    text, ids = cut_up
    starts = [sum(len(pair.token_text.spelled(i)) for i in ids[:n]) for n in range(len(ids))]
    ends = [len(text[: n + 1].encode()) for n in range(len(text))]
    expected = [sum(end <= start for end in ends) for start in starts]
    assert len(set(expected)) < len(expected)
    for cut in range(1, len(ids)):
        found = [TokenLogprobs(-0.5, ()) for _ in ids]
        shown, table = shown_in_rounds(pair, ids, cut, found)
        assert shown == text
        assert table["text_offset"] == expected, cut


def test_a_cut_character_is_named_by_its_bytes(pair, cut_up):
    text, ids = cut_up
    found = [TokenLogprobs(-0.5, ()) for _ in ids]
    _, table = shown_in_rounds(pair, ids, 3, found)
    spelled = b""
    for name in table["tokens"]:
        is_cut = name.startswith("bytes:")
        spelled += bytes.fromhex(name[6:].replace("\\x", "")) if is_cut else name.encode()
    assert spelled.decode() == f"{text}<|user|>"
    assert any(name.startswith("bytes:\\xf0") for name in table["tokens"])


def test_every_probable_token_is_shown_by_name_and_so_is_the_chosen_one(pair, cut_up):
    """Of two tokens with one name the more probable is shown."""
    _, ids = cut_up
    names = [pair.token_text.spelled(token_id) for token_id in ids]
    cut = [token_id for token_id, name in zip(ids, names, strict=True) if name[:1] >= b"\x80"]
    assert len(set(cut)) > 3
    top = tuple((token_id, -0.1 * n) for n, token_id in enumerate(dict.fromkeys(cut), start=1))
    found = [TokenLogprobs(-7.0, top) for _ in ids]
    _, table = shown_in_rounds(pair, ids, 1, found)
    assert len(table["top_logprobs"][0]) == len(top) + 1
    assert table["top_logprobs"][0][table["tokens"][0]] == -7.0
    twice = [TokenLogprobs(-7.0, ((ids[0], -0.5), (ids[0], -0.9))) for _ in ids]
    _, table = shown_in_rounds(pair, ids, 1, twice)
    assert table["top_logprobs"][0] == {table["tokens"][0]: -0.5}


def test_drafts_behind_the_end_of_an_answer_do_not_count_as_accepted():
    trace = Trace()
    trace.record(drafted=4, accepted=2, committed=3)
    trace.record(drafted=4, accepted=4, committed=2)
    counted = usage([Result("a", [1, 2, 3, 4, 5], "stop", trace)], 7)["speculation"]
    assert (counted["drafted"], counted["accepted"], counted["rounds"]) == (8, 4, 2)
