"""A project in a temporary folder: the working tree, a tiny trained target, DVC and MLflow."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import tiny_target

REPOSITORY = Path(__file__).parents[2]
OVERRIDE: dict[str, Any] = {
    "target": {"name": "tiny"},
    "corpus": {
        "eval_fraction": 0.4,
        "eval_temperatures": [0.0],
        "max_new_tokens": 32,
        "min_eval_prompts": 40,
        "batch_size": 32,
    },
    "distill": {
        "steps": 150,
        "batch_size": 8,
        "warmup_steps": 20,
        "mixed_precision": "no",
        "checkpoint_steps": 100,
    },
    "drafts": {"student": {"vocabulary_size": 256}},
    "evaluation": {
        "temperatures": [0.0],
        "decoding_prompts": 32,
        "max_new_tokens": 24,
        "self_test_tokens": 16,
        "draft_length": 3,
        "exact_prompts": 8,
    },
    "benchmark": {
        "max_draft_length": 3,
        "calibration_prompts": 3,
        "calibration_tokens": 12,
        "prompts": 8,
        "max_new_tokens": 16,
        "assisted_lengths": [2],
        "batch_sizes": [1, 4],
        "batch_tokens": 12,
        "repeats": 3,
    },
    # The small world is learnt almost perfectly, so a tenth is a small loss here.
    "drift": {"min_prompts": 40, "margin": 0.1},
    # A model of half a megabyte gains nothing from speculation: speed is measured, not required.
    "gate": {"min_speedup": 0.01, "min_prompts": 4, "min_alpha": 0.2},
    "registry": {"name": "tiny-pair"},
}


@dataclass(frozen=True)
class Project:
    """A checkout in which stages can be run."""

    root: Path

    def configure(self, **sections: Mapping[str, Any]) -> None:
        """Write params.yaml: the small budgets, with keys of `sections` over them."""
        override = copy.deepcopy(OVERRIDE)
        source = {"kind": "jsonl", "path": str(self.root / "prompts.jsonl")}
        override["corpus"]["sources"] = [source]
        for name, keys in sections.items():
            override.setdefault(name, {}).update(keys)
        params = {
            "groups": {"target": "default"},
            "recipes": ["student"],
            "override": override,
        }
        (self.root / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment in the project."""
        return subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )

    @property
    def environment(self) -> dict[str, str]:
        """No telemetry, the project's own sources, threads as the tests have them."""
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")
        }
        return inherited | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.root / "src"),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DVC_NO_ANALYTICS": "true",
        }

    def repro(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`dvc repro`."""
        return self.run("dvc", "repro", *arguments)

    def report(self, name: str) -> dict[str, Any]:
        """A JSON file, by its path below the project."""
        return dict(json.loads((self.root / name).read_text(encoding="utf-8")))

    def cli(self, *arguments: str) -> Any:
        """The JSON that `draftsmith ... --json` prints."""
        done = self.run("draftsmith", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="package")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `home` and `away`: a trained target and a heavy fine-tune of it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = tiny_target.make_tokenizer()
    model = tiny_target.make_model(tokenizer)
    for style in ("home", "away"):
        tiny_target.train(model, tokenizer, style, steps=200)
        tiny_target.save(model, tokenizer, folder / style)
    return folder


@pytest.fixture(scope="package")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The working tree under a Git of its own, with the small world's prompts."""
    root = tmp_path_factory.mktemp("project")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, destination = REPOSITORY / name, root / name
        if source.is_file() and not name.startswith(("reports/", "build/", "dvc.lock")):
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, destination)
    tiny_target.write_prompts(root / "prompts.jsonl")
    made = Project(root)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "start"]):
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
        done = made.run("git", *identity, *command)
        assert done.returncode == 0, done.stderr
    return made
