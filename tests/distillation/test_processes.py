"""Training spread over two processes, started for real by `accelerate launch`.

A process takes seconds to start, so each trains drafts of all families, one after the other.
"""

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
from draftsmith.drafts.settings import EagleConfig, LayerChoice, MedusaConfig, StudentConfig
from draftsmith.errors import DraftError
from draftsmith.targets.settings import TargetConfig
from draftsmith.targets.source import resolve
from tests import tiny_target
from tests.distillation.launched_training import CHECKPOINT, RECIPES
from tests.distillation.small_training import are_equal, make_config

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "docs/examples/cluster"
TRAINING = "tests.distillation.launched_training"
STAGE = "tests.distillation.launched_stage"
every_family = pytest.mark.parametrize("family", RECIPES)


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
    """Folder of the small trainings, by their number of processes.

    Two processes also go on from the checkpoints of one, in folder `resumed`.
    """
    folders = {processes: tmp_path_factory.mktemp("training") for processes in (1, 2)}
    finished(folders[1], TRAINING, str(folders[1]))
    for family in RECIPES:
        checkpoints = Path(family) / "checkpoints"
        shutil.copytree(folders[1] / checkpoints, folders[2] / "resumed" / checkpoints)
    finished(folders[2], TRAINING, str(folders[2]), launch="ddp.yaml")
    return folders


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Checkpoint of two processes that divided the target, after one of them was killed."""
    folder = tmp_path_factory.mktemp("killed")
    status, _ = ended(launched(folder, TRAINING, str(folder), "7", launch="fsdp.yaml"))
    assert status != 0
    (kept,) = folder.glob("*/checkpoints/*")
    assert kept == folder / f"student/checkpoints/step-{CHECKPOINT:08d}"
    return folder


@pytest.fixture(scope="module")
def divided(killed, tmp_path_factory):
    """Two machines of one process each, which divide the target and go on where two were killed."""
    folder = tmp_path_factory.mktemp("divided") / "run"
    shutil.copytree(killed, folder)
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
    return folder


def weights_of(folder):
    return load_file(folder / "draft.safetensors")


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
@every_family
def test_two_processes_take_the_steps_of_one(trained, family):
    """Also where a batch has a sequence for one of them only, and at the judge's."""
    assert_near(trained[2] / family, trained[1] / family)


@pytest.mark.slow
@every_family
def test_two_processes_go_on_where_one_was(trained, family):
    folder = trained[2] / "resumed" / family
    assert outcome_of(folder)["resumed_at"] == CHECKPOINT
    assert_near(folder, trained[1] / family)


@pytest.mark.slow
@every_family
def test_two_machines_that_divide_the_target_take_the_steps_of_whole_ones(trained, divided, family):
    """The student's begin where two processes were killed."""
    folder, expected = divided / family, trained[2] / family
    assert outcome_of(folder)["resumed_at"] == (CHECKPOINT if family == "student" else 0)
    assert are_equal(weights_of(folder), weights_of(expected))
    assert by_step(folder, "loss") == by_step(expected, "loss")


@pytest.mark.slow
def test_a_divided_target_takes_less_memory(trained, divided):
    whole, part = (read_json(one / "target.json")["bytes"] for one in (trained[2], divided))
    assert part < 0.7 * whole  # the layers are most of it; embedding and head stay whole


@pytest.mark.slow
def test_one_process_goes_on_where_two_were_killed(trained, killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run")
    finished(folder, TRAINING, str(folder))
    assert outcome_of(folder / "student")["resumed_at"] == CHECKPOINT
    assert_near(folder / "student", trained[1] / "student")


# The stage

STAGED = {
    "eagle": EagleConfig("eagle", (), 200, unroll=2, step_decay=0.8),
    "medusa": MedusaConfig("medusa", 2, 1, own_heads=False, vocabulary_size=200, head_decay=0.8),
    "student": StudentConfig("student", LayerChoice(2), 200),
}


def make_project(folder, signal):
    """What stage distill reads, for a small target that answers about its world."""
    tokenizer = tiny_target.make_tokenizer()
    model = tiny_target.make_model(tokenizer)
    tiny_target.save(model, tokenizer, folder / "target")
    found = TargetConfig("tiny", str(folder / "target"), None, dtype="float32", snapshot="copy")
    identity = resolve(found, root=folder / "models/targets", fetch_model=None).identity
    write_json(folder / "build/target.json", identity)
    config = make_config(steps=6, signal=signal, checkpoint_steps=4)
    drafts = {name: asdict(recipe) for name, recipe in STAGED.items()}
    write_config(folder / "build/config.yaml", {"distill": asdict(config), "drafts": drafts})
    entry = {"action": "retrain", "source_pair_digest": None, "reseed": 0}
    write_json(folder / "build/start.json", {"recipes": dict.fromkeys(STAGED, entry)})
    rows = []
    for index, (domain, question, answer) in enumerate(tiny_target.conversations("home")[:40]):
        ids, response = (tokenizer(text)["input_ids"] for text in (question, answer))
        rows.append(Rollout(str(index), domain, 0.0, ids, response, finished=True))
    splits = {"train": rows[8:], "eval": rows[:8]}
    write_corpus(folder / "data/corpus", splits, {"digest": "d" * 64})


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def distilled(folder, signal, launch=None):
    """A project's drafts: what is said of them, which files came to be, and what was logged."""
    make_project(folder, signal)
    before = files_below(folder)
    said = finished(folder, STAGE, *STAGED, launch=launch)
    facts = {name: read_json(folder / f"models/drafts/{name}/draft.json") for name in STAGED}
    return facts, files_below(folder) - before, said


def losses_of(facts):
    return [entry["loss"] for entry in facts["training"]["history"]]


def assert_once(said):
    """One process tells of every training."""
    assert [said.count(f"phase=distil_{name} done=6/6") for name in STAGED] == [1] * len(STAGED)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return distilled(tmp_path_factory.mktemp("project"), "cache")


@pytest.mark.slow
def test_the_stage_runs_in_two_processes_and_one_of_them_writes(alone, tmp_path):
    facts, written, said = distilled(tmp_path, "cache", launch="ddp.yaml")
    expected, files, said_alone = alone
    assert written == files
    assert_once(said)
    assert_once(said_alone)
    for name, fact in facts.items():
        assert losses_of(fact) == pytest.approx(losses_of(expected[name]), rel=1e-4)
        assert fact["recipe_digest"] == expected[name]["recipe_digest"]
    chosen = [one["student"]["training"]["layer_choice"] for one in (facts, expected)]
    assert chosen[0] == chosen[1]


@pytest.mark.slow
def test_the_stage_divides_its_target_where_it_is_launched_so(alone, tmp_path):
    facts, _, said = distilled(tmp_path, "online", launch="fsdp.yaml")
    assert_once(said)
    for name, fact in facts.items():
        assert losses_of(fact) == pytest.approx(losses_of(alone[0][name]), rel=1e-4)


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
