"""Training spread over two processes, started for real by `accelerate launch`."""

from __future__ import annotations

import os
import shutil
import socket
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
from draftsmith.distillation import run as distillation_run
from draftsmith.distillation.processes import written_by_main
from draftsmith.drafts.settings import StudentConfig
from draftsmith.errors import DraftError
from draftsmith.targets.settings import TargetConfig
from draftsmith.targets.source import resolve
from tests import tiny_target
from tests.distillation.small_training import are_equal, make_config

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "docs/examples/cluster"
TRAINING = "tests.distillation.launched_training"


def started(command, folder, **environment):
    """A command of this repository that runs in `folder`."""
    places = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": programs, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **own, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def launched(folder, *arguments, launch=None):
    """A module that runs in `folder`: in one process, or in two as a file launches them."""
    launcher = []
    if launch is not None:
        launcher = ["accelerate.commands.launch", "--config_file", str(CLUSTER / launch)]
        launcher += ["--num_processes", "2", "--main_process_port", "0", "-m"]
    return started([sys.executable, "-m", *launcher, *arguments], folder)


def ended(process):
    """Its exit status and what it said."""
    try:
        _, said = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, said


def finished(folder, *arguments, launch=None):
    status, said = ended(launched(folder, *arguments, launch=launch))
    assert status == 0, said[-3000:]
    return said


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of the small training, by its number of processes."""
    folders = {}
    for processes, launch in ((1, None), (2, "ddp.yaml")):
        folders[processes] = folder = tmp_path_factory.mktemp("training")
        finished(folder, TRAINING, str(folder), launch=launch)
    return folders


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Checkpoints of two processes that divided the target, after one of them was killed."""
    folder = tmp_path_factory.mktemp("killed")
    status, _ = ended(launched(folder, TRAINING, str(folder), "6", launch="fsdp.yaml"))
    assert status != 0
    assert [path.name for path in folder.glob("checkpoints/*")] == ["step-00000004"]
    return folder


def weights_of(folder):
    return load_file(folder / "student.safetensors")


def outcome_of(folder):
    return read_json(folder / "outcome.json")


def by_step(folder, *names):
    return [[entry[name] for name in names] for entry in outcome_of(folder)["history"]]


def assert_near(folder, expected):
    """The same steps up to rounding, which grows with every step; the same judgement."""
    for step, values in enumerate(by_step(expected, "loss", "alpha")):
        near = 1e-5 if step < 3 else 1e-3
        assert by_step(folder, "loss", "alpha")[step] == pytest.approx(values, rel=near)
    ours, theirs = weights_of(folder), weights_of(expected)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-4, rtol=1e-3)
    assert outcome_of(folder)["best"] == outcome_of(expected)["best"]
    judged = [
        [entry["alpha"] for entry in outcome_of(one)["evaluations"]] for one in (folder, expected)
    ]
    assert judged[0] == pytest.approx(judged[1], rel=1e-3)


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(trained):
    """Also where a batch has a sequence for one of them only, and at the judge's."""
    assert_near(trained[2], trained[1])


@pytest.mark.slow
def test_two_machines_that_divide_the_target_go_on_like_unbroken_processes(
    trained, killed, tmp_path
):
    folder = shutil.copytree(killed, tmp_path / "run")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [
        started(
            ["bash", str(CLUSTER / "node.sh"), "-m", TRAINING, str(folder)],
            folder,
            MAIN_NODE="127.0.0.1",
            SLURM_JOB_ID=str(port - 30000),
            SLURM_JOB_NUM_NODES="2",
            SLURM_GPUS_ON_NODE="1",
            SLURM_NODEID=str(node),
        )
        for node in (0, 1)
    ]
    for node in nodes:
        status, said = ended(node)
        assert status == 0, said[-3000:]
    assert outcome_of(folder)["resumed_at"] == 4
    assert are_equal(weights_of(folder), weights_of(trained[2]))
    assert by_step(folder, "loss") == by_step(trained[2], "loss")
    whole, part = (read_json(one / "target.json")["bytes"] for one in (trained[2], folder))
    assert part < 0.7 * whole  # the layers are most of it; embedding and head stay whole


@pytest.mark.slow
def test_one_process_goes_on_where_two_were_killed(trained, killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run")
    finished(folder, TRAINING, str(folder))
    assert outcome_of(folder)["resumed_at"] == 4
    assert_near(folder, trained[1])


# The stage


def make_project(folder, signal):
    """What stage distill reads, for a small target that answers about its world."""
    tokenizer = tiny_target.make_tokenizer()
    model = tiny_target.make_model(tokenizer)
    tiny_target.save(model, tokenizer, folder / "target")
    found = TargetConfig("tiny", str(folder / "target"), None, dtype="float32", snapshot="copy")
    identity = resolve(found, root=folder / "models/targets", fetch_model=None).identity
    write_json(folder / "build/target.json", identity)
    config = make_config(steps=6, signal=signal, checkpoint_steps=4)
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


def distilled(folder, signal, launch=None):
    """A project's draft: what is said of it, which files came to be, and how often it was told."""
    make_project(folder, signal)
    before = files_below(folder)
    said = finished(folder, "pipeline.distill", "student", launch=launch)
    facts = read_json(folder / "models/drafts/student/draft.json")
    return facts, files_below(folder) - before, said.count("phase=distil_student done=6/6")


def losses_of(facts):
    return [entry["loss"] for entry in facts["training"]["history"]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return distilled(tmp_path_factory.mktemp("project"), "cache")


@pytest.mark.slow
def test_the_stage_runs_in_two_processes_and_one_of_them_writes(alone, tmp_path):
    facts, written, times = distilled(tmp_path, "cache", launch="ddp.yaml")
    expected, files, once = alone
    assert written == files
    assert times == once == 1
    assert losses_of(facts) == pytest.approx(losses_of(expected), rel=1e-4)
    assert facts["training"]["layer_choice"] == expected["training"]["layer_choice"]
    assert facts["recipe_digest"] == expected["recipe_digest"]


@pytest.mark.slow
def test_the_stage_divides_its_target_where_it_is_launched_so(alone, tmp_path):
    facts, _, times = distilled(tmp_path, "online", launch="fsdp.yaml")
    assert times == 1
    assert losses_of(facts) == pytest.approx(losses_of(alone[0]), rel=1e-4)


def test_a_divided_target_fills_no_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(distillation_run, "divides_target", lambda: True)
    recipe = StudentConfig(family="student", layers=(0,), vocabulary_size=0)
    job = distillation_run.Distillation("s", recipe, make_config(signal="cache"), None, "d", {})
    with pytest.raises(DraftError, match="FSDP divides") as refused:
        job.run(tmp_path, tmp_path)
    assert "distill.signal to online" in str(refused.value)


def test_one_process_writes_where_it_is_told(tmp_path):
    with written_by_main(tmp_path / "draft") as path:
        assert path == tmp_path / "draft"
