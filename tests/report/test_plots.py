"""What `dvc plots` draws: every bar says of which recipe it is."""

from __future__ import annotations

import copy
import csv
from pathlib import Path

import pytest
import yaml

from draftsmith.report.plots import write_benchmark_plots, write_evaluation_plots

ROOT = Path(__file__).parents[2]


@pytest.fixture
def drawn(tmp_path, reports):
    """Writes the plots of some recipes; returns the points of each plot of dvc.yaml."""

    def call(*recipes):
        for name in ("evaluation", "benchmark"):
            (entry,) = reports[name]["recipes"].values()
            reports[name]["recipes"] = {recipe: copy.deepcopy(entry) for recipe in recipes}
        write_evaluation_plots(reports["evaluation"] | {"temperatures": ["0.0"]}, tmp_path)
        write_benchmark_plots(reports["benchmark"], tmp_path)
        found = {}
        for plot in yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["plots"]:
            ((name, axes),) = plot.items()
            ((path, label),) = axes["y"].items()
            with (tmp_path / Path(path).relative_to("reports")).open(encoding="utf-8") as stream:
                rows = list(csv.DictReader(stream))
            found[name] = [(row[label], float(row[axes["x"]])) for row in rows]
        return found

    return call


def test_the_only_recipe_needs_no_name(drawn):
    found = drawn("small")
    assert found["survival"] == [("1", 0.41), ("2", 0.17), ("3", 0.07)]
    assert found["speedup"][0] == ("1", 1.19)
    assert len(found["alpha"]) == 6


def test_several_recipes_are_told_apart_in_every_plot(drawn):
    for points in drawn("small", "large").values():
        labels = [label for label, _ in points]
        assert len(set(labels)) == len(labels)
        assert {label.rpartition(" ")[2] for label in labels} == {"(small)", "(large)"}
