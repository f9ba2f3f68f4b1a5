"""What a pair records of its target's source leads back to that target after the source moved."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
from mlflow import MlflowClient

from draftsmith.artifacts import short
from draftsmith.errors import TargetError
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.mlflow_target import fetch_model
from draftsmith.registry.settings import RegistryConfig
from draftsmith.registry.target_source import find_target
from draftsmith.targets.identity import identify
from draftsmith.targets.resolved import TARGETS, describe_source, remember_resolved
from draftsmith.targets.settings import TargetConfig
from draftsmith.targets.source import resolve
from tests.registry.small_pairs import TAGS, make_files, make_record
from tests.registry.tiny_models import save_draft_for, save_target

COMMITS = ("c0ffee" + "0" * 34, "decade" + "0" * 34)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A target before and after its source moved."""
    folder = tmp_path_factory.mktemp("moving")
    return [save_target(folder / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture
def hub_cache(checkpoints, tmp_path, monkeypatch):
    """Both commits in the cache, `main` at the first; no network."""
    repository = tmp_path / "hub" / "models--org--tiny"
    for checkpoint, commit in zip(checkpoints, COMMITS, strict=True):
        shutil.copytree(checkpoint, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMITS[0])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return repository


@pytest.fixture
def models(root, checkpoints):
    """A registered model with both targets, `live` at the first version."""
    store = PairStore(root, RegistryConfig("chat", "draftsmith", include_target=True))
    for number, checkpoint in enumerate(checkpoints):
        record = save_draft_for(checkpoint, root / f"draft{number}")
        shutil.copytree(checkpoint, root / TARGETS / short(record.target_digest))
        arguments = {"evidence": {}, "tags": TAGS, "target_source": ""}
        store.register(record, root / f"draft{number}", **arguments)
    shutil.rmtree(root / TARGETS)
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    client.set_registered_model_alias("chat", "live", "1")
    return client


def run_stage(root, source, revision=None):
    """What stage resolve_target does; returns the target's digest."""
    config = TargetConfig("tiny", source, revision, dtype="auto", snapshot="copy")
    found = resolve(config, root=root / TARGETS, fetch_model=partial(fetch_model, root=root))
    remember_resolved(root / TARGETS, config, found.source)
    return found.identity.digest


def find_again(root, digest, recorded):
    """The target's folder on a machine without snapshots."""
    shutil.rmtree(root / TARGETS)
    fetch = partial(fetch_model, root=root)
    return find_target(digest, "float32", root=root, sources=[recorded], fetch_model=fetch)


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_branch_is_recorded_as_its_commit(root, hub_cache, revision):
    digest = run_stage(root, "org/tiny", revision)
    recorded = describe_source("org/tiny", revision, root=root)
    assert recorded == f"hf:org/tiny@{COMMITS[0]}"
    (hub_cache / "refs" / "main").write_text(COMMITS[1])
    assert run_stage(root, "org/tiny", revision) != digest
    assert identify(find_again(root, digest, recorded), "float32").digest == digest


def test_an_alias_is_recorded_as_its_version(root, models):
    digest = run_stage(root, "models:/chat@live")
    recorded = describe_source("models:/chat@live", None, root=root)
    assert recorded == "models:/chat/1"
    models.set_registered_model_alias("chat", "live", "2")
    assert run_stage(root, "models:/chat@live") != digest
    assert identify(find_again(root, digest, recorded), "float32").digest == digest


@pytest.mark.parametrize(
    ("source", "revision", "recorded"),
    [
        ("models:/chat/3", None, "models:/chat/3"),
        ("package:llm/model.gguf", None, "package:llm/model.gguf"),
        ("hf:org/tiny", "v2", "hf:org/tiny@v2"),
        ("org/tiny", None, "org/tiny"),
        ("checkpoint", None, "{root}/checkpoint"),
    ],
)
def test_a_source_that_was_not_resolved_here_is_recorded_as_configured(
    tmp_path, source, revision, recorded
):
    (tmp_path / "checkpoint").mkdir()
    assert describe_source(source, revision, root=tmp_path) == recorded.format(root=tmp_path)


def test_a_pair_without_its_target_is_no_source(root, store):
    draft_dir, evidence = make_files(root / "files")
    arguments = {"evidence": evidence, "tags": TAGS, "target_source": ""}
    store.register(make_record(), draft_dir, **arguments)
    with pytest.raises(TargetError, match="include_target"):
        run_stage(root, "models:/demo/1")
