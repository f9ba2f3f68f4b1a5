"""A project in a temporary folder: the working tree, a trained target, real DVC and MLflow."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.warm_python import write_shim
from tests.end_to_end.worlds import WORLDS, World
from tests.registry.tracking_server import OF_STORES

REPOSITORY = Path(__file__).parents[2]
_START_SECONDS = 120.0


@dataclass(frozen=True)
class Project:
    """A checkout in which stages can be run.

    Attributes:
        root: Its folder.
        world: Target, updates and budgets.
        shims: Folder of a `python` that starts at once; used as soon as its server listens.
        variables: Set for its commands, as a user would.
        said: What its commands wrote.
    """

    root: Path
    world: World
    shims: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    @property
    def address(self) -> Path:
        """Socket of the server behind the shim."""
        return self.shims / "socket"

    def configure(self, *recipes: str, **sections: Mapping[str, Any]) -> None:
        """Write params.yaml: the small budgets, with keys of `sections` over them."""
        recipes = recipes or ("student",)
        override = copy.deepcopy(self.world.override)
        drafts = override.get("drafts", {})
        override["drafts"] = {name: keys for name, keys in drafts.items() if name in recipes}
        for name, keys in sections.items():
            override.setdefault(name, {}).update(keys)
        params = {
            "groups": {"target": "default"},
            "recipes": [*recipes],
            "override": override,
        }
        (self.root / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment in the project."""
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=self.world.timeout_s,
        )
        self.said.append(done.stdout + done.stderr)
        return done

    @property
    def environment(self) -> dict[str, str]:
        """No telemetry, the project's own sources, threads as the tests have them."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(OF_STORES)}
        folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
        if self.address.exists():
            folders.insert(0, str(self.shims))
        return inherited | {
            "PATH": os.pathsep.join(folders),
            "PYTHONPATH": str(self.root / "src"),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DVC_NO_ANALYTICS": "true",
            **self.variables,
        }

    def repro(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`dvc repro`."""
        return self.run("dvc", "repro", *arguments)

    def report(self, name: str) -> dict[str, Any]:
        """A JSON file, by its path below the project."""
        return dict(json.loads((self.root / name).read_text(encoding="utf-8")))

    def draftsmith(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`draftsmith ...`."""
        return self.run("python", "-m", "draftsmith.cli", *arguments)

    def cli(self, *arguments: str) -> Any:
        """The JSON that `draftsmith ... --json` prints."""
        done = self.draftsmith(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="package")
def world(request: pytest.FixtureRequest) -> World:
    return WORLDS[request.config.getoption("--world")]


@pytest.fixture(scope="package")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    """Folder of checkpoints, the world's target in `home`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    world.make_target(folder / "home")
    return folder


@pytest.fixture(scope="package")
def project(tmp_path_factory: pytest.TempPathFactory, world: World) -> Iterator[Project]:
    """The working tree under a Git of its own."""
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
    world.write_prompts(root / "prompts.jsonl")
    with tempfile.TemporaryDirectory() as shims:  # a socket's path must be short
        made = Project(root, world, Path(shims))
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "start"]):
            identity = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
            done = made.run("git", *identity, *command)
            assert done.returncode == 0, done.stderr
        yield made


@pytest.fixture(scope="package")
def warm(project: Project) -> Iterator[Project]:
    """The project with stages that start at once."""
    write_shim(project.shims / "python", str(project.address))
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("warm_python.py"), project.address],
        cwd=project.root,
        env=project.environment,
    )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not project.address.exists():
            assert server.poll() is None, "the server of the shim ended"
            assert time.monotonic() < deadline, "the server of the shim did not start"
            time.sleep(0.1)
        yield project
    finally:
        server.kill()
        server.wait()
