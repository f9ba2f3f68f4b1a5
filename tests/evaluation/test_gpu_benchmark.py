"""The accelerator's benchmark in a shrunken form, as it is started where little is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from draftsmith.decoding import graphed
from draftsmith.errors import DecodingError
from tests.decoding.test_steps import on_cpu
from tests.tiny_target import write_prompts

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("mlflow", "dvc", "hydra", "datasets", "omegaconf", "typer", "rich")
SMALL = ("--max-draft-length", "2", "--max-new-tokens", "8")
QUICK = ("--budget", "1000", "--passes", "3")  # what ends a test is work, not time
TINY = ("--shape", "tiny", "--prompt-tokens", "12", *SMALL)


@pytest.fixture(scope="module")
def poison(tmp_path_factory):
    """A folder of modules that cannot be imported."""
    folder = tmp_path_factory.mktemp("poison")
    for name in ABSENT:
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is not installed here')\n")
    return folder


@pytest.mark.slow
def test_it_runs_without_the_pipelines_packages_and_says_what_it_measured(poison, tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu", *TINY, "--out", str(out)),
            *("--batch-sizes", "1", "2", "--temperatures", "0", "0.8", *QUICK),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(poison), str(ROOT / "src")]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["device"]["name"] in done.stdout
    assert "system cost only" in done.stdout
    assert report["pair"]["stated_acceptance"] == 0.7
    places = [(cell["batch_size"], cell["temperature"]) for cell in report["cells"]]
    assert places == [(1, 0.0), (1, 0.8), (2, 0.0), (2, 0.8)]
    for cell in report["cells"]:
        check(cell, done.stdout)


def check(cell, text):
    arms = {arm["name"]: arm for arm in cell["arms"]}
    for name in ("engine, no draft", "engine, draft 1", "engine, draft 2", "engine, adaptive"):
        assert arms[name]["median_tokens_per_s"] > 0
        assert arms[name]["tau"] >= 1
        assert name in text
    assert any("assisted" in name for name in arms) == (cell["batch_size"] == 1)
    assert arms["engine, no draft"]["speedup"]["mean"] == pytest.approx(1)
    assert arms["engine, draft 2"]["predicted_speedup"] > 0
    assert set(cell["costs"]["verify_ms"]) == {"1", "2", "3"}
    assert cell["refused"] == {gpu.GRAPHED: "no CUDA device"}
    assert cell["passes"] == 3


def test_a_real_pair_is_measured_with_its_own_stops_and_copies(checkpoint, draft_folders, tmp_path):
    out = tmp_path / "gpu.json"
    write_prompts(tmp_path / "prompts.jsonl")
    pair = ("--target", str(checkpoint), "--draft", str(draft_folders["trimmed"]))
    cell = ("--batch-sizes", "1", "--temperatures", "0", *QUICK)
    cell += ("--prompts", str(tmp_path / "prompts.jsonl"))
    assert gpu.main([*pair, *SMALL, *cell, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    (measured,) = report["cells"]
    names = {arm["name"] for arm in measured["arms"]}
    assert "engine, adaptive, copies first" in names
    assert report["pair"]["target_digest"]


def test_where_steps_can_be_captured_all_of_ours_are_and_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "steps_for", lambda device: graphed(on_cpu))
    out = tmp_path / "gpu.json"
    cell = ("--batch-sizes", "3", "--temperatures", "0", *QUICK, "--max-draft-length", "1")
    assert gpu.main([*TINY, *cell, "--out", str(out)]) == 0
    (measured,) = json.loads(out.read_text())["cells"]
    assert (measured["captured"], measured["refused"]) == (True, {})
    arms = {arm["name"]: arm for arm in measured["arms"]}
    assert arms[gpu.UNGRAPHED]["tau"] == arms[gpu.PLAIN]["tau"] == 1
    assert arms["engine, draft 1"]["tau"] > 1.3  # accepted as often as stated


def test_models_that_cannot_be_captured_are_measured_as_they_are(tmp_path, monkeypatch):
    def capture(action):
        raise DecodingError("capturing", found="a wait", expected="none", remedy="no graphs")

    monkeypatch.setattr(gpu, "steps_for", lambda device: graphed(capture))
    arguments = gpu._arguments([*TINY, "--out", str(tmp_path / "gpu.json")])
    subject = gpu.with_graphs(gpu._subject(arguments))
    assert subject.contestants.steps is None
    assert "found a wait" in subject.refused[gpu.GRAPHED]


def test_what_was_measured_is_kept_when_the_run_is_cut_short(tmp_path, monkeypatch):
    measured = []

    def measure(cell, until):
        if measured:
            raise KeyboardInterrupt
        measured.append(cell)
        return {"batch_size": cell.batch_size, "temperature": 0.0, "state": "done"}

    monkeypatch.setattr(gpu, "measure", measure)
    out = tmp_path / "gpu.json"
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*TINY, "--out", str(out)])
    (kept,) = json.loads(out.read_text())["cells"]
    assert (kept["batch_size"], kept["state"]) == (1, "done")


def test_cells_for_which_there_is_no_time_say_so(tmp_path, capsys):
    out = tmp_path / "gpu.json"
    assert gpu.main([*TINY, "--budget", "0", "--out", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [(cell["batch_size"], cell["temperature"]) for cell in cells] == list(gpu.CELLS)
    assert {cell["state"] for cell in cells} == {"not measured: the time was used up"}
    assert capsys.readouterr().out.count("the time was used up") == len(cells)


@pytest.mark.parametrize("arguments", [[], ["--target", "a"], ["--shape", "1b", "--target", "a"]])
def test_it_asks_for_either_a_pair_or_a_shape(arguments, capsys):
    if "--shape" in arguments:
        arguments = [*arguments, "--draft", "b"]
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert "either" in capsys.readouterr().err
