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
from draftsmith.corpus.dispatch import AllLeftOutError, HopelessTaskError, dispatch
from draftsmith.corpus.lanes import Lane, TransientFault

PAUSE_S = 0.001
MOST_FAILURES = 8


class Worker:
    """Squares numbers, but for the calls (from 1) that `fails` picks.

    `gate` is waited for in every call, so that a test decides when calls end. `refuses` picks the
    checks (from 1) that do not pass, `kind` is that of the faults of calls.
    """

    def __init__(
        self,
        fails=lambda _call: False,
        gate=None,
        *,
        refuses=lambda _check: False,
        kind="failed",
        verdict=lambda: None,
    ):
        self.fails, self.gate, self.refuses, self.kind = fails, gate, refuses, kind
        self.verdict = verdict
        self.calls = []
        self.events = []
        self.num_running = self.most_running = self.num_checks = 0
        self.lock = threading.Lock()

    def square(self, number):
        with self.lock:
            self.calls.append(number)
            self.events.append(number)
            call = len(self.calls)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        try:
            if self.gate is not None:
                assert self.gate.wait(60)
            if self.fails(call):
                raise TransientFault("fault", f"call {call}", kind=self.kind)
            return number * number
        finally:
            with self.lock:
                self.num_running -= 1

    def check(self):
        with self.lock:
            self.num_checks += 1
            self.events.append("check")
            check = self.num_checks
        if self.refuses(check):
            raise TransientFault("refused", f"check {check}", kind="away")
        return self.verdict


def when(condition, act):
    """Act in a thread once the condition holds."""

    def watch():
        while not condition():
            time.sleep(0.001)
        act()

    threading.Thread(target=watch, daemon=True).start()


def always(_call):
    return True


def after(number):
    return lambda call: call > number


def lane(worker, name="a", limit=3, pause_s=PAUSE_S):
    return Lane(worker, name, limit, Worker.check, pause_s)


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
    assert worker.events == []


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
    assert len(worker.calls) == 40 + one.faults["fault"]
    assert one.faults["fault"] >= 19
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


def test_who_dies_in_the_middle_is_left_out(caplog):
    dying, good = Worker(fails=after(10), refuses=after(1), kind="away"), Worker()
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
    assert "endpoint=dying state=left_out fault=check" in caplog.text


def test_any_other_failure_ends_the_work_at_once():
    def fail(_worker):
        raise ValueError("a bug")

    worker = Worker()
    with pytest.raises(ValueError, match="a bug"):
        list(dispatch([lane(worker, limit=1)], [*squares(3), fail, *squares(30)]))
    assert len(worker.calls) == 3


class TestCheck:
    def test_nothing_is_given_before_it_has_passed(self):
        worker = Worker(refuses=lambda check: check < 3)
        assert Counter(dispatch([lane(worker)], squares(40))) == EXPECTED
        assert worker.events[:3] == ["check"] * 3
        assert "check" not in worker.events[3:]

    def test_it_is_made_once_for_all_work_of_a_worker_that_was_never_away(self):
        worker = Worker(fails=lambda call: call % 3 == 0)
        one = lane(worker)
        for _ in range(2):
            assert Counter(dispatch([one], squares(40))) == EXPECTED
        assert worker.events.count("check") == 1

    def test_who_was_away_is_checked_before_its_next_task(self):
        worker = Worker(fails=lambda call: call == 5, kind="away")
        assert Counter(dispatch([lane(worker, limit=1)], squares(8))) == Counter(
            number * number for number in range(8)
        )
        assert worker.events == ["check", 0, 1, 2, 3, 4, "check", 5, 6, 7, 4]

    def test_what_happened_while_the_caller_was_busy_is_noted_before_anything_is_begun(self):
        gate = threading.Event()

        def away(worker):
            assert gate.wait(60)
            raise TransientFault("fault", "away", kind="away")

        worker = Worker()
        answers = dispatch([lane(worker, limit=2)], [away, *squares(4)])
        next(answers)
        threads = [one for one in threading.enumerate() if one.daemon]
        gate.set()
        for thread in threads:
            thread.join(0.5)
        worker.events.append("goes on")
        next(answers)
        behind = worker.events[worker.events.index("goes on") + 1 :]
        assert behind[0] == "check"
        answers.close()

    def test_what_it_leaves_to_be_judged_is_judged_in_the_callers_thread(self):
        judges = []
        worker = Worker(verdict=lambda: judges.append(threading.current_thread()))
        assert Counter(dispatch([lane(worker)], squares(40))) == EXPECTED
        assert judges == [threading.current_thread()]

    def test_a_verdict_against_a_worker_ends_the_work_before_it_is_given_any(self):
        def refuse():
            raise ValueError("another one")

        worker = Worker(verdict=refuse)
        with pytest.raises(ValueError, match="another one"):
            list(dispatch([lane(worker)], squares(3)))
        assert worker.calls == []

    def test_who_was_left_out_comes_back_when_it_passes(self, caplog):
        caplog.set_level(logging.INFO)
        away, good = Worker(refuses=lambda check: check <= MOST_FAILURES + 2), Worker()
        lanes = [lane(away, "away"), lane(good, "good", limit=1)]
        good.gate = gate = threading.Event()
        when(lambda: away.calls, gate.set)
        assert Counter(dispatch(lanes, squares(40))) == EXPECTED
        assert lanes[0].num_answers >= 1
        messages = [record.getMessage() for record in caplog.records]
        assert sum("state=left_out" in message for message in messages) == 1
        assert "endpoint=away state=back" in messages


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self):
        self.now_s, self.slept_s = 100.0, []

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.slept_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_worker_that_asks_for_time_is_left_alone_until_it_is_over(clock):
    asked_s = []

    def task(_worker):
        asked_s.append(clock.now_s)
        if len(asked_s) == 1:
            raise TransientFault("busy", "busy", wait_s=3000.0)
        return "done"

    assert list(dispatch([lane(Worker())], [task])) == ["done"]
    assert asked_s == [100.0, 3100.0]
    assert clock.slept_s == [3000.0]


class TestNobodyLeft:
    def test_the_last_fault_of_each_is_told_and_they_stay_out(self):
        workers = [Worker(refuses=always), Worker(fails=after(2), refuses=after(1), kind="away")]
        lanes = [lane(worker, name) for worker, name in zip(workers, "ab", strict=True)]
        answers = dispatch(lanes, squares(40), patience_s=0.0)
        assert len([next(answers), next(answers)]) == 2
        with pytest.raises(AllLeftOutError, match=r"^a: check \d+; b: check \d+$"):
            next(answers)
        with pytest.raises(AllLeftOutError):
            next(dispatch(lanes, squares(1), patience_s=0.0))

    def test_workers_that_answered_before_are_waited_for(self, clock):
        """Ten minutes: a large model is loaded again."""
        worker = Worker(fails=lambda call: call == 2, kind="away")
        worker.refuses = lambda _check: 100.0 < clock.now_s < 700.0
        assert Counter(dispatch([lane(worker, pause_s=0.5)], squares(40))) == EXPECTED
        assert 700.0 <= clock.now_s < 800.0

    def test_for_a_quarter_of_an_hour(self, clock):
        worker = Worker(fails=after(2), kind="away", refuses=after(1))
        with pytest.raises(AllLeftOutError):
            list(dispatch([lane(worker, pause_s=0.5)], squares(40)))
        assert 1000.0 <= clock.now_s < 1100.0

    def test_workers_that_never_answered_get_a_minute(self, clock):
        worker = Worker(refuses=always)
        with pytest.raises(AllLeftOutError):
            list(dispatch([lane(worker, pause_s=0.5)], squares(40)))
        assert 130.0 <= clock.now_s < 200.0
        assert worker.calls == []

    def test_a_worker_that_passes_its_check_and_does_nothing_is_given_up_as_well(self, clock):
        def task(_worker):
            raise TransientFault("busy", "no room", kind="busy")

        with pytest.raises(AllLeftOutError, match="no room"):
            list(dispatch([lane(Worker(), pause_s=0.5)], [task]))
        assert 1000.0 <= clock.now_s < 1300.0


def collect(source, into):
    """Also what came before an error."""
    for item in source:
        into.append(item)


class TestHopelessTask:
    @pytest.mark.parametrize("kind", ["failed", "away"])
    def test_it_is_named_once_the_others_are_done(self, kind):
        def poison(_worker):
            raise TransientFault("http_500", "it cannot", kind=kind)

        lanes = [lane(Worker(), name) for name in "ab"]
        tasks = squares(40)
        tasks.insert(7, poison)
        answers = []
        with pytest.raises(HopelessTaskError, match="it cannot") as caught:
            collect(dispatch(lanes, tasks), answers)
        assert Counter(answers) == EXPECTED
        assert caught.value.place == 7
        assert caught.value.num_tries >= 10

    def test_a_worker_without_room_says_nothing_of_the_task(self):
        worker = Worker(fails=lambda call: call < 30, kind="busy")
        assert list(dispatch([lane(worker)], squares(1))) == [0]

    def test_nor_does_one_that_fails_its_check_as_well(self):
        """The endpoint is broken, not the request: it is waited for."""
        worker = Worker(fails=lambda call: call <= MOST_FAILURES)
        worker.refuses = lambda check: 1 < check < 5
        assert list(dispatch([lane(worker)], squares(1))) == [0]
        assert worker.num_checks == 5
