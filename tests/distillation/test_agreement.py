"""What the processes of a training must agree on: where they go on from, and when they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.artifacts import read_json
from draftsmith.distillation import checkpoints, early_stop
from draftsmith.distillation.processes import of_all
from draftsmith.errors import ArtifactError
from tests.distillation.launched_agreement import ALPHAS
from tests.distillation.small_training import train
from tests.distillation.test_early_stop import judge_of

ROOT = Path(__file__).resolve().parents[2]
DDP = ROOT / "docs/examples/cluster/ddp.yaml"


def test_one_process_is_all_of_them():
    assert of_all(3) == [3]


def test_processes_that_find_unlike_checkpoints_are_refused(target, tmp_path, monkeypatch):
    options = {"steps": 6, "checkpoint_steps": 4}
    train(target, tmp_path, **options)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "of_all", lambda step: [step, 0, step])
        with pytest.raises(ArtifactError) as caught:
            train(target, tmp_path, **options)
    assert caught.value.found == "step 0 in 1 of 3 processes, step 4 in 2 of 3 processes"
    assert "file system" in caught.value.remedy
    _, outcome = train(target, tmp_path, **options)
    assert outcome.resumed_at == 4


@pytest.mark.parametrize(("main", "own"), [ALPHAS, ALPHAS[::-1]])
def test_the_main_process_says_when_the_training_ends(monkeypatch, main, own):
    alphas = iter(main)
    monkeypatch.setattr(early_stop, "of_all", lambda alpha: [next(alphas), alpha])
    _, judge = judge_of(own, patience=1)
    ends = [judge.judge(step) for step in range(1, len(own) + 1)]
    assert [entry["alpha"] for entry in judge.evaluations] == main
    assert ends == [alpha < max(main[: place + 1]) for place, alpha in enumerate(main)]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What each of two real processes saw."""
    folder = tmp_path_factory.mktemp("processes")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(DDP)]
    launcher += ["--num_processes", "2", "--main_process_port", "0", "-m"]
    places = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [*launcher, "tests.distillation.launched_agreement", str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [read_json(folder / f"process-{place}.json") for place in (0, 1)]


@pytest.mark.slow
def test_two_processes_judge_by_what_the_main_one_measured(processes):
    first, second = (seen["judged"] for seen in processes)
    assert first == second
    assert [entry["alpha"] for entry in first["evaluations"]] == pytest.approx(ALPHAS[0])
    assert first["ends"] == [False, False, False]
    assert first["best"] == 2


@pytest.mark.slow
def test_two_processes_without_a_folder_in_common_do_not_go_on(processes):
    found = "step 0 in 1 of 2 processes, step 4 in 1 of 2 processes"
    assert [seen["resumed"] for seen in processes] == [found, found]
