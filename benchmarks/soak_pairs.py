"""A project of its own with two versions of a pair, so that nobody's registry is moved about."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from draftsmith.artifacts import digest_bytes, write_json, write_text
from draftsmith.drafts.checkpoint import Lineage, save_draft
from draftsmith.drafts.student import build_student
from draftsmith.errors import RegistryError
from draftsmith.registry.generation import Pair
from draftsmith.registry.loading import load_directory, parse_uri
from draftsmith.registry.mlflow_connection import REGISTRY_VARIABLE, TRACKING_VARIABLE
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.pair import QUARANTINE_TAG, DraftIdentity, PairRecord
from draftsmith.registry.records import CHAMPIONS
from draftsmith.registry.settings import RegistryConfig
from draftsmith.targets.loading import LoadedTarget, load_target

NAME = "soak"
PROMOTION, ROLLBACK = "promotion", "rollback"
_TINY_STEPS = 60
_BENCHMARK = "benchmark.json"
_LOOK_S = 0.1  # between two looks at the alias while it is to move


@dataclass(frozen=True)
class Move:
    """A move of the alias.

    Attributes:
        kind: What was done.
        digest: Of the pair that is champion now.
        since_s: When, by `time.monotonic`, the registry was last seen to name the other pair.
    """

    kind: str
    digest: str
    since_s: float


@dataclass(frozen=True)
class Project:
    """A registry with two versions.

    Attributes:
        root: Its folder.
        pair: The first version, offline.
        versions: The first one and the other one.
        digests: Of their pairs.
    """

    root: Path
    store: PairStore
    pair: Pair
    versions: tuple[str, str]
    digests: tuple[str, str]

    def move(self) -> Move:
        """Promote the other version where the first is champion, else roll it back.

        Raises:
            RegistryError: The rollback failed.
        """
        first, other = self.versions
        since_s = time.monotonic()
        if self._is_champion(first):
            self.store.promote(other, ["soak"])
            return Move(PROMOTION, self.digests[1], since_s)
        since_s = self._roll_back(other)
        # It is to be promoted again, which nobody may who has a service.
        self.store.catalog.client.delete_model_version_tag(NAME, other, QUARANTINE_TAG)
        return Move(ROLLBACK, self.digests[0], since_s)

    def _is_champion(self, version: str) -> bool:
        champion = self.store.champion()
        return champion is not None and champion.version == version

    def _roll_back(self, champion: str) -> float:
        """By the command that people use; returns when the champion was last seen to be one."""
        command = [sys.executable, "-m", "draftsmith.cli", "rollback", "--root", str(self.root)]
        with subprocess.Popen(
            [*command, "--reason", "soak"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            since_s = asked_s = time.monotonic()
            while self._is_champion(champion) and process.poll() is None:
                time.sleep(_LOOK_S)
                since_s, asked_s = asked_s, time.monotonic()
            _, said = process.communicate()
        if process.returncode == 0:
            return since_s
        raise RegistryError(
            f"rolling version {champion} back",
            found=f"status {process.returncode}: {' '.join(said.split())}",
            expected="status 0",
            remedy=f"run `draftsmith rollback --root {self.root}` by hand",
        )


def make_project(folder: Path, root: Path) -> Project:
    """Register the pair of a folder, and its target with a draft of one layer; promote the first.

    Args:
        folder: Holds pair.json, draft/ and maybe evidence/.
        root: A folder that is made.
    """
    pair = load_directory(folder)
    for variable in (TRACKING_VARIABLE, REGISTRY_VARIABLE):  # of other projects
        os.environ.pop(variable, None)
    write_json(root / _BENCHMARK, {"draft_length": 2})
    other = draft_of_layers(pair.target, root / "other", (0,))
    config = RegistryConfig(name=NAME, experiment=NAME)
    sections = {"registry": dataclasses.asdict(config)}  # for the command line
    write_text(root / "build" / "config.yaml", yaml.safe_dump(sections))
    store = PairStore(root, config)
    source = str(pair.target.directory.resolve())
    known = {path.name: path for path in sorted((folder / "evidence").glob("*.json"))}
    first = store.register(
        pair.record, folder / "draft", evidence=known, tags={}, target_source=source
    )
    made = {_BENCHMARK: root / _BENCHMARK}
    second = store.register(other, root / "other", evidence=made, tags={}, target_source=source)
    store.promote(first, ["soak"])
    digests = (pair.record.digest, other.digest)
    return Project(root, store, pair, (first, second), digests)


def folder_of(uri: str) -> Path:
    """Where a pair's files lie: the folder itself, or the copy of a registered version."""
    if not uri.startswith("models:"):
        return Path(uri)
    name, reference = parse_uri(uri)
    store = PairStore(Path.cwd(), RegistryConfig(name=name, experiment=name))
    return store.fetch(store.resolve(reference).pair, Path.cwd() / CHAMPIONS)


def tiny_folder(folder: Path, steps: int = _TINY_STEPS) -> Path:
    """A folder with a tiny pair, whose target was trained for some steps."""
    from tests import tiny_target  # noqa: PLC0415  a benchmark of a real pair needs no tests

    tokenizer = tiny_target.make_tokenizer()
    model = tiny_target.make_model(tokenizer)
    tiny_target.train(model, tokenizer, "home", steps)
    tiny_target.save(model, tokenizer, folder / "target")
    target = load_target(folder / "target", dtype="float32")
    record = draft_of_layers(target, folder / "draft", (0, 3))
    write_json(folder / "pair.json", record.to_json())
    write_json(folder / "evidence" / _BENCHMARK, {"draft_length": 3})
    return folder


def draft_of_layers(target: LoadedTarget, folder: Path, layers: tuple[int, ...]) -> PairRecord:
    """Save a draft of some of the target's layers, untrained; returns the record of the pair."""
    digest = digest_bytes(f"layers {layers}".encode())
    lineage = Lineage(
        recipe="soak",
        recipe_digest=digest,
        target_digest=target.identity.digest,
        tokenizer_digest=target.identity.tokenizer_digest,
        corpus_digest=digest,
        layers=layers,
    )
    folder.mkdir(parents=True)
    student = build_student(target.model, layers, None)
    manifest = save_draft(folder, student, None, lineage=lineage, training={})
    draft = DraftIdentity.from_json(dataclasses.asdict(manifest))
    return PairRecord(dataclasses.asdict(target.identity), draft)
