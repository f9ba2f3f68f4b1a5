from __future__ import annotations

import json
import signal

import pytest
from mlflow import MlflowClient

from draftsmith.artifacts import read_json, short, write_json, write_text
from draftsmith.errors import RegistryError
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.settings import RegistryConfig
from tests.registry.small_pairs import (
    CONFIG,
    SOURCE,
    TAGS,
    digest,
    make_files,
    make_record,
    start_child,
)


def test_registering_twice_gives_one_version(store, register):
    assert register() == register() == "1"
    assert len(store.versions()) == 1


def test_registering_again_without_news_writes_nothing(root, store, register):
    register()
    before = (root / "mlflow.db").read_bytes()
    register()
    assert (root / "mlflow.db").read_bytes() == before


def test_the_same_draft_on_another_target_is_another_version(store, register):
    assert register("t1", "d1") == "1"
    assert register("t2", "d1") == "2"


def test_new_evidence_is_attached_to_the_known_version(store, register, tmp_path):
    register()
    folder = store.fetch(store.find(make_record().digest), tmp_path / "fetched")
    register(tags={**TAGS, "speedup": "1.4000"}, speedup=1.4)
    version = store.resolve("1")
    assert version.tags["speedup"] == "1.4000"
    assert len(store.versions()) == 1
    again = store.fetch(version.pair, tmp_path / "fetched")
    assert again == folder
    assert read_json(again / "evidence" / "benchmark.json")["speedup"]["mean"] == 1.4


def test_replaced_evidence_stays_in_the_history(root, store, register):
    register()
    register(tags={**TAGS, "speedup": "1.4000"}, speedup=1.4)
    speedups = sorted(
        json.loads(path.read_text())["speedup"]["mean"]
        for path in (root / "mlartifacts").rglob("evidence_history/*_a-cpu_*/benchmark.json")
    )
    assert speedups == [1.2, 1.4]


def test_the_store_keeps_its_own_tags(register):
    with pytest.raises(RegistryError, match="live_drift"):
        register(tags={**TAGS, "live_drift": "no"})


def test_credentials_in_a_source_are_not_recorded(root, store, tmp_path):
    draft_dir, evidence = make_files(tmp_path / "files")
    source = "https://user:hunter2@host/model"
    store.register(make_record(), draft_dir, evidence=evidence, tags=TAGS, target_source=source)
    assert store.resolve("1").tags["target_source"] == "https://host/model"
    assert not any(
        b"hunter2" in path.read_bytes() for path in (root / "mlartifacts").rglob("MLmodel")
    )
    assert b"hunter2" not in (root / "mlflow.db").read_bytes()


def test_a_registered_pair_holds_its_code_and_no_pickle(root, register):
    register()
    names = {path.name for path in (root / "mlartifacts").rglob("*") if path.is_file()}
    assert {"pyfunc_model.py", "pair.json", "model.safetensors", "errors.py"} <= names
    assert not any(name.endswith((".pkl", ".pickle", ".bin", ".pyc")) for name in names)


def test_two_processes_make_one_schema_and_register_one_version(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    children = [start_child(tmp_path), start_child(tmp_path)]
    for child in children:
        _, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors
    store = PairStore(tmp_path, CONFIG)
    assert [item.pair.version for item in store.versions()] == ["1"]
    assert store.champion().version == "1"


@pytest.mark.parametrize(
    ("fatal_call", "ends"),
    [("finalize_logged_model", ["FINISHED"]), ("create_model_version", ["FINISHED", "KILLED"])],
)
def test_a_killed_upload_leaves_no_version_and_the_rerun_makes_one(
    root, store, register, fatal_call, ends
):
    killed = start_child(root, fatal_call)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert store.versions() == []
    assert register() == "1"
    assert [item.pair.version for item in store.versions()] == ["1"]
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name(CONFIG.experiment).experiment_id
    assert [str(model.status) for model in client.search_logged_models([experiment])] == ["READY"]
    runs = client.search_runs([experiment], "tags.kind = 'pair'")
    assert sorted(run.info.status for run in runs) == ends


def test_include_target_copies_the_snapshot(root, register, tmp_path):
    store = PairStore(root, RegistryConfig("demo", "draftsmith", include_target=True))
    snapshot = root / "models" / "targets" / short(digest("t1"))
    draft_dir, evidence = make_files(tmp_path / "files")
    arguments = {"evidence": evidence, "tags": TAGS, "target_source": SOURCE}
    with pytest.raises(RegistryError, match="include_target"):
        store.register(make_record(), draft_dir, **arguments)
    assert store.versions() == []
    write_text(snapshot / "config.json", "{}")
    version = store.register(make_record(), draft_dir, **arguments)
    folder = store.fetch_model(f"models:/demo/{version}", tmp_path / "download")
    assert (folder / "config.json").read_text() == "{}"


def test_a_pair_is_found_by_its_digest_whatever_bars_it(store, register):
    for draft in ("d1", "d2", "d3"):
        register(draft=draft)
    store.quarantine("3", "slow in production")
    store.set_live_drift("2", "alpha fell")
    assert store.find(make_record(draft="d3").digest).version == "3"
    assert store.find(make_record(draft="d2").digest).live_drift
    assert store.find(make_record(draft="d9").digest) is None


def test_a_damaged_version_is_replaced_by_one_of_its_own(store, register):
    register()
    store.set_damage("1", "draft/ whose digest differs")
    assert store.find(make_record().digest) is None
    assert register() == "2"
    assert register() == "2"
    assert [item.state for item in store.versions()] == [
        "damaged: draft/ whose digest differs",
        "ok",
    ]


def test_the_trainings_history_becomes_curves_of_the_versions_run(root, store, tmp_path):
    draft_dir, evidence = make_files(tmp_path / "files")
    history = [{"step": float(s), "loss": 5.0 / s, "alpha": s / 10} for s in (1, 2)]
    write_json(draft_dir / "draft.json", {"training": {"history": history}})
    store.register(make_record(), draft_dir, evidence=evidence, tags=TAGS, target_source=SOURCE)
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    run_id = client.get_model_version("demo", "1").run_id
    for name in ("loss", "alpha"):
        curve = client.get_metric_history(run_id, f"train_{name}")
        assert [(m.step, m.value) for m in curve] == [(int(e["step"]), e[name]) for e in history]


def test_registering_again_lifts_neither_quarantine_nor_live_drift(store, register):
    register()
    store.quarantine("1", "slow")
    store.set_live_drift("1", "alpha fell")
    register(speedup=1.3)
    assert store.resolve("1").quarantine == "slow"
    assert store.resolve("1").pair.live_drift


def test_fetching_again_downloads_nothing_and_mends_damage(store, register, tmp_path):
    register()
    pair = store.find(make_record().digest)
    folder = store.fetch(pair, tmp_path / "fetched")
    assert folder.name == short(pair.pair_digest)
    weights = folder / "draft" / "model.safetensors"
    before = weights.stat().st_ino
    store.fetch(pair, tmp_path / "fetched")
    assert weights.stat().st_ino == before
    weights.write_text("damaged")
    store.fetch(pair, tmp_path / "fetched")
    assert weights.read_text() == "weights of d1"


def test_a_damaged_artifact_store_is_noticed_and_the_fetched_folder_stays(
    root, store, register, tmp_path
):
    register()
    pair = store.find(make_record().digest)
    folder = store.fetch(pair, tmp_path / "fetched")
    for path in (root / "mlartifacts").rglob("model.safetensors"):
        path.write_text("damaged")
    with pytest.raises(RegistryError, match="digest differs"):
        store.fetch(pair, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere" / folder.name).exists()
    register(speedup=1.3)
    with pytest.raises(RegistryError, match="digest differs"):
        store.fetch(pair, tmp_path / "fetched")
    assert (folder / "draft" / "model.safetensors").read_text() == "weights of d1"


def test_the_decision_is_attached(root, store, register, tmp_path):
    version = register()
    decision, report = tmp_path / "decision.json", tmp_path / "report.html"
    said = {"verdict": "block", "reasons": ["alpha fell by 0.1"], "valid_until": None}
    checks = [{"name": "drift", "verdict": "overridden"}, {"name": "alpha", "verdict": "pass"}]
    write_json(decision, {**said, "champion": None, "checks": checks})
    write_text(report, "<html></html>")
    store.attach_decision(version, decision, report)
    told = said | {"against": None, "overridden": ["drift"]}
    assert json.loads(store.resolve("1").tags["decision"]) == told
    assert [path.name for path in (root / "mlartifacts").rglob("decision/*.html")] == [report.name]


def test_an_unknown_reference_says_what_exists(store, register):
    store.set_challenger(register())
    with pytest.raises(RegistryError, match=r"@challenger and 1 version"):
        store.resolve("@champion")
    with pytest.raises(RegistryError, match="@challenger"):
        store.resolve("7")


def test_an_empty_registry_answers(store):
    assert store.versions() == []
    assert store.champion() is None
    assert store.challenger() is None
    assert store.predecessor() is None
    assert store.incumbents(digest("t1")) == []
    assert store.find(digest("t1")) is None
