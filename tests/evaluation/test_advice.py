"""Advice from a small pair: measured, checked by decoding, taken up again."""

from __future__ import annotations

import itertools
import json

import pytest

from draftsmith.artifacts import read_json, write_json
from draftsmith.decoding import Lengths
from draftsmith.errors import EvidenceError
from draftsmith.evaluation.advice import Plan, advice_report, verdict
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.cost_model import Survival
from draftsmith.evaluation.sweep import Axes, CostSweep
from draftsmith.report.terminal import advice_tables, alternatives_table, prediction_line

SURVIVED = Survival([0.5, 0.3], copied_share=0.2, copied=[0.7, 0.6])
HOPELESS = Survival([0.0, 0.0])
PLAN = Plan((1, 2), (16, 40), (4, 8), Lengths(2, 2), seconds=1.0)


@pytest.fixture(scope="module")
def greedy(rollouts):
    return [rollout for rollout in rollouts if rollout.temperature == 0]


@pytest.fixture(scope="module")
def pair(target, drafts, stop_ids):
    return Contestants(target, drafts["trimmed"], stop_ids, lookup_length=2)


@pytest.fixture(scope="module")
def report(pair, greedy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("advice")
    return advice_report(pair, {0.0: SURVIVED, 0.7: SURVIVED}, greedy, plan=PLAN, folder=folder)


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
    assert checked["error_bar"] >= checked["median_error"] >= abs(checked["median_signed_error"])
    for trial in trials:
        assert trial["error"] == pytest.approx(trial["predicted"] / trial["measured"] - 1)
        low, high = trial["interval"]
        assert 0 < low <= trial["measured"] <= high
        assert trial["measured_tokens_a_round"] >= 1
    assert checked["sign_errors"] == sum(trial["sign_error"] for trial in trials)


def test_a_second_run_measures_nothing_again(pair, greedy, tmp_path):
    arguments = (pair, {0.0: SURVIVED}, greedy)
    first = advice_report(*arguments, plan=PLAN, folder=tmp_path)
    held = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = advice_report(*arguments, plan=PLAN, folder=tmp_path)
    assert second["measured_costs"][0]["verify_ms"] == first["measured_costs"][0]["verify_ms"]
    assert second["alternatives"][:2] == first["alternatives"][:2]
    assert {path: path.stat().st_mtime_ns for path in held} == held


def test_where_no_draft_pays_a_faster_alternative_is_named_as_such(pair, greedy, tmp_path):
    arguments = {"plan": PLAN, "folder": tmp_path}
    advice_report(pair, {0.0: HOPELESS}, greedy, **arguments)
    for path in tmp_path.glob("alternative-int8-*"):
        kept = read_json(path)
        sure = {"mean": 1.5, "low": 1.2, "high": 1.8, "num_prompts": 4}
        kept |= {"reading_ratio": sure, "decoding_ratio": sure}
        write_json(path, kept)
    found = advice_report(pair, {0.0: HOPELESS}, greedy, **arguments)
    assert {entry["verdict"] for entry in found["workloads"]} == {"quantise instead"}
    ratio = found["workloads"][0]["instead"]["ratio"]
    assert ratio == pytest.approx({"mean": 1.5, "low": 1.2, "high": 1.8})
    assert "int8 1.50" in str(next(advice_tables(found)).columns[2]._cells)


def test_without_measured_acceptance_there_is_no_advice(pair, greedy, tmp_path):
    with pytest.raises(EvidenceError, match="dvc repro"):
        advice_report(pair, {}, greedy, plan=PLAN, folder=tmp_path)


def test_the_tables_hold_every_workload_and_every_alternative(report):
    tables = list(advice_tables(report))
    assert [table.row_count for table in tables] == [4, 4]
    assert [len(table.columns) for table in tables] == [4, 4]
    assert alternatives_table(report).row_count == len(report["alternatives"]) >= 3
    assert str(report["prediction"]["num_trials"]) in prediction_line(report)


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
    costs = CostSweep(target, drafts["trimmed"], axes, 3, tmp_path).run(seconds=0.0)
    assert set(costs.rounds.cells) == set(itertools.product((1, 3), (8, 24)))
    assert set(costs.prefill) == set(costs.rounds.cells)
    assert costs.judging.greedy > 0
    assert costs.judging.sampled > 0


def test_a_kept_cell_is_read_and_not_measured(target, drafts, tmp_path):
    sweep = CostSweep(target, drafts["trimmed"], Axes((1,), (8,)), 3, tmp_path)
    sweep.run(seconds=0.0)
    kept = tmp_path / "cost-1-8.json"
    cell = read_json(kept)
    cell["rounds"]["draft_step_ms"] = 1234.5
    write_json(kept, cell)
    assert sweep.run(seconds=0.0).rounds.cells[1, 8].draft_step_ms == 1234.5


@pytest.mark.parametrize(
    ("speedup", "told"),
    [(1.3, "speculate"), (1.05, "about even"), (1.0, "do not speculate")],
)
def test_a_gain_within_the_error_is_about_even(speedup, told):
    assert verdict(speedup, 0.1) == told
