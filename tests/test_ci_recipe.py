"""The workflow that docs/ci.md shows: it parses, and its shell steps do what the page says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = yaml.safe_load((ROOT / "docs/examples/draftsmith-ci.yml").read_text(encoding="utf-8"))
STEPS = WORKFLOW["jobs"]["pair"]["steps"]
PROMOTE = {"verdict": "promote", "reasons": ["All 8 blocking checks passed."]}
BLOCK = {"verdict": "block", "reasons": ["Alpha: it falls short.", "Speedup: too low."]}


def run_step(step_id, folder, **environment):
    """A step as the runner starts it: bash that stops at the first error."""
    (step,) = (step for step in STEPS if step.get("id") == step_id)
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder,
        env={"PATH": os.environ["PATH"]} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def decide(folder, decision):
    (folder / "reports").mkdir(exist_ok=True)
    text = decision if isinstance(decision, str) else json.dumps(decision)
    (folder / "reports/decision.json").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("decision", "status", "expected"),
    [
        (PROMOTE, "0", 0),
        (PROMOTE, "255", 1),
        (BLOCK, "255", 3),
        (None, "255", 1),
        ({"reasons": []}, "0", 1),
        ("{", "0", 1),
    ],
)
def test_the_exit_code_is_that_of_the_decision(tmp_path, decision, status, expected):
    if decision is not None:
        decide(tmp_path, decision)
    done = run_step("decision", tmp_path, REPRO_STATUS=status)
    assert done.returncode == expected, done.stderr
    if decision in (PROMOTE, BLOCK):
        assert done.stdout.splitlines() == [decision["verdict"], *decision["reasons"]]
    else:
        assert done.stderr


@pytest.mark.parametrize("committed", [PROMOTE, BLOCK, None])
def test_a_run_that_failed_in_its_set_up_is_not_told_by_the_committed_reports(tmp_path, committed):
    if committed is not None:
        decide(tmp_path, committed)
    done = run_step("decision", tmp_path, REPRO_STATUS="")
    assert (done.returncode, done.stdout) == (1, "")
    assert "not run to its end" in done.stderr
    after = STEPS[[step.get("id") for step in STEPS].index("repro") + 1 :]
    reporting = [step for step in after if step.get("id") != "decision"]
    assert reporting
    for step in reporting:  # the runner skips them: the step `repro` has told no status
        assert "steps.repro.outputs.status != ''" in step["if"].split(" && ")


@pytest.mark.parametrize("status", [0, 255])
def test_an_old_decision_cannot_pass_for_that_of_a_run(tmp_path, status):
    decide(tmp_path, PROMOTE)
    (tmp_path / "dvc").write_text(f"#!/bin/sh\nexit {status}\n")
    (tmp_path / "dvc").chmod(0o755)
    output = tmp_path / "output"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = run_step("repro", tmp_path, PATH=path, GITHUB_OUTPUT=str(output))
    assert done.returncode == 0, done.stderr
    assert output.read_text() == f"status={status}\n"
    assert not (tmp_path / "reports/decision.json").exists()


class Clone:
    """A runner's working folder of a remote branch `main`."""

    def __init__(self, folder, remote):
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", "-b", "main")
        self.git("remote", "add", "origin", str(remote))

    def git(self, *arguments):
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
        return subprocess.run(
            ["git", *identity, *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def write(self, name, text):
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(text, encoding="utf-8")

    def commit_step(self):
        return run_step("commit", self.folder, HOME=str(self.folder), GITHUB_RUN_ID="77")


@pytest.fixture
def clone(tmp_path):
    remote = tmp_path / "remote"
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(remote)], check=True)
    clone = Clone(tmp_path / "clone", remote)
    clone.git("commit", "-q", "--allow-empty", "-m", "start")
    clone.git("push", "-q", "-u", "origin", "main")
    clone.write("dvc.lock", "schema: '2.0'\n")
    clone.write("build/target.json", "{}")
    return clone


@pytest.fixture
def push_meanwhile(tmp_path, clone):
    """Let somebody else push a file while the run works."""

    def push(name):
        other = Clone(tmp_path / f"other-{name}", tmp_path / "remote")
        other.git("pull", "-q", "origin", "main")
        other.write(name, "theirs\n")
        other.git("add", ".")
        other.git("commit", "-q", "-m", "theirs")
        other.git("push", "-q", "origin", "main")

    return push


def test_a_run_on_the_main_branch_commits_its_lock_and_reports_once(clone):
    assert clone.commit_step().returncode == 0
    assert clone.git("log", "--format=%s", "origin/main").split() == ["start"]
    decide(clone.folder, BLOCK)
    for _ in range(2):
        done = clone.commit_step()
        assert done.returncode == 0, done.stderr
    assert clone.git("show", "--name-only", "--format=", "origin/main").split() == [
        "build/target.json",
        "dvc.lock",
        "reports/decision.json",
    ]
    assert clone.git("rev-list", "--count", "origin/main").strip() == "2"


def test_a_branch_that_moved_during_the_run_gets_the_lock_on_top(clone, push_meanwhile):
    decide(clone.folder, PROMOTE)
    push_meanwhile("params.yaml")
    done = clone.commit_step()
    assert done.returncode == 0, done.stderr
    clone.git("fetch", "-q")
    subjects = clone.git("log", "--format=%s", "origin/main").splitlines()
    assert subjects == ["draftsmith: decision of this run", "theirs", "start"]
    assert clone.git("show", "origin/main:dvc.lock") == "schema: '2.0'\n"
    assert clone.git("show", "origin/main:params.yaml") == "theirs\n"


def test_a_lock_that_conflicts_is_kept_on_a_branch_of_its_own_and_fails(clone, push_meanwhile):
    decide(clone.folder, PROMOTE)
    push_meanwhile("dvc.lock")
    done = clone.commit_step()
    assert done.returncode == 1
    assert "draftsmith-run-77" in done.stderr
    clone.git("fetch", "-q", "origin", "draftsmith-run-77")
    assert clone.git("show", "FETCH_HEAD:dvc.lock") == "schema: '2.0'\n"
    clone.git("fetch", "-q", "origin", "main")
    assert clone.git("show", "FETCH_HEAD:dvc.lock") == "theirs\n"
    assert "rebase" not in clone.git("status")


def test_the_gate_writes_its_decision_in_every_run():
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    assert stages["gate"]["always_changed"] is True


def test_the_steps_that_report_run_after_a_failure_too():
    after = STEPS[[step.get("id") for step in STEPS].index("repro") + 1 :]
    assert after
    assert all(step["if"].startswith("always()") for step in after)


def test_a_pull_request_of_a_fork_is_not_run():
    guard = WORKFLOW["jobs"]["pair"]["if"]
    assert "github.event.pull_request.head.repo.full_name == github.repository" in guard


def test_a_pull_request_is_an_experiment_which_never_promotes():
    (step,) = (step for step in STEPS if "DVC_EXP_NAME" in step.get("run", ""))
    assert step["if"] == "github.event_name == 'pull_request'"
    assert "DVC_EXP_NAME" in (ROOT / "pipeline/promote.py").read_text(encoding="utf-8")
