from __future__ import annotations

import pytest
import torch
from torch import nn

from draftsmith.distillation.early_stop import EarlyStop, held_out_indices
from draftsmith.distillation.signals import CachedSignals
from draftsmith.errors import CorpusError
from tests.distillation.small_training import (
    are_equal,
    make_student,
    some_sequences,
    train,
    weights_of,
)

HELD_OUT = (1, 4)


class Scripted(nn.Module):
    """An objective whose alpha follows a script, and whose weight says how often it was asked."""

    def __init__(self, alphas):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.alphas = list(alphas)

    def forward(self, batch, signal, device):
        return torch.zeros(()), torch.tensor(self.alphas.pop(0)) * batch.mask.sum()


class Nothing:
    def signal(self, batch):
        return None


def judge_of(alphas, patience):
    module = Scripted(alphas)
    return module, EarlyStop(
        module, some_sequences(), HELD_OUT, signals=Nothing(), patience=patience
    )


def run_script(alphas, patience):
    """Steps until it stops, and the step whose weights are kept."""
    module, judge = judge_of(alphas, patience)
    for step in range(1, len(alphas) + 1):
        module.weight.data.fill_(step)
        if judge.judge(step):
            break
    judge.restore()
    return step, int(module.weight)


@pytest.mark.parametrize(
    ("alphas", "patience", "stopped", "kept"),
    [
        ([0.1, 0.2, 0.3], 1, 3, 3),
        ([0.3, 0.2, 0.4], 1, 2, 1),
        ([0.3, 0.2, 0.4, 0.1, 0.2], 2, 5, 3),
        ([0.3, 0.3, 0.3], 2, 3, 1),  # no better is no better
        ([0.3, 0.2, 0.1, 0.4, 0.3], 3, 5, 4),
    ],
)
def test_it_stops_after_so_many_evaluations_without_a_better_one(alphas, patience, stopped, kept):
    assert run_script(alphas, patience) == (stopped, kept)


def test_its_state_goes_through_a_checkpoint(tmp_path):
    alphas = [0.2, 0.4, 0.3, 0.1]
    module, judge = judge_of(alphas, patience=2)
    for step in (1, 2, 3):
        module.weight.data.fill_(step)
        assert not judge.judge(step)
    save = judge.copied()
    judge.judge(4)  # what comes later is not in it
    save(tmp_path)
    resumed, again = judge_of(alphas[3:], patience=2)
    again.load(tmp_path)
    assert again.judge(4)
    assert again.evaluations == [
        {"step": float(step), "alpha": pytest.approx(alpha)}
        for step, alpha in enumerate(alphas, start=1)
    ]
    again.restore()
    assert resumed.weight.item() == 2.0
    assert resumed.frozen.item() == 1.0


def test_a_checkpoint_before_the_first_evaluation_is_none_the_worse(tmp_path):
    _, judge = judge_of([0.5], patience=1)
    judge.copied()(tmp_path)
    _, again = judge_of([0.5], patience=1)
    again.load(tmp_path)
    assert not again.judge(2)


# Which prompts are held out


def names(count):
    return [f"{index:016x}" for index in range(count)]


def test_about_one_prompt_in_twenty_is_held_out():
    assert 60 < len(held_out_indices(names(2000))) < 140


def test_a_prompt_is_held_out_whatever_others_there_are():
    ids = names(400)
    chosen = {ids[index] for index in held_out_indices(ids)}
    half = ids[100:300][::-1]
    assert {half[index] for index in held_out_indices(half)} == chosen & set(half)


def test_all_responses_of_a_prompt_go_together():
    ids = [name for name in names(200) for _ in range(2)]
    chosen = held_out_indices(ids)
    assert chosen == sorted(chosen)
    assert [index + 1 for index in chosen[::2]] == chosen[1::2]


@pytest.mark.parametrize("ids", [[], ["one"], ["one", "one"]])
def test_too_few_prompts_are_an_error(ids):
    with pytest.raises(CorpusError, match="early_stop_patience"):
        held_out_indices(ids)


# In a training


def test_what_is_held_out_is_not_trained_on(target, tmp_path):
    sequences = some_sequences()
    kept = [sequence for index, sequence in enumerate(sequences) if index not in HELD_OUT]
    with_judge, outcome = train(
        target, tmp_path / "a", held_out=HELD_OUT, early_stop_patience=9, sequences=sequences
    )
    without, plain = train(target, tmp_path / "b", sequences=kept)
    assert outcome.num_tokens == plain.num_tokens
    assert outcome.best == len(outcome.evaluations) - 1
    assert are_equal(weights_of(with_judge), weights_of(without))


# What is learned of six random texts soon makes the draft worse on others.
SPOILT = {
    "learning_rate": 0.03,
    "warmup_steps": 40,
    "steps": 60,
    "log_steps": 7,
    "checkpoint_steps": 3,
    "early_stop_patience": 3,
    "held_out": HELD_OUT,
}


def test_the_best_weights_are_kept_and_the_run_ends_early(target, tmp_path):
    student, after = make_student(target), {}

    def remember(step, _metrics):
        after[step + 1] = weights_of(student)

    _, outcome = train(target, tmp_path, student=student, on_step=remember, **SPOILT)
    alphas = [entry["alpha"] for entry in outcome.evaluations]
    assert outcome.best == alphas.index(max(alphas)) == len(alphas) - 1 - 3 > 0
    last, kept = (int(outcome.evaluations[place]["step"]) for place in (-1, outcome.best))
    assert max(after) == last == outcome.history[-1]["step"] < 60
    assert are_equal(weights_of(student), after[kept])
    assert not are_equal(weights_of(student), after[last])


@pytest.mark.parametrize("back", [1, 4, 7])
def test_a_killed_run_stops_where_an_unbroken_one_does(target, tmp_path, back):
    """Also when it was killed after the best evaluation: those weights come from the checkpoint."""
    whole, expected = train(target, tmp_path / "whole", **SPOILT)
    last = int(expected.evaluations[-1]["step"])

    def kill(step, _metrics):
        if step + 1 == last - back:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(target, tmp_path / "run", on_step=kill, **SPOILT)
    resumed, outcome = train(target, tmp_path / "run", **SPOILT)
    assert outcome.resumed_at > 0
    assert outcome.evaluations == expected.evaluations
    assert outcome.best == expected.best
    assert are_equal(weights_of(resumed), weights_of(whole))


def test_cached_signals_serve_what_is_held_out_too(target, tmp_path):
    sequences = some_sequences()
    cached = CachedSignals(tmp_path / "signals", target, sequences, max_gb=1.0)
    alphas = []
    for name, signals in (("a", None), ("b", cached)):
        options = {"signals": signals, "sequences": sequences, "early_stop_patience": 9}
        _, outcome = train(target, tmp_path / name, held_out=HELD_OUT, steps=2, **options)
        alphas.append(outcome.evaluations[0]["alpha"])
    assert alphas[0] == pytest.approx(alphas[1], abs=1e-4)
