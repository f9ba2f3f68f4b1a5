"""Training spread over two processes, started for real by `accelerate launch`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.artifacts import read_json, write_json
from draftsmith.config import write_config
from draftsmith.corpus.dataset import write_corpus
from draftsmith.corpus.rollouts import Rollout
from draftsmith.distillation.processes import written_by_main
from draftsmith.targets.settings import TargetConfig
from draftsmith.targets.source import resolve
from tests import tiny_target
from tests.distillation.small_training import are_equal, make_config

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ["accelerate.commands.launch", "--multi_gpu", "--main_process_port", "0"]
TRAINING = "tests.distillation.launched_training"


def start(folder, *arguments, processes):
    """Run a module of this repository in `folder`, in one process or several."""
    launcher = [*LAUNCHER, "--num_processes", str(processes), "-m"] if processes > 1 else []
    places = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", *launcher, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Weights and outcome of the small training, by its number of processes."""
    results = {}
    for processes in (1, 2):
        folder = tmp_path_factory.mktemp("training")
        done = start(folder, TRAINING, str(folder), processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
        results[processes] = results_of(folder)
    return results


def results_of(folder):
    return load_file(folder / "student.safetensors"), read_json(folder / "outcome.json")


def by_step(outcome, *names):
    return [[entry[name] for name in names] for entry in outcome["history"]]


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(trained):
    """Also where a batch has a sequence for one of them only, and at the judge's."""
    (ours, outcome), (theirs, expected) = trained[2], trained[1]
    for step, values in enumerate(by_step(expected, "loss", "alpha")):
        near = 1e-5 if step < 3 else 1e-3  # rounding grows with every step
        assert by_step(outcome, "loss", "alpha")[step] == pytest.approx(values, rel=near)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-4, rtol=1e-3)
    assert outcome["best"] == expected["best"]
    judged = [[entry["alpha"] for entry in one["evaluations"]] for one in (outcome, expected)]
    assert judged[0] == pytest.approx(judged[1], rel=1e-3)


@pytest.mark.slow
def test_two_killed_processes_end_like_two_unbroken_ones(trained, tmp_path):
    killed = start(tmp_path, TRAINING, str(tmp_path), "5", processes=2)
    assert killed.returncode != 0
    assert [path.name for path in tmp_path.glob("checkpoints/2-processes/*")] == ["step-00000004"]
    done = start(tmp_path, TRAINING, str(tmp_path), processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, outcome = results_of(tmp_path)
    assert outcome["resumed_at"] == 4
    assert are_equal(ours, trained[2][0])
    assert by_step(outcome, "loss") == by_step(trained[2][1], "loss")


# The stage


def make_project(folder):
    """What stage distill reads, for a small target that answers about its world."""
    tokenizer = tiny_target.make_tokenizer()
    model = tiny_target.make_model(tokenizer)
    tiny_target.save(model, tokenizer, folder / "target")
    found = TargetConfig("tiny", str(folder / "target"), None, dtype="float32", snapshot="copy")
    identity = resolve(found, root=folder / "models/targets", fetch_model=None).identity
    write_json(folder / "build/target.json", identity)
    config = make_config(steps=6, signal="cache", checkpoint_steps=4)
    recipe = {"family": "student", "layers": {"choose": 2}, "vocabulary_size": 200}
    sections = {"distill": asdict(config), "drafts": {"student": recipe}}
    write_config(folder / "build/config.yaml", sections)
    entry = {"action": "retrain", "source_pair_digest": None, "reseed": 0}
    write_json(folder / "build/start.json", {"recipes": {"student": entry}})
    rows = []
    for index, (domain, question, answer) in enumerate(tiny_target.conversations("home")[:40]):
        ids, response = (tokenizer(text)["input_ids"] for text in (question, answer))
        rows.append(Rollout(str(index), domain, 0.0, ids, response, finished=True))
    splits = {"train": rows[8:], "eval": rows[:8]}
    write_corpus(folder / "data/corpus", splits, {"digest": "d" * 64})


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_stage_runs_in_two_processes_and_one_of_them_writes(tmp_path):
    drafts, logs, written = [], [], []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        make_project(folder)
        before = files_below(folder)
        done = start(folder, "pipeline.distill", "student", processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
        written.append(files_below(folder) - before)
        logs.append(done.stderr.count("phase=distil_student done=6/6"))
        drafts.append(read_json(folder / "models/drafts/student/draft.json"))
    assert written[0] == written[1]
    assert logs == [1, 1]
    facts = [draft["training"] for draft in drafts]
    losses = [[entry["loss"] for entry in fact["history"]] for fact in facts]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert facts[0]["layer_choice"] == facts[1]["layer_choice"]
    assert drafts[0]["recipe_digest"] == drafts[1]["recipe_digest"]


def test_one_process_writes_where_it_is_told(tmp_path):
    with written_by_main(tmp_path / "draft") as path:
        assert path == tmp_path / "draft"
