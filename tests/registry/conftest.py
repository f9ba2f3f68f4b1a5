"""A real MLflow on sqlite in a temporary folder."""

from __future__ import annotations

import shutil

import pytest

from draftsmith.registry.mlflow_store import PairStore
from tests.registry.small_pairs import CONFIG, SOURCE, TAGS, make_files, make_record, weights_file


@pytest.fixture(scope="session")
def empty_registry(tmp_path_factory):
    """A folder with a fresh schema, made once: MLflow's migrations take seconds."""
    root = tmp_path_factory.mktemp("registry")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        PairStore(root, CONFIG)
    return root


@pytest.fixture(scope="session")
def stocked_registry(empty_registry, tmp_path_factory):
    """A folder whose registry holds versions 1 to 4: targets t1, t2, t3, t3; drafts d1 to d4."""
    root = tmp_path_factory.mktemp("stocked")
    shutil.copyfile(empty_registry / "mlflow.db", root / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        store = PairStore(root, CONFIG)
        for target, draft in (("t1", "d1"), ("t2", "d2"), ("t3", "d3"), ("t3", "d4")):
            draft_dir, evidence = make_files(root / draft, draft)
            record = make_record(target, draft)
            store.register(record, draft_dir, evidence=evidence, tags=TAGS, target_source=SOURCE)
    return root


@pytest.fixture
def root(empty_registry, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    shutil.copyfile(empty_registry / "mlflow.db", tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture
def store(root):
    return PairStore(root, CONFIG)


@pytest.fixture
def register(store, tmp_path):
    """Register the pair of a target and a draft; returns its version."""

    def call(target="t1", draft="d1", *, recipe="small", corpus="c1", tags=None, speedup=1.2):
        folder = tmp_path / "files" / f"{target}-{draft}"
        draft_dir, evidence = make_files(folder, draft, speedup=speedup)
        record = make_record(target, draft, recipe=recipe, corpus=corpus)
        return store.register(
            record, draft_dir, evidence=evidence, tags=tags or TAGS, target_source=SOURCE
        )

    return call


@pytest.fixture
def stocked(root, stocked_registry):
    """A store with four versions, none of them promoted; a copy of the database a test."""
    shutil.copyfile(stocked_registry / "mlflow.db", root / "mlflow.db")
    return PairStore(root, CONFIG)


@pytest.fixture
def damage():
    """Change the draft of a version where its files are kept, which other tests may share."""
    undo = []

    def call(store, version):
        weights = weights_file(store, version)
        undo.append((weights, weights.read_text()))
        weights.write_text("damaged")

    yield call
    for weights, content in reversed(undo):
        weights.write_text(content)
