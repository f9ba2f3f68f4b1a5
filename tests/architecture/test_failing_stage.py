"""Real runs of `dvc repro` that fail: what was there before is there afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXIT_REPRO_FAILED = 255
PARAMS = (
    "groups: {target: default}\nrecipes: [student]\n"
    "override:\n  corpus: {sources: [{kind: jsonl, path: prompts.jsonl}]}\n"
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The pipeline under a Git of its own, its prompts resolved."""
    root = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("src", "pipeline", "conf"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    (root / ".dvc").mkdir()
    for file in ("dvc.yaml", ".dvcignore", ".gitignore", ".dvc/config"):
        shutil.copy(ROOT / file, root / file)
    (root / "params.yaml").write_text(PARAMS)
    (root / "prompts.jsonl").write_text('{"prompt": "name a river"}\n')
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    done = repro(root, "resolve_prompts")
    assert done.returncode == 0, done.stderr
    return root


def repro(root, *arguments):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}",
        "DVC_NO_ANALYTICS": "true",
    }
    return subprocess.run(
        ["dvc", "repro", *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_emptied_prompt_file_stops_the_run_and_the_last_identity_stays(checkout):
    before = (checkout / "build/prompts.json").read_text()
    (checkout / "prompts.jsonl").write_text("")
    done = repro(checkout, "resolve_prompts")
    assert done.returncode == EXIT_REPRO_FAILED
    assert "prompts.jsonl" in done.stderr
    assert (checkout / "build/prompts.json").read_text() == before


def test_keys_that_contradict_each_other_stop_the_run_and_the_last_configuration_stays(checkout):
    before = (checkout / "build/config.yaml").read_text()
    (checkout / "params.yaml").write_text(PARAMS + "  drift.temperature: 9\n")
    done = repro(checkout, "resolve_prompts")
    (checkout / "params.yaml").write_text(PARAMS)
    assert done.returncode == EXIT_REPRO_FAILED
    assert "`drift.temperature: 9`" in done.stderr
    assert (checkout / "build/config.yaml").read_text() == before
