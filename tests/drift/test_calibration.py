"""How often the verdicts err at their default settings, on changes that were really measured.

Small seeded versions of `python -m benchmarks.calibration`; docs/statistics.md has the figures.
"""

from __future__ import annotations

import json
import re
from functools import cache

import numpy as np
import pytest

from benchmarks.simulation import (
    MEASUREMENTS,
    Measured,
    default_config,
    detectable_drop,
    flag_runs,
    pooled_runs,
    shares,
    shifted,
)
from draftsmith.drift.comparison import compare
from draftsmith.drift.incumbent import judge as judge_incumbent
from draftsmith.drift.verdict import judge as judge_challenger

NUM_RUNS = 250
NUM_DOMAIN_RUNS = 40
NUM_PROMPTS = 200
CONFIG = default_config()
JUDGES = {"incumbent": judge_incumbent, "challenger": judge_challenger}
# One prompt moved by 0.89 at temperature 0; a sample that lacks it is off to one side.
HEAVY = [("light-fine-tune", "0.0", False), ("light-fine-tune", "0.0", True)]
USUAL = [
    ("light-fine-tune, without its largest change", "0.0", False),
    ("light-fine-tune", "0.7", False),
    ("retrained-draft", "0.0", False),
]
each_case = pytest.mark.parametrize("case", HEAVY + USUAL, ids=str)


@cache
def measured(source, temperature):
    name, _, without = source.partition(", ")
    found = Measured.read(name, temperature)
    return found.without_largest() if without else found


@cache
def runs_of(case):
    source, temperature, mirrored = case
    return pooled_runs(
        measured(source, temperature),
        num_runs=NUM_RUNS,
        num_prompts=NUM_PROMPTS,
        seed=0,
        mirrored=mirrored,
    )


def rate(case, name, verdict, *, drop):
    return shares(runs_of(case), JUDGES[name], drop=drop, config=CONFIG).get(verdict, 0.0)


@cache
def recorded(case):
    report = json.loads((MEASUREMENTS / "drift-calibration.json").read_text(encoding="utf-8"))
    (found,) = [
        entry
        for entry in report["pooled"]
        if (entry["source"], entry["temperature"], entry["mirrored"]) == case
    ]
    return found


def flagged(case, *, drops, seed):
    source, temperature, mirrored = case
    return flag_runs(
        measured(source, temperature),
        drops=drops,
        num_runs=NUM_DOMAIN_RUNS,
        seed=seed,
        config=CONFIG,
        mirrored=mirrored,
    )


def test_the_measured_prompts_are_many_and_of_six_domains():
    for source, temperature, _ in HEAVY + USUAL:
        found = measured(source, temperature)
        assert len(found.before) == len(found.after) >= 221
        assert len(set(found.domains)) == 6
        assert abs(found.changes().mean()) < 1e-12
        assert np.allclose(found.changes(mirrored=True), -found.changes())


def test_moving_a_comparison_is_comparing_moved_values():
    rng = np.random.default_rng(0)
    before = {str(index): value for index, value in enumerate(rng.normal(size=50))}
    after = {name: value + rng.normal() for name, value in before.items()}
    moved = {name: value - 0.03 for name, value in after.items()}
    ours, theirs = shifted(compare(before, after, seed=1), -0.03), compare(before, moved, seed=1)
    for key in ("proposed", "reference", "change", "low", "high", "num_prompts"):
        assert getattr(ours, key) == pytest.approx(getattr(theirs, key), abs=1e-12)


@each_case
def test_the_recorded_figures_are_those_of_the_rules_as_they_are(case):
    for entry in recorded(case)["by_drop"]:
        for name in JUDGES:
            for verdict in ("matched", "pass", "drifted", "unknown"):
                ours = rate(case, name, verdict, drop=entry["drop"])
                assert ours == pytest.approx(entry[name].get(verdict, 0.0), abs=0.1)


@each_case
def test_an_unchanged_draft_is_seldom_called_drifted(case):
    assert rate(case, "incumbent", "drifted", drop=0.0) <= 0.05


@each_case
def test_a_drop_of_just_the_margin_is_seldom_let_through(case):
    """Nominally 2.5 %; the heavy tail makes it 5."""
    bound = 0.08 if case in HEAVY else 0.05
    assert rate(case, "incumbent", "matched", drop=CONFIG.margin) <= bound
    assert rate(case, "challenger", "pass", drop=CONFIG.margin) <= bound


@pytest.mark.parametrize("case", USUAL)
def test_an_equal_challenger_is_seldom_blocked(case):
    assert rate(case, "challenger", "drifted", drop=0.0) <= 0.05


@each_case
def test_a_drop_of_two_points_is_found_or_the_drop_that_is_found_is_stated(case):
    found = rate(case, "incumbent", "drifted", drop=0.02)
    detectable = detectable_drop(runs_of(case), judge_incumbent, power=0.95, config=CONFIG)
    assert found >= 0.93 if case in USUAL else detectable <= 0.03
    (stated,) = [
        entry["incumbent"]
        for entry in recorded(case)["detectable_drop"]
        if (entry["num_prompts"], entry["power"]) == (NUM_PROMPTS, 0.95)
    ]
    assert detectable == pytest.approx(stated, abs=0.003)


@each_case
def test_a_drop_of_four_points_is_found_by_both_verdicts(case):
    for name in JUDGES:
        assert rate(case, name, "drifted", drop=0.04) >= 0.98


@each_case
def test_domains_that_did_not_change_are_flagged_no_more_than_nominally(case):
    runs = flagged(case, drops={}, seed=0)
    assert sum(map(bool, runs)) / NUM_DOMAIN_RUNS <= (0.1 if case in HEAVY else 0.05)


@pytest.mark.parametrize("case", USUAL)
def test_the_one_domain_that_fell_is_flagged_and_no_other(case):
    runs = flagged(case, drops={"maths": 0.08}, seed=1)
    assert sum("maths" in run for run in runs) / NUM_DOMAIN_RUNS >= 0.95
    assert sum(bool(run - {"maths"}) for run in runs) / NUM_DOMAIN_RUNS <= 0.1


# The rows of the first table of docs/statistics.md.
ROWS = {
    "light fine-tune, temperature 0": ("light-fine-tune", "0.0", False),
    "the same, mirrored": ("light-fine-tune", "0.0", True),
    "the same, without its largest change": (
        "light-fine-tune, without its largest change",
        "0.0",
        False,
    ),
    "light fine-tune, temperature 0.7": ("light-fine-tune", "0.7", False),
    "retrained draft, temperature 0": ("retrained-draft", "0.0", False),
    "retrained draft, temperature 0.7": ("retrained-draft", "0.7", False),
}
DOCUMENT = (MEASUREMENTS.parent / "statistics.md").read_text(encoding="utf-8")
POWERS = (0.8, 0.95)


def percent(case, name, verdict, *, drop):
    (entry,) = [e for e in recorded(case)["by_drop"] if e["drop"] == pytest.approx(drop)]
    return 100 * entry[name].get(verdict, 0.0)


def found_drops(case, name):
    by_power = {
        entry["power"]: entry[name]
        for entry in recorded(case)["detectable_drop"]
        if entry["num_prompts"] == NUM_PROMPTS
    }
    return [by_power[power] for power in POWERS]


def require_shown(cell, values):
    """The numbers of a cell are these values, each to as many decimals as it has."""
    shown = re.findall(r"\d+(?:\.(\d+))?", cell), re.findall(r"\d+(?:\.\d+)?", cell)
    for decimals, number, value in zip(*shown, values, strict=True):
        assert float(number) == pytest.approx(value, abs=0.501 * 10 ** -len(decimals)), cell


@pytest.mark.parametrize("row", ROWS)
def test_the_documents_first_table_shows_the_recorded_figures(row):
    case = ROWS[row]
    (line,) = [line for line in DOCUMENT.splitlines() if line.startswith(f"| {row} |")]
    spread, *shares, found = (cell.strip() for cell in line.strip("|").split("|")[1:])
    require_shown(spread, [recorded(case)["spread"]])
    expected = [
        percent(case, "incumbent", "drifted", drop=0.0),
        percent(case, "challenger", "drifted", drop=0.0),
        percent(case, "challenger", "pass", drop=CONFIG.margin),
        percent(case, "incumbent", "drifted", drop=0.02),
        percent(case, "incumbent", "drifted", drop=0.04),
    ]
    for cell, value in zip(shares, expected, strict=True):
        require_shown(cell, [value])
    require_shown(found, found_drops(case, "incumbent"))


def test_the_document_names_the_rows_in_which_the_challenger_test_finds_other_drops():
    (told,) = re.findall(r"For the challenger test it is (.*?)\. All figures", DOCUMENT, re.DOTALL)
    stated = re.findall(r"([\d.]+ / [\d.]+) in the (\w+)", told)
    assert [place for _, place in stated] == ["first", "second", "third"]
    for place, case in enumerate(ROWS.values()):
        challenger = found_drops(case, "challenger")
        if place < len(stated):
            require_shown(stated[place][0], challenger)
            assert challenger != found_drops(case, "incumbent")
        else:
            assert challenger == found_drops(case, "incumbent")
