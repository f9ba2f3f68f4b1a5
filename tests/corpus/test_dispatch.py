"""Work shared out among workers that fail, by workers that are plain functions."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from functools import partial

import pytest

from draftsmith.corpus import dispatch as module
from draftsmith.corpus.dispatch import AllLeftOutError, Lane, TransientFault, dispatch

PAUSE_S = 0.001
MOST_FAILURES = 8


class Worker:
    """Squares numbers, but for the calls (from 1) that `fails` picks.

    `gate` is waited for in every call, so that a test decides when calls end.
    """

    def __init__(self, fails=lambda _call: False, gate=None):
        self.fails, self.gate = fails, gate
        self.calls = []
        self.num_running = self.most_running = 0
        self.lock = threading.Lock()

    def square(self, number):
        with self.lock:
            self.calls.append(number)
            call = len(self.calls)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        try:
            if self.gate is not None:
                assert self.gate.wait(60)
            if self.fails(call):
                raise TransientFault("busy", f"call {call}")
            return number * number
        finally:
            with self.lock:
                self.num_running -= 1


def when(condition, act):
    """Act in a thread once the condition holds."""

    def watch():
        while not condition():
            time.sleep(0.001)
        act()

    threading.Thread(target=watch, daemon=True).start()


def always(_call):
    return True


def lane(worker, name="a", limit=3):
    return Lane(worker, name, limit, PAUSE_S)


def squares(count):
    return [partial(Worker.square, number=number) for number in range(count)]


EXPECTED = Counter(number * number for number in range(40))


def test_every_task_is_done_once_whoever_does_it():
    workers = [Worker(), Worker()]
    lanes = [lane(worker, name) for worker, name in zip(workers, "ab", strict=True)]
    assert Counter(dispatch(lanes, squares(40))) == EXPECTED
    assert sorted(workers[0].calls + workers[1].calls) == list(range(40))
    assert sum(one.num_answers for one in lanes) == 40
    assert [one.num_running for one in lanes] == [0, 0]


def test_nothing_to_do_asks_nobody():
    worker = Worker()
    assert list(dispatch([lane(worker)], [])) == []
    assert worker.calls == []


def test_no_worker_gets_more_at_once_than_its_limit_and_none_stands_idle():
    gate = threading.Event()
    workers = [Worker(gate=gate), Worker(gate=gate)]
    lanes = [lane(workers[0], "a", limit=2), lane(workers[1], "b", limit=5)]
    when(lambda: [worker.num_running for worker in workers] == [2, 5], gate.set)
    assert Counter(dispatch(lanes, squares(40))) == EXPECTED
    assert [worker.most_running for worker in workers] == [2, 5]


def test_nothing_is_begun_while_the_caller_is_busy():
    worker = Worker()
    answers = dispatch([lane(worker, limit=4)], squares(40))
    next(answers)
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("Thread"):
            thread.join(0.5)
    assert len(worker.calls) <= 4
    answers.close()


def test_a_task_that_failed_is_done_again_and_nothing_is_lost():
    worker = Worker(fails=lambda call: call % 3 == 0)
    one = lane(worker)
    assert Counter(dispatch([one], squares(40))) == EXPECTED
    assert len(worker.calls) == 40 + one.faults["busy"]
    assert one.faults["busy"] >= 19
    assert not one.is_out


def test_who_fails_gets_a_pause_and_the_others_do_its_work(caplog):
    caplog.set_level(logging.WARNING)
    bad, good = Worker(fails=always), Worker()
    lanes = [lane(bad, "bad"), lane(good, "good", limit=1)]
    assert Counter(dispatch(lanes, squares(40))) == EXPECTED
    assert Counter(dispatch(lanes, squares(40))) == EXPECTED
    assert len(good.calls) == 80
    messages = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"endpoint=bad fault=call \d pause_s=\d+\.\d", messages[0])
    assert lanes[0].num_answers == 0


def test_who_dies_in_the_middle_is_left_out():
    dying, good = Worker(fails=lambda call: call > 10), Worker()
    gate = threading.Event()
    good.gate = gate
    lanes = [lane(dying, "dying"), lane(good, "good", limit=1)]
    answers = []
    for answer in dispatch(lanes, squares(40)):
        answers.append(answer)
        if len(answers) == 10:
            when(lambda: lanes[0].is_out, gate.set)
    assert Counter(answers) == EXPECTED
    assert lanes[0].is_out
    assert lanes[0].num_answers == 10
    assert len(good.calls) == 30


def test_when_nobody_is_left_the_last_fault_of_each_is_told():
    workers = [Worker(fails=always), Worker(fails=lambda call: call > 2)]
    lanes = [lane(worker, name) for worker, name in zip(workers, "ab", strict=True)]
    answers = dispatch(lanes, squares(40))
    assert len([next(answers), next(answers)]) == 2
    with pytest.raises(AllLeftOutError, match=r"^a: call \d+; b: call \d+$"):
        next(answers)
    with pytest.raises(AllLeftOutError):  # and they stay out
        next(dispatch(lanes, squares(1)))


def test_any_other_failure_ends_the_work_at_once():
    def fail(_worker):
        raise ValueError("a bug")

    worker = Worker()
    with pytest.raises(ValueError, match="a bug"):
        list(dispatch([lane(worker, limit=1)], [*squares(3), fail, *squares(30)]))
    assert len(worker.calls) == 3


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self):
        self.now_s, self.slept_s = 100.0, []

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.slept_s.append(seconds)
        self.now_s += seconds


def test_a_worker_that_asks_for_time_is_left_alone_until_it_is_over(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    asked_s = []

    def task(_worker):
        asked_s.append(clock.now_s)
        if len(asked_s) == 1:
            raise TransientFault("busy", "busy", wait_s=3000.0)
        return "done"

    assert list(dispatch([lane(None)], [task])) == ["done"]
    assert asked_s == [100.0, 3100.0]
    assert clock.slept_s == [3000.0]


class TestLane:
    def fail(self, one, *, begun_s, now_s, wait_s=0.0, stretch=1.0):
        fault = TransientFault("busy", "busy", wait_s=wait_s)
        one.failed(fault, begun_s=begun_s, now_s=now_s, stretch=stretch)

    def test_pauses_double_until_an_answer_comes(self):
        one, now_s = Lane(None, "a", 64, 0.5), 100.0
        pauses = []
        for _ in range(4):
            self.fail(one, begun_s=now_s, now_s=now_s)
            pauses.append(one.resumes_s - now_s)
            now_s = one.resumes_s
        assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0])
        one.answered()
        self.fail(one, begun_s=now_s, now_s=now_s, stretch=1.5)
        assert one.resumes_s - now_s == pytest.approx(0.75)

    def test_failures_of_requests_that_were_under_way_are_one(self):
        one = Lane(None, "a", 64, 0.5)
        for later in range(64):
            self.fail(one, begun_s=10.0, now_s=11.0 + later / 1000)
        assert one.num_failures == 1
        assert one.resumes_s == pytest.approx(11.5)
        assert one.faults.total() == 64

    def test_a_failure_in_the_next_wave_counts_and_the_eighth_in_a_row_is_the_last(self):
        one = Lane(None, "a", 64, 0.5)
        for wave in range(MOST_FAILURES):
            assert not one.is_out
            self.fail(one, begun_s=100.0 * wave, now_s=100.0 * wave + 1)
        assert one.is_out
        assert not one.has_room

    @pytest.mark.parametrize("begun_s", [100.0, 10.0])
    def test_a_worker_that_asks_for_time_gets_it(self, begun_s):
        one = Lane(None, "a", 64, 0.5)
        self.fail(one, begun_s=50.0, now_s=100.0)
        self.fail(one, begun_s=begun_s, now_s=100.0, wait_s=30.0)
        assert one.resumes_s == pytest.approx(130.0)
        self.fail(one, begun_s=99.0, now_s=100.5)
        assert one.resumes_s == pytest.approx(130.0)

    def test_room_is_halved_by_failures_and_comes_back_with_answers(self):
        one = Lane(None, "a", 8, 0.5)
        for wave in range(2):
            self.fail(one, begun_s=100.0 * wave, now_s=100.0 * wave)
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
