from __future__ import annotations

import random

import pytest

from draftsmith.decoding.ngrams import NgramIndex


def scanned(token_ids: list[int], size: int) -> int | None:
    """The same by looking at every place of the text."""
    suffix = token_ids[-size:]
    for start in range(len(token_ids) - size - 1, -1, -1):
        if token_ids[start : start + size] == suffix:
            return start + size
    return None


@pytest.mark.parametrize("num_words", [1, 2, 5, 40])
def test_it_finds_what_a_scan_of_the_whole_text_finds(num_words):
    chance = random.Random(num_words)
    num_found = 0
    for _ in range(60):
        index, text = NgramIndex(), []
        for _ in range(25):
            text += [chance.randrange(num_words) for _ in range(chance.choice([1, 1, 2, 7]))]
            for size in chance.sample([1, 2, 3, 4], 3):  # each size falls behind now and then
                place = index.find(text, size)
                assert place == scanned(text, size)
                num_found += place is not None
    assert num_found > 500


def test_a_text_that_has_not_grown_is_the_same_question():
    index, text = NgramIndex(), [1, 2, 5, 1, 2]
    assert [index.find(text, 2), index.find(text, 2)] == [2, 2]


@pytest.mark.parametrize("text", [[], [4], [4, 4]])
def test_a_text_no_longer_than_the_ngram_holds_no_earlier_one(text):
    assert NgramIndex().find(text, 2) is None


class Counted(list):
    """A text that counts the tokens that are read of it."""

    num_read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.num_read += len(found)
        return found


def test_a_look_reads_no_more_of_a_long_text_than_of_a_short_one():
    reads = []
    for length in (100, 10_000):
        index, text = NgramIndex(), Counted(range(length))
        index.find(text, 3)
        text.append(5)
        text.num_read = 0
        index.find(text, 3)
        reads.append(text.num_read)
    assert reads[0] == reads[1]
