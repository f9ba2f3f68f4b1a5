"""One sample's text and log-probabilities, however its tokens come in rounds."""

from __future__ import annotations

import pytest

from draftsmith.decoding import Request, Result, SamplingParams, TokenLogprobs
from draftsmith.decoding.trace import Trace
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
            shown = completion_logprobs(piece.tokens, pair.token_text, piece.offset)
            offsets += shown["text_offset"]
        assert offsets == expected
