"""Arms with known costs on a clock that only they move."""

from __future__ import annotations

import types

import pytest
import torch

from draftsmith.evaluation import timing
from draftsmith.evaluation.timing import (
    Timings,
    forward_seconds,
    interleave,
    median_ms,
    speed_ratio,
)

GROUPS = [[[1]], [[2]], [[3]], [[4]]]
FIRST_CALL_S = 1000.0


class Clock:
    """Seconds since the start."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Arm:
    """Commits `tokens_by_prompt` and takes `seconds_per_token`; the first call takes very long."""

    def __init__(self, clock, calls, name, *, seconds_per_token, tokens_by_prompt):
        self._clock, self._calls, self._name = clock, calls, name
        self._cost, self._tokens = seconds_per_token, tokens_by_prompt
        self._is_cold = True

    def __call__(self, prompts):
        self._calls.append((self._name, prompts))
        tokens = sum(self._tokens[ids[0]] for ids in prompts)
        self._clock.now += FIRST_CALL_S if self._is_cold else tokens * self._cost
        self._is_cold = False
        return tokens


@pytest.fixture
def clock(monkeypatch):
    ticking = Clock()
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=ticking.perf_counter))
    return ticking


@pytest.fixture
def measure(clock):
    """`measure(name=(seconds_per_token, tokens_by_prompt))` -> timings and calls."""

    def run(groups=GROUPS, on_group=lambda done: None, **arms):
        calls = []
        contestants = {
            name: Arm(clock, calls, name, seconds_per_token=cost, tokens_by_prompt=tokens)
            for name, (cost, tokens) in arms.items()
        }
        return interleave(contestants, groups, on_group), calls

    return run


EQUAL = {1: 10, 2: 20, 3: 30, 4: 40}


def test_every_arm_is_warmed_once_then_the_order_alternates(measure):
    _, calls = measure(a=(1, EQUAL), b=(1, EQUAL), c=(1, EQUAL))
    names = "".join(name for name, _ in calls)
    assert names == "abc" + "abc" + "cba" + "abc" + "cba"
    assert [prompts for _, prompts in calls[:3]] == [GROUPS[0]] * 3
    assert [prompts for name, prompts in calls[3:] if name == "b"] == GROUPS


def test_the_warming_call_is_not_in_the_timings(measure):
    timings, _ = measure(a=(0.5, EQUAL))
    assert timings["a"].tokens == [10, 20, 30, 40]
    assert timings["a"].seconds == [5, 10, 15, 20]
    assert timings["a"].tokens_per_s == 2
    assert timings["a"].warm_up_s == FIRST_CALL_S


class Staged(Arm):
    """Takes two seconds to start, in which every prompt gets a token."""

    def start(self, prompts):
        self._clock.now += 2.0
        self._prompts = prompts
        return len(prompts)

    def finish(self):
        return self(self._prompts) - len(self._prompts)


def test_an_arm_with_a_start_is_timed_as_a_whole_and_without_it(clock):
    arm = Staged(clock, [], "a", seconds_per_token=0.5, tokens_by_prompt=EQUAL)
    timings = interleave({"a": arm}, GROUPS[:2])["a"]
    assert (timings.seconds, timings.tokens) == ([7.0, 12.0], [10, 20])
    assert (timings.decoding.seconds, timings.decoding.tokens) == ([5.0, 10.0], [9, 19])


def test_groups_may_come_one_by_one(clock):
    arm = Arm(clock, [], "a", seconds_per_token=0.5, tokens_by_prompt=EQUAL)
    assert interleave({"a": arm}, iter(GROUPS))["a"].tokens == [10, 20, 30, 40]


def test_the_median_is_that_of_the_groups_rates():
    timings = Timings(seconds=[1.0, 1.0, 100.0], tokens=[10, 12, 10])
    assert timings.median_tokens_per_s == 10.0


def test_a_group_without_tokens_says_nothing_of_speed():
    fast, slow = Timings([1.0, 9.0], [10, 0]), Timings([2.0, 1.0], [10, 10])
    assert speed_ratio(fast, slow, seed=0).mean == pytest.approx(2.0)


def test_forwards_are_timed_only_within_the_block(clock):
    class Slow(torch.nn.Module):
        def forward(self):
            clock.now += 3.0

    model = Slow()
    with forward_seconds([model]) as spent:
        model()
        model()
    model()
    assert spent == [3.0, 3.0]


def test_every_finished_group_is_reported(measure):
    done = []
    measure(on_group=done.append, a=(1, EQUAL), b=(1, EQUAL))
    assert done == [1, 1, 1, 1]


def test_the_ratio_is_that_of_the_rates(measure):
    timings, _ = measure(fast=(0.5, EQUAL), slow=(1.0, EQUAL))
    ratio = speed_ratio(timings["fast"], timings["slow"], seed=0)
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert ratio.num_prompts == len(GROUPS)


@pytest.mark.parametrize("lengths", [{1: 1, 2: 20, 3: 90, 4: 4}, dict.fromkeys(EQUAL, 7)])
def test_the_ratio_does_not_depend_on_how_long_the_outputs_are(measure, lengths):
    timings, _ = measure(fast=(0.5, lengths), slow=(1.0, EQUAL))
    assert speed_ratio(timings["fast"], timings["slow"], seed=0).mean == pytest.approx(2.0)
    inverse = speed_ratio(timings["slow"], timings["fast"], seed=0)
    assert inverse.mean == pytest.approx(0.5)


def test_long_prompts_weigh_more_than_short_ones():
    slow = Timings(seconds=[1.0, 9.0], tokens=[10, 90])
    fast = Timings(seconds=[1.0, 3.0], tokens=[10, 90])  # 1x on the short, 3x on the long one
    assert speed_ratio(fast, slow, seed=0).mean == pytest.approx(10 / 4)


def test_an_arm_against_itself_is_exactly_as_fast(measure):
    timings, _ = measure(a=(0.3, EQUAL))
    ratio = speed_ratio(timings["a"], timings["a"], seed=0)
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((1.0, 1.0, 1.0))


def test_isolated_actions_take_turns_and_one_slow_repetition_does_not_count(clock):
    calls = []

    def action(name, costs):
        costs = iter(costs)

        def run():
            calls.append(name)
            clock.now += next(costs)

        return run

    actions = {"a": action("a", [9.0, 1.0, 1.0, 50.0]), "b": action("b", [9.0, 2.0, 2.0, 3.0])}
    assert median_ms(actions, 3) == {"a": 1000.0, "b": 2000.0}
    assert "".join(calls) == "ab" * 4
