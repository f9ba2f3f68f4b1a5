"""Predictions and what was decoded: how they are planned, and what their errors say."""

from __future__ import annotations

import itertools
import math

import pytest

from draftsmith.decoding import Lengths
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts, Survival
from draftsmith.evaluation.trials import (
    Planned,
    Seen,
    Trial,
    check,
    conversations,
    error_bar,
    plan_trials,
    summary,
)
from draftsmith.evaluation.workload import DeviceCosts, PrefillMs, Workload

SURVIVALS = {0.0: Survival([0.6, 0.4, 0.2]), 0.7: Survival([0.5, 0.3, 0.1])}


def trial(predicted, measured, *, tokens=(1.5, 1.5)):
    planned = Planned(Workload(1, 8, 8, 0.0), Lengths(1, 0), predicted, tokens[0], 0, 1.0)
    return Trial(planned, Seen(measured, measured - 0.1, measured + 0.1, tokens[1]))


def planned_trials():
    cell = ForwardCosts(10.0, 1.0, {width: 10.0 + width for width in range(1, 6)})
    grid = list(itertools.product((1, 4, 16), (64, 256, 1024)))
    rounds = RoundCosts((1, 4, 16), (64, 256, 1024), dict.fromkeys(grid, cell))
    costs = DeviceCosts(rounds, dict.fromkeys(grid, PrefillMs(5.0, 1.0)))
    return plan_trials(costs, SURVIVALS, new_tokens=16, longest=Lengths(3, 0))


@pytest.mark.parametrize("num_tokens", [5, 60, 200])
def test_prompts_of_any_length_are_real_texts_that_end_with_a_question(rollouts, num_tokens):
    prompts = list(itertools.islice(conversations(rollouts, num_tokens), 3))
    assert [len(prompt) for prompt in prompts] == [num_tokens] * 3
    endings = {tuple(rollout.prompt_ids[-4:]) for rollout in rollouts}
    assert all(tuple(prompt[-4:]) in endings for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) > 1


def test_a_default_grid_has_more_than_forty_trials_none_of_them_twice():
    planned = planned_trials()
    assert len(planned) >= 40
    assert len({(item.workload, item.lengths) for item in planned}) == len(planned)


def test_the_first_trials_are_spread_over_every_axis():
    whole, first = planned_trials(), planned_trials()[:20]

    def values(items, axis):
        return {getattr(item.workload, axis) for item in items}

    for axis in ("batch_size", "context", "new_tokens", "temperature"):
        assert values(first, axis) == values(whole, axis)
    assert {item.lengths.draft for item in first} == {1, 2, 3}


@pytest.mark.parametrize(
    ("predicted", "measured", "is_wrong"),
    [(1.2, 1.3, False), (0.9, 1.2, True), (1.1, 0.8, True), (0.98, 1.05, False)],
)
def test_a_clear_gain_that_was_taken_for_a_loss_is_a_sign_error(predicted, measured, is_wrong):
    assert trial(predicted, measured).has_sign_error == is_wrong
    assert trial(predicted, measured).record()["sign_error"] == is_wrong


def test_the_error_bar_holds_nine_of_ten_trials():
    trials = [trial(1 + n / 100, 1.0) for n in range(11)]
    assert error_bar(trials) == pytest.approx(0.09)
    assert error_bar([]) == math.inf


def test_the_summary_says_how_far_and_in_which_direction_predictions_are_off():
    trials = [trial(1.2, 1.0), trial(0.9, 1.0), trial(1.1, 1.0, tokens=(1.8, 1.5))]
    found = summary(trials)
    assert found["num_trials"] == 3
    assert found["median_error"] == pytest.approx(0.1)
    assert found["median_signed_error"] == pytest.approx(0.1)
    assert found["median_tokens_error"] == pytest.approx(0.0)
    assert found["sign_errors"] == 0
    nothing = summary([])
    assert (nothing["num_trials"], nothing["median_error"], nothing["error_bar"]) == (0, None, None)


class Recorder:
    """Stands for what decodes; says what was asked of it."""

    def __init__(self, *kept):
        self.kept, self.asked = kept, []

    def is_kept(self, planned):
        return planned in self.kept

    def run(self, planned):
        self.asked.append(planned)
        return Trial(planned, Seen(1.0, 0.9, 1.1, 1.5))


def lasting(seconds):
    return Planned(Workload(1, 8, 8, 0.0), Lengths(1, 0), 1.2, 1.5, 0, seconds)


def test_trials_that_would_last_too_long_are_passed_over_and_not_those_behind_them():
    short, long, kept = lasting(0.5), lasting(1e6), lasting(2e6)
    run = Recorder(kept)
    done = check(run, [short, long, short, kept], seconds=1000)
    assert run.asked == [trial.planned for trial in done] == [short, short, kept]


def test_without_time_the_first_trial_alone_is_decoded():
    run = Recorder()
    assert len(check(run, [lasting(9.0), lasting(9.0)], seconds=0)) == 1


def test_questions_come_from_all_domains_in_turn_and_trials_begin_with_different_ones(rollouts):
    by_length = sorted(rollouts, key=lambda rollout: -len(rollout.prompt_ids))
    longest = len(by_length[0].prompt_ids)
    domains = {rollout.domain for rollout in rollouts}
    prompts = list(itertools.islice(conversations(rollouts, longest), len(domains) + 4))

    def domain_of(prompt):
        return next(r.domain for r in by_length if prompt[-len(r.prompt_ids) :] == r.prompt_ids)

    assert {domain_of(prompt) for prompt in prompts[: len(domains)]} == domains
    assert list(itertools.islice(conversations(rollouts, longest, 3), 3)) == prompts[3:6]
    starts = [item.first_text for item in planned_trials()]
    assert len(set(starts)) == len(starts)
