"""How a worker fares, told the time by the test."""

from __future__ import annotations

import pytest

from draftsmith.corpus.lanes import Lane, TransientFault

MOST_FAILURES = 8


def fail(one, *, begun_s, now_s, wait_s=0.0, stretch=1.0, kind="failed"):
    fault = TransientFault("busy", "busy", wait_s=wait_s, kind=kind)
    one.failed(fault, begun_s=begun_s, now_s=now_s, stretch=stretch)


@pytest.fixture
def one():
    lane = Lane(None, "a", 64, None, 0.5)
    lane.proved()
    return lane


def test_pauses_double_until_an_answer_comes(one):
    now_s, pauses = 100.0, []
    for _ in range(4):
        fail(one, begun_s=now_s, now_s=now_s)
        pauses.append(one.resumes_s - now_s)
        now_s = one.resumes_s
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0])
    one.answered()
    fail(one, begun_s=now_s, now_s=now_s, stretch=1.5)
    assert one.resumes_s - now_s == pytest.approx(0.75)


def test_failures_of_requests_that_were_under_way_are_one(one):
    for later in range(64):
        fail(one, begun_s=10.0, now_s=11.0 + later / 1000)
    assert one.num_failures == 1
    assert one.resumes_s == pytest.approx(11.5)
    assert one.faults.total() == 64


def test_a_failure_in_the_next_wave_counts_and_the_eighth_in_a_row_leaves_out(one):
    for wave in range(MOST_FAILURES):
        assert not one.is_out
        assert one.is_proven
        fail(one, begun_s=100.0 * wave, now_s=100.0 * wave + 1)
    assert one.is_out
    assert not one.is_proven


def test_who_is_left_out_has_pauses_of_a_minute_until_the_check_has_passed(one):
    now_s = 0.0
    for _ in range(3000):  # a long outage
        fail(one, begun_s=now_s, now_s=now_s)
        pause_s, now_s = one.resumes_s - now_s, one.resumes_s
    assert pause_s == pytest.approx(60.0)
    assert one.has_room  # for its check
    one.proved()
    assert one.is_proven
    assert not one.is_out
    fail(one, begun_s=now_s, now_s=now_s)
    assert one.resumes_s - now_s == pytest.approx(0.5)


@pytest.mark.parametrize(("kind", "is_proven"), [("busy", True), ("failed", True), ("away", False)])
def test_who_was_away_has_to_prove_itself_anew(one, kind, is_proven):
    fail(one, begun_s=10.0, now_s=10.0, kind=kind)
    assert one.is_proven == is_proven


def test_a_late_word_that_it_was_away_counts_as_well(one):
    fail(one, begun_s=10.0, now_s=20.0)
    fail(one, begun_s=11.0, now_s=21.0, kind="away")
    assert one.num_failures == 1
    assert not one.is_proven


def test_a_worker_begins_unproven():
    lane = Lane(None, "a", 64, None)
    assert not lane.is_proven
    assert not lane.was_proven


@pytest.mark.parametrize("begun_s", [100.0, 10.0])
def test_a_worker_that_asks_for_time_gets_it(one, begun_s):
    fail(one, begun_s=50.0, now_s=100.0)
    fail(one, begun_s=begun_s, now_s=100.0, wait_s=30.0)
    assert one.resumes_s == pytest.approx(130.0)
    fail(one, begun_s=99.0, now_s=100.5)
    assert one.resumes_s == pytest.approx(130.0)


def test_room_is_halved_by_failures_and_comes_back_with_answers():
    one = Lane(None, "a", 8, None, 0.5)
    for wave in range(2):
        fail(one, begun_s=100.0 * wave, now_s=100.0 * wave)
    one.num_running = 1
    assert one.has_room
    one.num_running = 2
    assert not one.has_room
    for _ in range(3):
        one.answered()
    assert one.has_room
    one.num_running = 3
    assert not one.has_room
    for _ in range(200):
        one.answered()
    one.num_running = 7
    assert one.has_room
    one.num_running = 8
    assert not one.has_room
