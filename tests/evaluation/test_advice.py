"""Advice from a small pair: measured, checked by decoding, taken up again."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from draftsmith.artifacts import read_json, write_json
from draftsmith.decoding import Lengths
from draftsmith.errors import EvidenceError
from draftsmith.evaluation.advice import (
    Plan,
    advice_report,
    conversations,
    error_bar,
    verdict,
)
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.cost_model import Survival
from draftsmith.evaluation.sweep import Axes, CostSweep, Trial
from draftsmith.evaluation.workload import Workload
from draftsmith.report.terminal import advice_tables, prediction_line

SURVIVED = Survival([0.5, 0.3], copied_share=0.2, copied=[0.7, 0.6])
PLAN = Plan((1, 2), (16, 40), (4, 8), Lengths(2, 2), seconds=1.0)


@pytest.fixture
def pair(target, drafts, stop_ids):
    return Contestants(target, drafts["trimmed"], stop_ids, lookup_length=2)


@pytest.fixture
def report(pair, rollouts, tmp_path):
    return advice_report(pair, {0.0: SURVIVED, 0.7: SURVIVED}, rollouts, plan=PLAN, folder=tmp_path)


def test_every_workload_of_the_measured_grid_is_advised_on(report):
    cells = {(e["batch_size"], e["context"], e["new_tokens"]) for e in report["workloads"]}
    assert cells == set(itertools.product((1, 2), (16, 40), (4, 8)))
    assert {entry["temperature"] for entry in report["workloads"]} == {0.0, 0.7}
    for entry in report["workloads"]:
        is_none = entry["draft_length"] == 0
        assert is_none == (entry["speedup"] == 1.0)
        assert entry["draft_length"] <= 2
    json.dumps(report, allow_nan=False)


def test_predictions_are_held_against_what_was_decoded(report):
    checked, trials = report["prediction"], report["trials"]
    assert checked["num_trials"] == len(trials) >= 1
    assert checked["error_bar"] >= checked["median_error"] >= 0
    assert all(trial["measured"] > 0 for trial in trials)


def test_a_second_run_measures_nothing_again(pair, rollouts, tmp_path):
    arguments = (pair, {0.0: SURVIVED}, rollouts)
    first = advice_report(*arguments, plan=PLAN, folder=tmp_path)
    held = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = advice_report(*arguments, plan=PLAN, folder=tmp_path)
    assert second["measured_costs"][0]["verify_ms"] == first["measured_costs"][0]["verify_ms"]
    assert {path: path.stat().st_mtime_ns for path in held} == held


def test_without_measured_acceptance_there_is_no_advice(pair, rollouts, tmp_path):
    with pytest.raises(EvidenceError, match="dvc repro"):
        advice_report(pair, {}, rollouts, plan=PLAN, folder=tmp_path)


def test_the_tables_hold_every_workload(report):
    tables = list(advice_tables(report))
    assert [table.row_count for table in tables] == [4, 4]
    assert [len(table.columns) for table in tables] == [4, 4]
    assert str(report["prediction"]["num_trials"]) in prediction_line(report)


@pytest.mark.parametrize("num_tokens", [5, 60, 200])
def test_prompts_of_any_length_are_real_texts_that_end_with_a_question(rollouts, num_tokens):
    prompts = list(itertools.islice(conversations(rollouts, num_tokens), 3))
    assert [len(prompt) for prompt in prompts] == [num_tokens] * 3
    endings = {tuple(rollout.prompt_ids[-4:]) for rollout in rollouts}
    assert all(tuple(prompt[-4:]) in endings for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) > 1


def test_grids_grow_from_their_corners_and_end_whole():
    axes = Axes((1, 4, 16, 64), (64, 256, 1024))
    grids = list(axes.grids())
    assert grids[0] == ((1, 64), (64, 1024))
    assert grids[-1] == (axes.rows, axes.contexts)
    for (rows, contexts), (more_rows, more_contexts) in itertools.pairwise(grids):
        assert set(rows) <= set(more_rows)
        assert set(contexts) <= set(more_contexts)


def test_without_time_the_corners_alone_are_measured(target, drafts, tmp_path):
    axes = Axes((1, 2, 3), (8, 16, 24))
    sweep = CostSweep(target, drafts["trimmed"].model, axes, 3, tmp_path)
    costs = sweep.run(seconds=0.0)
    assert set(costs.rounds.cells) == set(itertools.product((1, 3), (8, 24)))
    assert set(costs.prefill) == set(costs.rounds.cells)


def test_a_kept_cell_is_read_and_not_measured(target, drafts, tmp_path):
    sweep = CostSweep(target, drafts["trimmed"].model, Axes((1,), (8,)), 3, tmp_path)
    sweep.run(seconds=0.0)
    (kept,) = tmp_path.iterdir()
    cell = read_json(kept)
    cell["rounds"]["draft_step_ms"] = 1234.5
    write_json(kept, cell)
    assert sweep.run(seconds=0.0).rounds.cells[1, 8].draft_step_ms == 1234.5


@pytest.mark.parametrize(
    ("predicted", "measured", "is_wrong"),
    [(1.2, 1.3, False), (0.9, 1.2, True), (1.1, 0.8, True), (0.98, 1.05, False)],
)
def test_a_clear_gain_that_was_taken_for_a_loss_is_a_sign_error(predicted, measured, is_wrong):
    trial = Trial(Workload(1, 8, 8, 0.0), Lengths(1, 0), predicted, measured)
    assert trial.has_sign_error == is_wrong


def test_the_error_bar_holds_nine_of_ten_trials():
    workload = Workload(1, 8, 8, 0.0)
    trials = [Trial(workload, Lengths(1, 0), 1 + n / 100, 1.0) for n in range(11)]
    assert error_bar(trials) == pytest.approx(0.09)
    assert error_bar([]) == math.inf


@pytest.mark.parametrize(
    ("speedup", "told"),
    [(1.3, "speculate"), (1.05, "about even"), (1.0, "do not speculate")],
)
def test_a_gain_within_the_error_is_about_even(speedup, told):
    assert verdict(speedup, 0.1) == told
