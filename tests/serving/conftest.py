"""One registry with three pairs of one tiny target, and a server that most tests share."""

from __future__ import annotations

import shutil
from typing import NamedTuple

import pytest
import yaml

from benchmarks.live_service import MARGIN, evaluation_record, monitor_config
from draftsmith.artifacts import write_json, write_text
from draftsmith.registry.loading import load_pair
from draftsmith.registry.mlflow_store import PairStore
from tests.registry.small_pairs import CONFIG, TAGS
from tests.serving.service import PINNED, client_of, make_draft, make_target, serving

_DRAFTS = {"1": (0, 3), "2": (0,)}
_DRAFT_LENGTH = 3


class Project(NamedTuple):
    """A folder with a registry: versions 1 and 2 have one target and two drafts."""

    root: object
    store: PairStore

    def pair(self, version="1"):
        """The same pair offline."""
        return load_pair(f"models:/demo/{version}", root=self.root)


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.delenv("DRAFTSMITH_API_KEYS", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        sections = {
            "registry": {"name": "demo", "experiment": "draftsmith", "include_target": False},
            "drift": {
                "margin": MARGIN,
                "confidence": 0.95,
                "temperature": 0.0,
                "min_prompts": 50,
                "on_match": "reuse",
            },
            "monitor": vars(monitor_config()),
        }
        write_text(root / "build" / "config.yaml", yaml.safe_dump(sections))
        make_target(root / "target")
        store = PairStore(root, CONFIG)
        for version, layers in _DRAFTS.items():
            folder = root / f"draft-{version}"
            record = make_draft(root / "target", folder, layers=layers)
            write_json(root / "benchmark.json", {"draft_length": _DRAFT_LENGTH})
            write_json(root / "evaluation.json", evaluation_record(0, digest=record.digest))
            store.register(
                record,
                folder,
                evidence={name: root / name for name in ("benchmark.json", "evaluation.json")},
                tags=TAGS,
                target_source=str(root / "target"),
            )
        store.promote("1", ["first"])
        yield Project(root, store)
    shutil.rmtree(root / "models", ignore_errors=True)


@pytest.fixture(scope="session")
def pair(project):
    """Version 1, offline."""
    return project.pair()


@pytest.fixture(scope="session")
def server(project):
    """Serves version 1 with a fixed draft length."""
    with serving(project.root, PINNED, limits={"max_rows": 4}) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    """OpenAI's own client."""
    return client_of(server)
