"""Advice from a small pair: measured, checked by decoding, taken up again, within its time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import replace

import pytest

from draftsmith.artifacts import read_json, write_json
from draftsmith.decoding import Lengths, Tree
from draftsmith.errors import EvidenceError
from draftsmith.evaluation import advice, alternatives, sweep
from draftsmith.evaluation.advice import Plan, advice_report
from draftsmith.evaluation.advice_record import advice_record, verdict
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.best_choice import Advice
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts, Survival
from draftsmith.evaluation.deadline import Deadline
from draftsmith.evaluation.guesses import Guesses, with_trees
from draftsmith.evaluation.sweep import Axes, CostSweep
from draftsmith.evaluation.trial_plan import Planned, plan_trials
from draftsmith.evaluation.trials import Seen, TrialRun
from draftsmith.evaluation.workload import NOTHING, Choice, DeviceCosts, PrefillMs, Workload
from draftsmith.report.terminal import advice_tables, alternatives_table, prediction_line
from tests.evaluation.clock import Clock

SURVIVED = Survival([0.5, 0.3], copied_share=0.2, copied=[0.7, 0.6], alpha=0.5)
HOPELESS = Survival([0.0, 0.0])
TREE = Tree((0, 0, 0))
NO_TIME = Deadline(-1.0, Clock())
NO_END = Deadline.after(1e9, Clock())
PLAN = Plan((1, 2), (16, 40), (4, 8), Lengths(2, 2), NO_TIME)
NUM_TRIALS = 12  # that are decoded: the others are told by test_trials


@pytest.fixture(scope="module", autouse=True)
def _few_trials():
    def few(*arguments, **options):
        return plan_trials(*arguments, **options)[:NUM_TRIALS]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "plan_trials", few)
        yield


@pytest.fixture(scope="module")
def greedy(rollouts):
    return [rollout for rollout in rollouts if rollout.temperature == 0]


@pytest.fixture(scope="module")
def pair(target, drafts, stop_ids):
    return Contestants(target, drafts["trimmed"], stop_ids, lookup_length=2)


@pytest.fixture(scope="module")
def report(pair, greedy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("advice")
    guesses = Guesses([[0.5, 0.1, 0.1], [0.6]], [100, 50])
    survivals = {t: with_trees(SURVIVED, guesses, [TREE]) for t in (0.0, 0.7)}
    plan = replace(PLAN, deadline=NO_END)
    return advice_report(pair, survivals, greedy, plan=plan, folder=folder)


def test_every_workload_of_the_measured_grid_is_advised_on(report):
    cells = {(e["batch_size"], e["context"], e["new_tokens"]) for e in report["workloads"]}
    assert cells == set(itertools.product((1, 2), (16, 40), (4, 8)))
    assert {entry["temperature"] for entry in report["workloads"]} == {0.0, 0.7}
    for entry in report["workloads"]:
        is_none = entry["draft_length"] == entry["copy_length"] == 0
        assert is_none == (entry["speedup"] == 1.0)
        assert entry["draft_length"] <= 2
        assert entry["tree"] in ([], list(TREE.parents))
    assert report["left_out"] == []
    json.dumps(report, allow_nan=False)


def test_predictions_are_held_against_what_was_decoded(report):
    checked, trials = report["prediction"], report["trials"]
    assert checked["num_trials"] == len(trials) == NUM_TRIALS
    assert checked["error_bar"] >= checked["median_error"] >= abs(checked["median_signed_error"])
    for trial in trials:
        assert trial["error"] == pytest.approx(trial["predicted"] / trial["measured"] - 1)
        assert trial["iid_error"] == pytest.approx(trial["iid_predicted"] / trial["measured"] - 1)
        low, high = trial["interval"]
        assert 0 < low <= trial["measured"] <= high
        assert trial["measured_tokens_a_round"] >= 1
    assert checked["sign_errors"] == sum(trial["sign_error"] for trial in trials)
    assert checked["median_iid_error"] > 0


def test_a_second_run_measures_nothing_again(pair, greedy, tmp_path):
    def run(deadline):
        plan = replace(PLAN, deadline=deadline)
        return advice_report(pair, {0.0: SURVIVED}, greedy, plan=plan, folder=tmp_path)

    first = run(NO_END)
    held = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = run(NO_TIME)
    assert second["measured_costs"][0]["verify_ms"] == first["measured_costs"][0]["verify_ms"]
    assert second["alternatives"] == first["alternatives"]
    assert second["trials"] == first["trials"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == held


def slow(monkeypatch, clock, *, cell_s, group_s):
    """Let measuring last, by a clock of the test; nothing is decoded."""
    real_costs, decoded = sweep.forward_costs, []

    def costs(*arguments, batch_size, context, repeats, **more):
        clock.passes(cell_s * batch_size * context / 16)
        found = real_costs(*arguments, batch_size=1, context=4, repeats=1, **more)
        return dataclasses.replace(
            found, target_step_ms=1000.0, verify_ms=dict.fromkeys(found.verify_ms, 1000.0)
        )

    def comparison(self, model, size, at, deadline):
        decoded.append(size)
        clock.passes(9 * self.group_s(size))
        sure = {"mean": 1.0, "low": 1.0, "high": 1.0, "num_prompts": 2}
        ratios = ("ratio", "reading_ratio", "decoding_ratio", "ratio_with_drafts")
        facts = {"batch_size": size, "keeps_the_targets_law": False}
        return facts | dict.fromkeys(ratios, sure)

    def trial(self, planned):
        decoded.append(planned)
        clock.passes(planned.seconds)
        return Seen(1.0, 0.9, 1.1, 1.5)

    def ceilings(*arguments):
        clock.passes(group_s)
        return real_ceilings(*arguments)

    real_ceilings = advice.measure_ceilings
    monkeypatch.setattr(advice, "measure_ceilings", ceilings)
    monkeypatch.setattr(sweep, "forward_costs", costs)
    monkeypatch.setattr(sweep, "reading_ms", lambda *_, rows, context: PrefillMs(1.0, 1.0))
    monkeypatch.setattr(alternatives.AlternativeRun, "_compare", comparison)
    monkeypatch.setattr(TrialRun, "_decode", trial)
    return decoded


@pytest.mark.parametrize("budget", [5.0, 30.0, 120.0, 600.0, 3600.0])
def test_all_of_it_ends_within_the_budget(pair, greedy, tmp_path, monkeypatch, budget):
    clock = Clock(step=0.001)
    decoded = slow(monkeypatch, clock, cell_s=3.0, group_s=1.0)
    plan = replace(PLAN, deadline=Deadline.after(budget, clock))
    found = advice_report(pair, {0.0: SURVIVED}, greedy, plan=plan, folder=tmp_path)
    assert clock.now <= budget
    told = [entry["left_out"] for entry in found["alternatives"] if "left_out" in entry]
    assert bool(found["left_out"]) == (budget < 120)
    assert bool(told) == (budget < 3600)
    num_decoded = sum(isinstance(item, Planned) for item in decoded)
    assert found["prediction"]["num_trials"] == num_decoded
    if budget == 5.0:
        assert decoded == []
        assert all(entry["verdict"] == "about even" for entry in found["workloads"])


def test_where_no_draft_pays_a_faster_alternative_is_named_as_such(pair, greedy, tmp_path):
    arguments = {"plan": replace(PLAN, deadline=NO_END), "folder": tmp_path}
    advice_report(pair, {0.0: HOPELESS}, greedy, **arguments)
    for path in tmp_path.glob("alternative-int8-*"):
        kept = read_json(path)
        # Far above what noise can make of costs that are really measured.
        sure = {"mean": 15.0, "low": 12.0, "high": 18.0, "num_prompts": 4}
        kept |= {"reading_ratio": sure, "decoding_ratio": sure}
        write_json(path, kept)
    found = advice_report(pair, {0.0: HOPELESS}, greedy, **arguments)
    assert {entry["verdict"] for entry in found["workloads"]} == {"quantise instead"}
    ratio = found["workloads"][0]["instead"]["ratio"]
    assert ratio == pytest.approx({"mean": 15.0, "low": 12.0, "high": 18.0})
    assert "int8 15.00" in str(next(advice_tables(found)).columns[2]._cells)


def test_an_alternative_that_beats_the_drafts_is_named_beside_them(report):
    entry = next(e for e in report["workloads"] if e["new_tokens"] == 8)
    sure = {"mean": 3.0, "low": 2.9, "high": 3.1}
    beaten = entry | {
        "instead": {"scheme": "int8", "ratio": sure},
        "draft_length": 1,
        "speedup": 1.25,
        "verdict": "quantise instead",
    }
    (table,) = advice_tables(report | {"workloads": [beaten]})
    assert "int8 3.00, drafts 1.25" in table.columns[2]._cells


@pytest.mark.parametrize(("low", "is_named"), [(1.2, False), (1.3, True)])
def test_an_alternative_is_recorded_where_it_surely_beats_what_drafts_promise(low, is_named):
    rounds = RoundCosts((1,), (16,), {(1, 16): ForwardCosts(1.0, 0.1, {1: 1.0, 2: 1.0})})
    costs = DeviceCosts(rounds, {(1, 16): PrefillMs(0.1, 0.1)})
    ratio = {"mean": 1.4, "low": low, "high": 1.5}
    int8 = {"scheme": "int8", "batch_size": 1, "keeps_the_targets_law": False}
    int8 |= {"reading_ratio": ratio, "decoding_ratio": ratio}
    found = advice_record(advised(Choice(1, 0), 1.25), 0.1, costs, [int8])
    assert (found["instead"] is not None) == is_named
    assert found["verdict"] == ("quantise instead" if is_named else "speculate")
    assert (found["draft_length"], found["speedup"]) == (1, 1.25)


def test_without_measured_acceptance_there_is_no_advice(pair, greedy, tmp_path):
    with pytest.raises(EvidenceError, match="dvc repro"):
        advice_report(pair, {}, greedy, plan=PLAN, folder=tmp_path)


def test_answers_that_leave_no_room_for_a_prompt_are_left_out_and_said_to_be(
    pair, greedy, tmp_path
):
    most = pair.target.config.max_position_embeddings
    plan = replace(PLAN, contexts=(16, most), new_tokens=(4, most))
    found = advice_report(pair, {0.0: SURVIVED}, greedy, plan=plan, folder=tmp_path)
    assert {entry["new_tokens"] for entry in found["workloads"]} == {4}
    assert any(f"answers of {most} tokens" in what for what in found["left_out"])
    assert f"answers of {most} tokens" in prediction_line(found)


def test_models_that_hold_no_answer_at_all_are_refused(pair, greedy, tmp_path):
    most = pair.target.config.max_position_embeddings
    plan = replace(PLAN, new_tokens=(most,))
    with pytest.raises(EvidenceError, match=f"hold {most} tokens"):
        advice_report(pair, {0.0: SURVIVED}, greedy, plan=plan, folder=tmp_path)


def test_the_tables_hold_every_workload_and_every_alternative(report):
    tables = list(advice_tables(report))
    assert [table.row_count for table in tables] == [4, 4]
    assert [len(table.columns) for table in tables] == [4, 4]
    assert alternatives_table(report).row_count == len(report["alternatives"]) >= 3
    assert str(report["prediction"]["num_trials"]) in prediction_line(report)


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({"draft_length": 2, "verdict": "speculate"}, "1.25 at 2"),
        ({"draft_length": 2, "verdict": "about even"}, "1.25 at 2?"),
        ({"draft_length": 0, "copy_length": 3, "verdict": "copies alone"}, "1.25 copies alone"),
        ({"draft_length": 1, "tree": [0, 0], "verdict": "speculate"}, "1.25 by a tree of 2"),
        ({"draft_length": 0, "speedup": 1.0, "verdict": "do not speculate"}, "do not"),
        ({"draft_length": 0, "speedup": 1.0, "verdict": "about even"}, "do not?"),
    ],
)
def test_a_table_tells_what_to_do(report, told, shown):
    entry = report["workloads"][0] | {"copy_length": 0, "tree": [], "speedup": 1.25} | told
    (table,) = advice_tables(report | {"workloads": [entry | {"instead": None}]})
    assert list(table.columns[2]._cells) == [shown]


def test_too_few_trials_are_said_to_be_too_few(report):
    few = {"num_trials": 3, "median_error": 0.05, "error_bar": None, "sign_errors": 0}
    assert "too few to say more" in prediction_line(report | {"prediction": few})


def test_grids_grow_from_their_cheapest_cell_over_the_corners_and_end_whole():
    axes = Axes((1, 4, 16, 64), (64, 256, 1024))
    grids = list(axes.grids())
    assert grids[0] == ((1,), (64,))
    assert ((1, 64), (64, 1024)) in grids[:3]
    assert grids[-1] == (axes.rows, axes.contexts)
    for (rows, contexts), (more_rows, more_contexts) in itertools.pairwise(grids):
        assert set(rows) <= set(more_rows)
        assert set(contexts) <= set(more_contexts)


def test_without_time_one_cell_alone_is_measured_and_the_bar_is_full(target, drafts, tmp_path):
    axes, told = Axes((1, 2, 3), (8, 16, 24)), []
    sweep_of_axes = CostSweep(target, drafts["trimmed"], axes, 3, tmp_path)
    costs = sweep_of_axes.run(NO_TIME, on_done=told.append)
    assert set(costs.rounds.cells) == set(costs.prefill) == {(1, 8)}
    assert costs.judging.greedy > 0
    assert costs.judging.sampled > 0
    assert sum(told) == 9


def test_a_kept_cell_is_read_and_not_measured(target, drafts, tmp_path):
    sweep_of_cell = CostSweep(target, drafts["trimmed"], Axes((1,), (8,)), 3, tmp_path)
    sweep_of_cell.run(NO_TIME)
    kept = tmp_path / "cost-1-8.json"
    cell = read_json(kept)
    cell["rounds"]["draft_step_ms"] = 1234.5
    write_json(kept, cell)
    assert sweep_of_cell.run(NO_TIME).rounds.cells[1, 8].draft_step_ms == 1234.5


def advised(choice, speedup):
    return Advice(Workload(1, 16, 8, 0.0), choice, speedup, 1.0, 1.0, None, 1)


@pytest.mark.parametrize(
    ("choice", "speedup", "told"),
    [
        (Choice(1, 0), 1.3, "speculate"),
        (Choice(1, 0), 1.05, "about even"),
        (Choice(0, 2), 1.3, "copies alone"),
        (NOTHING, 1.0, "do not speculate"),
    ],
)
def test_a_gain_within_the_error_is_about_even(choice, speedup, told):
    assert verdict(advised(choice, speedup), 0.1) == told


@pytest.mark.parametrize(("choice", "speedup"), [(Choice(1, 0), 3.0), (NOTHING, 1.0)])
def test_where_too_little_was_checked_nothing_is_sure(choice, speedup):
    assert verdict(advised(choice, speedup), math.inf) == "about even"
