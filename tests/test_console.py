from __future__ import annotations

import contextlib
import io
import logging

import pytest

from draftsmith.console import EXIT_USER_ERROR, Progress, count_phase, run_stage
from draftsmith.errors import CorpusError

METRICS = {"loss": 1.23456, "alpha": 0.5, "tokens_per_s": 321.9, "memory_gb": 1.26}


class Terminal(io.StringIO):
    """Standard error that somebody watches."""

    def isatty(self):
        return True


@pytest.fixture
def lines(caplog):
    """What was logged so far."""
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def exit_status(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)  # restored after the test

    def run(stage):
        with pytest.raises(SystemExit) as caught:
            run_stage(stage)
        return caught.value.code

    return run


def fail():
    raise CorpusError("reading x", found="a", expected="b", remedy="do c")


class TestRunStage:
    @pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
    def test_a_stage_ends_with_its_own_status(self, exit_status, returned, status):
        assert exit_status(lambda: returned) == status

    def test_a_users_error_is_one_line_with_what_to_do_and_no_traceback(self, exit_status, capsys):
        assert exit_status(fail) == EXIT_USER_ERROR == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.strip() == f"draftsmith: {error_text()}"

    def test_a_fault_of_the_code_keeps_its_traceback(self):
        with pytest.raises(ZeroDivisionError):
            run_stage(lambda: 1 // 0)


def error_text():
    with pytest.raises(CorpusError) as caught:
        fail()
    return str(caught.value)


class TestProgressWithoutATerminal:
    def test_nothing_is_drawn_and_a_few_lines_are_logged(self, lines, capsys):
        bar = Progress("self-written prompts", 200)
        for _ in range(200):
            bar.advance(1, tokens=3)
        assert capsys.readouterr() == ("", "")
        assert lines()[0] == "phase=self-written_prompts total=200"
        assert 2 <= len(lines()) <= 11
        assert "done=200/200" in lines()[-1]
        assert "tokens_per_s=" in lines()[-1]

    def test_units_that_are_not_done_yet_count_no_unit(self, lines):
        bar = Progress("rollouts", 2)
        for is_finished in (False, False, True, False, True):
            bar.advance(is_finished, tokens=1)
        assert "done=2/2" in lines()[-1]

    def test_training_shows_loss_and_alpha_and_a_resumed_run_starts_late(self, lines):
        bar = Progress("training", 20, unit="steps")
        for step in range(15, 20):
            bar.on_step(step, METRICS)
        assert "done=16/20" in lines()[1]
        assert "done=20/20" in lines()[-1]
        assert "loss=1.235" in lines()[-1]
        assert "alpha=0.500" in lines()[-1]
        assert "tokens_per_s=322" in lines()[-1]
        assert "memory_gb=1.3" in lines()[-1]
        assert "left=00:00" in lines()[-1]

    def test_the_time_left_counts_the_steps_of_this_run_only(self, lines, monkeypatch):
        now = iter([100.0, 110.0, 120.0])  # made, then two steps of ten seconds
        monkeypatch.setattr("draftsmith.console.time.perf_counter", lambda: next(now))
        bar = Progress("training", 10, unit="steps")
        for step in (5, 6):
            bar.on_step(step, METRICS)
        assert "left=00:40" in lines()[1]  # four steps
        assert "left=00:30" in lines()[2]

    def test_a_process_that_another_one_speaks_for_is_silent(self, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        with contextlib.redirect_stderr(Terminal()) as screen:
            Progress("training", 1, unit="steps").on_step(0, METRICS)
        assert screen.getvalue() == ""

    def test_a_phase_without_work_is_no_error(self, lines):
        Progress("nothing", 0).advance(0)
        assert lines()[0] == "phase=nothing total=0"

    def test_a_counted_phase_takes_the_number_of_finished_units(self, lines):
        done = count_phase("alpha", 5)
        for count in (2, 3):
            done(count)
        assert "done=5/5" in lines()[-1]


class TestProgressOnATerminal:
    def test_a_bar_shows_name_units_and_speed_up_to_the_end(self, lines):
        with contextlib.redirect_stderr(Terminal()) as screen:
            bar = Progress("rollouts", 4)
            for _ in range(4):
                bar.advance(1, tokens=10)
        shown = screen.getvalue()
        assert "rollouts" in shown
        assert "4/4" in shown
        assert "tokens_per_s=" in shown
        assert shown.endswith("\n")
        assert lines() == []

    def test_training_counts_from_the_step_it_resumed_at(self):
        with contextlib.redirect_stderr(Terminal()) as screen:
            bar = Progress("training", 10, unit="steps")
            for step in range(7, 10):
                bar.on_step(step, METRICS)
        assert "10/10" in screen.getvalue()
        assert "loss=1.235" in screen.getvalue()
