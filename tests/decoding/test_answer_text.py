"""Text in pieces: joined they are the whole text, and no piece shows what may yet change."""

from __future__ import annotations

import random

import pytest

from draftsmith.decoding import AnswerText, Result, TokenText, Trace
from tests.decoding.test_token_text import sentence_piece, word_piece

INCOMPLETE = "\ufffd"


def cut(token_ids, chance):
    """The tokens round by round, one to four at a time."""
    rounds, place = [], 0
    while place < len(token_ids):
        size = chance.randint(1, 4)
        rounds.append(token_ids[place : place + size])
        place += size
    return rounds


def result_of(token_ids, stopped_by=None):
    reason = "length" if stopped_by is None else "stop"
    return Result("a", token_ids, reason, Trace(), stopped_by)


def pieces_of(text, rounds, result):
    shown = [text.add(tokens) for tokens in rounds[:-1]]
    return [*shown, text.add(rounds[-1], result)]


# Bytes of a sentence piece stand together: one that is out of place spoils those before it.
_UNITS = [[1], [2], [3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("build", "units"),
    [(None, [[i] for i in range(64)]), (sentence_piece, _UNITS), (word_piece, [[1], [2]])],
)
def test_pieces_join_to_the_text_of_all_tokens(tokenizer, build, units):
    token_text = TokenText(tokenizer if build is None else build())
    for seed in range(300):
        chance = random.Random(seed)
        chosen = (chance.choice(units) for _ in range(chance.randint(1, 40)))
        token_ids = [token for unit in chosen for token in unit]
        text = AnswerText(token_text, ())
        pieces = pieces_of(text, cut(token_ids, chance), result_of(token_ids))
        assert "".join(pieces) == token_text.text(token_ids), (seed, token_ids)


def test_however_it_is_cut_a_stop_token_shows_nothing(tokenizer):
    token_text = TokenText(tokenizer)
    for seed in range(100):
        chance = random.Random(seed)
        token_ids = [chance.randrange(63) for _ in range(12)]
        text = AnswerText(token_text, ())
        pieces = pieces_of(text, cut(token_ids, chance), result_of(token_ids, token_ids[-1]))
        assert "".join(pieces) == token_text.text(token_ids[:-1]), (seed, token_ids)


def test_however_it_is_cut_the_text_ends_before_the_stop_string(tokenizer):
    token_text = TokenText(tokenizer)
    found = 0
    for seed in range(300):
        chance = random.Random(seed)
        token_ids = [chance.randrange(63) for _ in range(30)]
        whole = token_text.text(token_ids)
        place = chance.randrange(len(whole) - 3)
        string = whole[place : place + 3]
        if INCOMPLETE in string:
            continue
        found += 1
        answer = next(
            token_ids[:end]
            for end in range(1, 31)
            if string.encode() in b"".join(map(token_text.spelled, token_ids[:end]))
        )
        text = AnswerText(token_text, [string, "never"])
        pieces = pieces_of(text, cut(answer, chance), result_of(answer, string))
        assert "".join(pieces) == whole.partition(string)[0]
    assert found > 100


def test_only_the_newest_tokens_are_decoded(tokenizer):
    class Counting(TokenText):
        longest = 0

        def text(self, token_ids, *, num_hidden=0):
            self.longest = max(self.longest, len(token_ids))
            return super().text(token_ids, num_hidden=num_hidden)

    token_text = Counting(tokenizer)
    text = AnswerText(token_text, ["stop"])
    letters = tokenizer.convert_tokens_to_ids(["a", "b", "Ġ"])
    assert "".join(text.add(letters) for _ in range(50)) == "ab " * 50
    assert token_text.longest <= 2 * len(letters)
