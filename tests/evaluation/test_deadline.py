"""A time by which work has to end."""

from __future__ import annotations

import pytest

from draftsmith.evaluation.deadline import Deadline
from tests.evaluation.clock import Clock


def test_what_is_left_shrinks_with_the_clock_and_goes_below_nothing():
    clock = Clock()
    deadline = Deadline.after(10.0, clock)
    clock.passes(4.0)
    assert deadline.left_s == 6.0
    clock.passes(7.0)
    assert deadline.left_s == -1.0
    assert not deadline.allows(0.0)


def test_work_is_allowed_with_a_margin():
    deadline = Deadline.after(12.0, Clock())
    assert deadline.allows(10.0)
    assert not deadline.allows(10.1)


def test_a_part_ends_no_later_than_the_whole():
    clock = Clock()
    whole = Deadline.after(10.0, clock)
    half = whole.part(0.5)
    assert (half.left_s, whole.left_s) == (5.0, 10.0)
    clock.passes(8.0)
    assert whole.part(0.5).left_s == pytest.approx(1.0)
    assert half.left_s == -3.0
    clock.passes(4.0)
    assert whole.part(0.5).left_s < 0, "behind the end there is no part"
