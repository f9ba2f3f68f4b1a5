from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftsmith import provenance

ROOT = Path(__file__).resolve().parents[1]


def git(folder, *arguments):
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with one committed file, as the current folder."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    (tmp_path / "params.yaml").write_text("a: 1\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "params.yaml")
    git(tmp_path, "commit", "--quiet", "--no-gpg-sign", "--message", "one")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_revision_is_that_of_the_project(repository):
    facts = provenance.collect()
    assert facts["git_revision"] == git(repository, "rev-parse", "HEAD")
    assert facts["git_dirty"] is False


def test_a_changed_file_is_dirty_and_a_new_one_is_not(repository):
    (repository / "build.json").write_text("{}")
    assert provenance.collect()["git_dirty"] is False
    (repository / "params.yaml").write_text("a: 2\n")
    assert provenance.collect()["git_dirty"] is True


def test_outside_of_a_repository_or_without_git_there_is_no_revision(
    repository, tmp_path_factory, monkeypatch
):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(elsewhere))
        assert provenance.collect()["git_revision"] is None
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(elsewhere.parent))
    monkeypatch.chdir(elsewhere)
    assert provenance.collect()["git_revision"] is None


def test_versions_seed_and_time_are_recorded():
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    facts = provenance.collect(seed=7)
    assert facts["seed"] == 7
    assert facts["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert before <= datetime.datetime.fromisoformat(facts["time_utc"])
    assert provenance.collect()["seed"] is None


def test_facts_are_json_without_paths_or_secrets(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "quite-a-secret")
    monkeypatch.setenv("HF_TOKEN", "hf_quite_a_secret")
    text = json.dumps([provenance.collect(seed=0), provenance.device()])
    for private in ("quite-a-secret", "hf_quite_a_secret", str(Path.cwd()), str(Path.home()) + "/"):
        assert private not in text


def test_the_device_is_what_torch_will_use():
    device = provenance.device()
    assert device["kind"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device["name"]
    assert device["torch"] == torch.__version__
    assert device["threads"] == torch.get_num_threads()
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in device["dtypes"])
    assert "float32" in device["dtypes"]


def test_collecting_needs_no_torch():
    code = (
        "import sys; from draftsmith import provenance; provenance.collect();"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0
