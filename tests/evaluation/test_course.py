"""Who joins a batch when, how long rows take, and how many are in flight meanwhile."""

from __future__ import annotations

import random
import statistics

import pytest

from draftsmith.decoding import Engine, NoProposer, Request, SamplingParams
from draftsmith.evaluation.course import Reading, RoundLaw, Stretch, course


@pytest.mark.parametrize(
    ("rows", "num_tokens", "chunk"), [(4, 9, 100), (5, 9, 20), (3, 30, 8), (2, 17, 16), (2, 18, 16)]
)
def test_rows_join_in_the_step_in_which_the_engine_lets_them(target, rows, num_tokens, chunk):
    engine = Engine(target, NoProposer(), max_rows=rows, draft_length=0)
    engine.open(num_tokens + 40, prefill_chunk=chunk)
    params = SamplingParams(max_new_tokens=40)
    engine.submit(
        [Request(str(row), list(range(3, 3 + num_tokens)), params) for row in range(rows)]
    )
    joined = {}
    for step in range(40):
        for event in engine.step():
            joined.setdefault(event.request_id, step)
    expected = Reading.of(rows, num_tokens, chunk).joining_steps(rows)
    assert [joined[str(row)] for row in range(rows)] == expected


def test_rows_that_accept_nothing_take_a_round_a_token_and_end_together():
    assert RoundLaw(1.0, 0.0, 1, spread=0.5).rounds(40, 3) == [40.0] * 3


def test_rounds_are_within_what_is_possible_and_differ_more_where_texts_do():
    alike, unlike = (RoundLaw(1.7, 0.6, 4, spread).rounds(60, 8) for spread in (0.0, 0.5))
    for rounds in (alike, unlike):
        assert all(60 / 4 <= count <= 60 for count in rounds)
    assert statistics.pstdev(unlike) > statistics.pstdev(alike) > 0
    assert max(RoundLaw(1.7, 0.6, 4, 3.0).rounds(60, 8)) == 60.0


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_the_mean_and_the_longest_row_are_those_of_simulated_rounds(rows):
    """Rounds commit 1, 2 or 3 tokens with shares 0.5, 0.3 and 0.2, in every text alike."""
    shares, new_tokens, draws = [0.5, 0.3, 0.2], 48, random.Random(1)
    mean = 1 * 0.5 + 2 * 0.3 + 3 * 0.2
    variance = 1 * 0.5 + 4 * 0.3 + 9 * 0.2 - mean**2

    def row():
        count = total = 0
        while total < new_tokens:
            total += draws.choices([1, 2, 3], shares)[0]
            count += 1
        return count

    batches = [[row() for _ in range(rows)] for _ in range(400)]
    expected = RoundLaw(mean, variance, 3, 0.0).rounds(new_tokens, rows)
    assert statistics.fmean(expected) == pytest.approx(
        statistics.fmean(statistics.fmean(batch) for batch in batches), rel=0.02
    )
    assert max(expected) == pytest.approx(statistics.fmean(map(max, batches)), rel=0.03)


def test_a_batch_grows_and_shrinks():
    found = course([0, 1], [2.0, 2.0])
    assert sorted(found, key=lambda stretch: stretch.rows) == [
        Stretch(1, 2.0, pytest.approx(0.5)),
        Stretch(2, 1.0, pytest.approx(0.5)),
    ]


def test_every_round_of_every_row_is_counted():
    joined, rounds = [0, 0, 3, 9], [4.0, 2.5, 3.0, 1.0]
    found = course(joined, rounds)
    assert sum(stretch.rows * stretch.rounds for stretch in found) == pytest.approx(sum(rounds))
    assert all(0 <= stretch.progress <= 1 for stretch in found)


def test_while_nobody_is_in_flight_no_round_is_paid():
    assert sum(stretch.rounds for stretch in course([0, 10], [2.0, 2.0])) == pytest.approx(4.0)
