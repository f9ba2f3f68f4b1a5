"""The measuring program as it is started on a machine that has torch and Transformers only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.artifacts import digest_json
from draftsmith.evaluation import speed
from tests.tiny_target import write_prompts

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("mlflow", "dvc", "hydra", "datasets", "omegaconf")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    write_prompts(path)
    return path


@pytest.fixture(scope="module")
def poison(tmp_path_factory):
    """A folder of modules that cannot be imported."""
    folder = tmp_path_factory.mktemp("poison")
    for name in ABSENT:
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is not installed here')\n")
    return folder


def arguments(checkpoint, draft, questions, *extra):
    return [
        *("--target", str(checkpoint), "--draft", str(draft), "--prompts", str(questions)),
        *("--dtype", "float32", "--max-draft-length", "1", "--num-prompts", "2"),
        *("--max-new-tokens", "4", "--batch-sizes", "1", *extra),
    ]


def start(poison, *command):
    """Runs `python -m draftsmith.evaluation.speed` outside of the repository."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(poison), str(ROOT / "src")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "draftsmith.evaluation.speed", *command],
        cwd=poison,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_the_poison_works(poison):
    done = subprocess.run(
        [sys.executable, "-c", "import datasets"],
        env={**os.environ, "PYTHONPATH": str(poison)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "datasets is not installed here" in done.stderr


def test_it_measures_a_pair_without_the_pipelines_packages(
    poison, checkpoint, draft_folders, questions, loaded, drafts
):
    done = start(poison, *arguments(checkpoint, draft_folders["trimmed"], questions))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    manifest = drafts["trimmed"].manifest
    assert report["target_digest"] == loaded.identity.digest
    (entry,) = report["recipes"].values()
    assert entry["recipe"] == "trimmed"
    assert entry["draft_digest"] == manifest.digest
    pair = {"target": loaded.identity.digest, "draft": manifest.digest}
    assert entry["pair_digest"] == digest_json(pair)
    assert report["device"]["kind"] in ("cpu", "cuda")
    assert report["provenance"]["packages"]["torch"]
    assert entry["speedup"]["num_prompts"] == 2
    assert len(entry["survival"]) == len(entry["calibration"]) == entry["draft_length"] == 1


def test_a_draft_of_another_tokenizer_is_one_clear_line_and_status_2(
    checkpoint, save_student, questions, capsys
):
    folder = save_student("stray", (0,), tokenizer_digest="0" * 64)
    assert speed.main(arguments(checkpoint, folder, questions)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (message,) = [line for line in shown.err.splitlines() if "tokenizer" in line]
    assert "0" * 64 in message


def test_a_target_that_is_not_there_is_named(tmp_path, draft_folders, questions, capsys):
    missing = tmp_path / "nowhere"
    assert speed.main(arguments(missing, draft_folders["student"], questions)) == 2
    assert str(missing) in capsys.readouterr().err


def test_a_report_can_go_to_a_file(
    checkpoint, draft_folders, questions, tmp_path, capsys, monkeypatch
):
    """Measured once above; here only where the result goes."""
    monkeypatch.setattr(speed, "measure", lambda *measured, **options: {"recipe": "student"})
    out = tmp_path / "speed.json"
    command = arguments(checkpoint, draft_folders["student"], questions, "--out", str(out))
    assert speed.main(command) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(out.read_text())["recipes"] == {"student": {"recipe": "student"}}
