"""The benchmark of processes on a tiny project: what is measured and kept, not what it comes to."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks import processes
from draftsmith.artifacts import read_json
from tests.distillation.test_processes import make_project

ARMS = {"one": (1, 1), "two": (2, 1)}
SEEN = {"threads": 1, "anonymous_gb": 1.0, "peak_gb": 2.0, "loss": 0.5}


@pytest.mark.slow
def test_both_arms_train_alike_and_no_run_is_repeated(tmp_path, monkeypatch, capsys):
    project, out = tmp_path / "project", tmp_path / "processes.json"
    make_project(project, "online")
    monkeypatch.setattr(processes, "ARMS", ARMS)
    arguments = ["--project", str(project), "--steps", "8", "--rounds", "1"]
    arguments += ["--work", str(tmp_path / "work"), "--out", str(out)]
    assert processes.main(arguments) == 0
    report = read_json(out)
    one, two = report["arms"]["one"], report["arms"]["two"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
    assert one["speedup"] == 1.0
    assert two["speedup"] == two["tokens_per_s"] / one["tokens_per_s"]
    assert [len(arm["rounds"][0]) for arm in (one, two)] == [1, 2]
    for seen in one["rounds"][0] + two["rounds"][0]:
        assert seen["threads"] == 1
        assert 0 < seen["anonymous_gb"] < seen["peak_gb"]
    assert "to the first" in capsys.readouterr().out

    def refused(*_, **__):
        raise AssertionError("a finished run was started again")

    monkeypatch.setattr(subprocess, "run", refused)
    monkeypatch.setattr(processes.provenance, "collect", lambda _seed: {})
    assert processes.main(arguments) == 0
    assert read_json(out)["arms"] == report["arms"]


def test_an_arm_stands_for_the_median_of_its_rounds_and_the_largest_of_its_processes():
    def rounds(*speeds):
        return [
            [SEEN | {"tokens_per_s": s}, SEEN | {"peak_gb": s, "tokens_per_s": 0.0}] for s in speeds
        ]

    arms = processes.summary({"a": rounds(10.0, 20.0, 60.0), "b": rounds(30.0)})
    assert (arms["a"]["tokens_per_s"], arms["a"]["speedup"]) == (20.0, 1.0)
    assert (arms["b"]["tokens_per_s"], arms["b"]["speedup"]) == (30.0, 1.5)
    assert (arms["a"]["peak_gb"], arms["a"]["anonymous_gb"]) == (60.0, 1.0)


def test_the_first_steps_do_not_count():
    assert list(processes.steady(range(8))) == [2, 3, 4, 5, 6, 7]
    assert list(processes.steady([5.0])) == [5.0]


def test_a_project_without_settings_is_one_clear_error(tmp_path, capsys):
    assert processes.main(["--project", str(tmp_path)]) == 2
    assert "build/config.yaml" in capsys.readouterr().err
