"""Predictions and what was decoded: how they are planned, and what their errors say."""

from __future__ import annotations

import itertools
import math

import pytest

from draftsmith.decoding import Lengths, Tree
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts, Survival
from draftsmith.evaluation.deadline import Deadline
from draftsmith.evaluation.guesses import Guesses, with_trees
from draftsmith.evaluation.trial_plan import (
    Planned,
    conversations,
    num_groups,
    plan_trials,
    unseen,
)
from draftsmith.evaluation.trials import (
    Seen,
    Trial,
    TrialRun,
    arm_of,
    check,
    error_bar,
    summary,
)
from draftsmith.evaluation.workload import NOTHING, Choice, DeviceCosts, PrefillMs, Workload
from tests.evaluation.clock import Clock

SURVIVALS = {0.0: Survival([0.6, 0.4, 0.2]), 0.7: Survival([0.5, 0.3, 0.1])}
TREE = Tree((0, 0, 0))
ANSWERS = (16, 64, 256)
LONGEST = Lengths(3, 0)


def trial(predicted, measured, *, tokens=(1.5, 1.5), iid=None):
    planned = Planned(Workload(1, 8, 8, 0.0), Choice(1, 0), predicted, iid, tokens[0], 0, 1.0)
    return Trial(planned, Seen(measured, measured - 0.1, measured + 0.1, tokens[1]))


def planned_trials(survivals=SURVIVALS, longest=LONGEST, *, slope=1.0):
    cell = ForwardCosts(10.0, 1.0, {width: 10.0 + slope * width for width in range(1, 8)})
    grid = list(itertools.product((1, 4, 16), (64, 256, 1024)))
    rounds = RoundCosts((1, 4, 16), (64, 256, 1024), dict.fromkeys(grid, cell))
    costs = DeviceCosts(rounds, dict.fromkeys(grid, PrefillMs(5.0, 1.0)))
    return plan_trials(costs, survivals, new_tokens=ANSWERS, longest=longest)


def is_at_an_end(item):
    workload = item.workload
    return workload.batch_size == 16 or workload.context == 1024 or workload.new_tokens in (64, 256)


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
    assert len({item.workload for item in planned}) == len(planned)


def test_the_first_trials_are_spread_over_every_axis():
    within = [item for item in planned_trials() if not is_at_an_end(item)]

    def values(items, axis):
        return {getattr(item.workload, axis) for item in items}

    for axis in ("batch_size", "context", "new_tokens", "temperature"):
        assert values(within[:20], axis) == values(within, axis)


@pytest.mark.parametrize("longest", [1, 2, 3, 4])
def test_every_draft_length_is_tried_at_every_temperature(longest):
    survivals = {0.0: Survival([0.6, 0.4, 0.2, 0.1]), 0.7: Survival([0.5, 0.3, 0.1, 0.1])}
    planned = planned_trials(survivals, Lengths(longest, 0))
    for temperature in survivals:
        tried = {p.choice.draft for p in planned if p.workload.temperature == temperature}
        assert tried == set(range(1, longest + 1))


def test_trees_and_copies_alone_are_tried_where_the_pair_has_them():
    guesses = Guesses([[0.6, 0.1, 0.1]], [100])
    survived = with_trees(Survival([0.6, 0.2], 0.2, [0.8, 0.7]), guesses, [TREE])
    found = {item.choice for item in planned_trials({0.0: survived}, Lengths(2, 2))}
    assert any(choice.tree == TREE for choice in found)
    assert Choice(0, 2) in found
    assert NOTHING not in found


def test_a_few_trials_lie_at_the_ends_of_what_advice_speaks_of():
    planned = planned_trials()
    ends = [item for item in planned if is_at_an_end(item)]
    for axis, last in (("batch_size", 16), ("context", 1024), ("new_tokens", 256)):
        assert last in {getattr(item.workload, axis) for item in ends}
    assert Workload(16, 1024, 256, ends[-1].workload.temperature) == ends[-1].workload
    assert 0.1 < len(ends) / len(planned) < 0.4
    assert any(is_at_an_end(item) for item in planned[:10])
    assert not any(is_at_an_end(item) for item in planned[:4])


def test_a_pair_that_never_pays_is_tried_all_the_same():
    planned = planned_trials(slope=100.0)
    assert planned
    assert all(item.choice.draft and item.speedup < 1 for item in planned)


def test_long_answers_are_decoded_behind_fewer_texts_and_never_behind_one_batch():
    assert num_groups(Workload(1, 64, 16, 0.0)) > num_groups(Workload(1, 64, 256, 0.0)) >= 2
    assert num_groups(Workload(16, 64, 16, 0.0)) == 2


def test_the_textbooks_formula_stands_beside_every_prediction():
    known = Survival([0.6, 0.3], alpha=0.5)
    for item in planned_trials({0.0: known}, Lengths(2, 0)):
        length = item.choice.draft
        tokens = sum(0.5**place for place in range(length + 1))
        assert item.iid_speedup == pytest.approx(tokens / (1 + 0.1 * length))
    assert planned_trials()[0].iid_speedup is None


@pytest.mark.parametrize(
    ("predicted", "measured", "is_wrong"),
    [(1.2, 1.3, False), (0.9, 1.2, True), (1.1, 0.8, True), (0.98, 1.05, False)],
)
def test_a_clear_gain_that_was_taken_for_a_loss_is_a_sign_error(predicted, measured, is_wrong):
    assert trial(predicted, measured).has_sign_error == is_wrong
    assert trial(predicted, measured).record()["sign_error"] == is_wrong


def test_the_error_bar_holds_nine_of_ten_trials_and_few_trials_have_none():
    trials = [trial(1 + n / 100, 1.0) for n in range(11)]
    assert error_bar(trials) == pytest.approx(0.09)
    assert error_bar(trials[:10]) < math.inf
    assert error_bar(trials[:9]) == error_bar([]) == math.inf


def test_the_summary_says_how_far_and_in_which_direction_predictions_are_off():
    trials = [trial(1.2, 1.0, iid=1.5), trial(0.9, 1.0), trial(1.1, 1.0, tokens=(1.8, 1.5))]
    found = summary(trials)
    assert found["num_trials"] == 3
    assert found["median_error"] == pytest.approx(0.1)
    assert found["median_signed_error"] == pytest.approx(0.1)
    assert found["median_tokens_error"] == pytest.approx(0.0)
    assert found["median_iid_error"] == pytest.approx(0.5)
    assert found["sign_errors"] == 0
    assert found["error_bar"] is None
    nothing = summary([])
    assert (nothing["num_trials"], nothing["median_error"], nothing["error_bar"]) == (0, None, None)


class Recorder:
    """Stands for what decodes; says what was asked of it. Decoding takes as long as expected."""

    def __init__(self, *kept, clock=None):
        self.kept, self.asked, self.clock = kept, [], clock or Clock()

    def is_kept(self, planned):
        return planned in self.kept

    def run(self, planned):
        self.asked.append(planned)
        if planned not in self.kept:
            self.clock.passes(planned.seconds)
        return Trial(planned, Seen(1.0, 0.9, 1.1, 1.5))


def lasting(seconds, first_text=0):
    return Planned(Workload(1, 8, 8, 0.0), Choice(1, 0), 1.2, None, 1.5, first_text, seconds)


def checked(run, planned, seconds):
    """What was decoded in so many seconds, and what the progress bar was told."""
    told = []
    done = check(run, planned, Deadline.after(seconds, run.clock), on_done=told.append)
    return [trial.planned for trial in done], told


def test_trials_that_would_last_too_long_are_passed_over_and_not_those_behind_them():
    items = [lasting(0.5), lasting(1e6, 1), lasting(0.5, 2), lasting(2e6, 3)]
    run = Recorder(items[3])
    done, told = checked(run, items, 1000)
    assert done == run.asked == [items[0], items[2], items[3]]
    assert sum(told) == len(items), "a bar that is full says that nothing more will come"


def test_long_trials_wait_until_the_short_ones_had_their_turn():
    items = [lasting(40.0), lasting(10.0, 1), lasting(10.0, 2), lasting(45.0, 3)]
    run = Recorder()
    done, _ = checked(run, items, 100)
    assert run.asked == [items[1], items[2], items[0]]
    assert done == items[:3], "in the order of the plan"


@pytest.mark.parametrize("seconds", [0.0, 0.1, 7.0, 60.0, 600.0])
def test_trials_end_in_time_whatever_they_are(seconds):
    run = Recorder()
    checked(run, planned_trials(), seconds)
    assert run.clock.now <= seconds
    assert bool(run.asked) == (seconds >= 7.0)


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


def test_texts_that_survival_rests_on_are_left_to_it_where_others_suffice(rollouts):
    names = sorted({rollout.prompt_id for rollout in rollouts})
    many = [r for rollout in rollouts for r in [rollout] * 4]
    others = unseen(many, names[:5])
    assert not {rollout.prompt_id for rollout in others} & set(names[:5])
    assert {rollout.prompt_id for rollout in others} == set(names[5:])
    assert unseen(rollouts, names[1:]) == list(rollouts), "one text is too few"
    assert unseen(rollouts, ()) == list(rollouts)


@pytest.mark.parametrize("choice", [Choice(2, 0), Choice(1, 2), Choice(0, 2), Choice(1, 2, TREE)])
def test_every_choice_is_decoded_as_it_is_named(target, drafts, rollouts, tmp_path, choice):
    pair = Contestants(target, drafts["trimmed"], stop_ids=())
    workload = Workload(2, 40, 8, 0.0)
    item = Planned(workload, choice, 1.0, None, 1.0, 0, 1.0)
    greedy = [rollout for rollout in rollouts if rollout.temperature == 0]

    def prompts(num_tokens, first):
        return conversations(greedy, num_tokens, first)

    seen = TrialRun(lambda _temperature: pair, prompts, tmp_path).run(item).seen
    assert seen.tokens >= 1
    arm = arm_of(pair, choice, max_new_tokens=8, batch_size=2)
    plain = pair.engine(0, max_new_tokens=8, batch_size=2)
    group = list(itertools.islice(prompts(40, 0), 2))
    assert arm(group) == plain(group) == 16
    drafted = [n for trace in arm.traces for n in trace.drafted]
    copied = [is_copy for trace in arm.traces for is_copy in trace.from_text]
    assert max(drafted) <= (choice.tree or Tree.chain(choice.draft)).num_nodes_with(choice.copy)
    if choice.copy == 0:
        assert not any(copied)
    if choice.draft == 0:
        assert all(is_copy or not n for n, is_copy in zip(drafted, copied, strict=True))


def test_a_trial_of_another_choice_is_kept_apart(tmp_path):
    run = TrialRun(None, None, tmp_path)
    workload = Workload(1, 8, 8, 0.0)
    chosen = [Choice(1, 2), Choice(1, 2, TREE), Choice(1, 2, Tree((0, 0, 1))), Choice(0, 2)]
    planned = [Planned(workload, each, 1.0, None, 1.0, 0, 1.0) for each in chosen]
    assert len({run._path(item) for item in planned}) == len(planned)
