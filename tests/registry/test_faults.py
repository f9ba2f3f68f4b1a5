"""Processes that are killed, compete, or run out of disk: what the registry holds afterwards."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal

import pytest
from filelock import FileLock
from mlflow import MlflowClient
from typer.testing import CliRunner

from draftsmith.artifacts import read_json, short, write_text
from draftsmith.cli import app
from draftsmith.errors import ArtifactError, DraftsmithError, RegistryError
from draftsmith.registry import mlflow_upload
from draftsmith.registry.loading import load_pair
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.settings import RegistryConfig
from draftsmith.registry.verification import verify
from tests.full_disk import files_up_to
from tests.registry import dying
from tests.registry.small_pairs import (
    CONFIG,
    SOURCE,
    TAGS,
    make_files,
    make_little_code,
    make_record,
)

LEAST_WRITES = {"register": 12, "register_again": 6, "promote": 6, "rollback": 4}
NUM_MOVES = {"register": 2, "register_again": 2, "promote": 3, "rollback": 3}
SECTION = "registry:\n  name: demo\n  experiment: draftsmith\n  include_target: false\n"


@pytest.fixture(scope="module")
def promoted_registry(stocked_registry, tmp_path_factory):
    """The database of four versions after the promotions of 1 and 2."""
    root = tmp_path_factory.mktemp("promoted")
    shutil.copyfile(stocked_registry / "mlflow.db", root / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        store = PairStore(root, CONFIG)
        store.promote("1", ["first"])
        store.promote("2", ["faster"])
    return root / "mlflow.db"


@pytest.fixture
def world(promoted_registry, tmp_path, monkeypatch):
    """Makes a project's folder with that database."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(mlflow_upload, "_PACKAGE", make_little_code(tmp_path))

    def make(name):
        root = tmp_path / name
        root.mkdir()
        shutil.copyfile(promoted_registry, root / "mlflow.db")
        return root

    return make


def require_sound(store, folder):
    """What holds at every moment: one champion, no pair twice, all whole, a history without gap."""
    versions = store.versions()
    digests = [item.pair.pair_digest for item in versions]
    assert len(set(digests)) == len(digests)
    history = store.history()
    assert [(move.sequence, move.version) for move in history[:2]] == [(1, "1"), (2, "2")]
    for earlier, later in itertools.pairwise(history):
        assert later.predecessor == earlier.version
        assert later.sequence > earlier.sequence
    champion = store.champion()
    assert champion.version == history[-1].version
    for pair in {champion, versions[-1].pair}:
        store.fetch(pair, folder)


def require_done(action, store, root):
    """What the completed action leaves, however often it was begun."""
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name(CONFIG.experiment).experiment_id
    assert client.search_runs([experiment], "attributes.status = 'RUNNING'") == []
    models = client.search_logged_models([experiment])
    assert {str(model.status) for model in models} == {"READY"}
    assert len(models) == len(store.versions())
    assert len(store.history()) == NUM_MOVES[action]
    in_quarantine = [item.pair.version for item in store.versions() if item.quarantine]
    assert in_quarantine == (["2"] if action == "rollback" else [])
    match action:
        case "register":
            assert store.challenger().version == "5"
            assert [item.pair.version for item in store.versions()] == ["1", "2", "3", "4", "5"]
        case "register_again":
            found = store.resolve("2")
            assert (found.tags["speedup"], found.tags["target_source"]) == ("1.9000", dying.MOVED)
            folder = store.fetch(found.pair, root / "fetched")
            plot = read_json(folder / "evidence" / "plots" / "speed.json")
            assert plot == {"case": root.name}
        case "promote":
            assert store.champion().version == "3"
            assert "promote" in store.resolve("3").tags["decision"]
        case "rollback":
            assert store.champion().version == "1"


@contextlib.contextmanager
def named(case):
    try:
        yield
    except Exception as error:
        error.add_note(case)
        raise


@pytest.mark.slow
@pytest.mark.parametrize("action", dying.ACTIONS)
def test_a_kill_at_any_write_leaves_a_sound_registry_and_the_rerun_completes(action, world):
    whole = world("whole")
    assert dying.run(whole, action) == 0
    names = dying.writes(whole)
    assert len(names) >= LEAST_WRITES[action]
    deaths = [(number, False) for number in range(1, len(names) + 1)]
    deaths += [(number, True) for number, _ in deaths if "artifact" in names[number - 1]]
    for number, halfway in deaths:
        place = "in" if halfway else "before"
        with named(f"{action} killed {place} write {number}, {names[number - 1]}"):
            root = world(f"{place}-{number}")
            assert dying.run(root, action, number, halfway=halfway) == -signal.SIGKILL
            assert len(dying.writes(root)) == number
            store = PairStore(root, CONFIG)
            require_sound(store, root / "fetched")
            dying.ACTIONS[action](store, root)
            require_sound(store, root / "fetched")
            require_done(action, store, root)


def test_a_rollback_that_died_after_its_move_is_completed_and_another_one_is_not(world):
    root = world("cut")
    names = ["set_model_version_tag", "create_run", "set_registered_model_alias"]
    names += ["update_registered_model", "set_terminated"]
    assert dying.run(root, "rollback", len(names)) == -signal.SIGKILL
    assert dying.writes(root) == names
    store = PairStore(root, CONFIG)
    with pytest.raises(RegistryError, match="version 2 is in quarantine"):
        store.rollback(reason="another reason", is_reachable=dying.always)
    assert (
        store.rollback("1", reason=dying.REASON, is_reachable=dying.always).champion.version == "1"
    )
    assert store.resolve("1").quarantine is None
    require_done("rollback", store, root)


def rolled_back(root, *arguments):
    write_text(root / "build" / "config.yaml", SECTION)
    command = ["rollback", "--reason", dying.REASON, *arguments, "--root", str(root)]
    return CliRunner().invoke(app, command)


def test_a_rollback_that_only_completes_an_older_one_does_not_pass_for_a_move(world):
    """The same reason, or the default one, may be given days later for the present champion."""
    root = world("cut")
    assert dying.run(root, "rollback", 4) == -signal.SIGKILL
    store = PairStore(root, CONFIG)
    completed = rolled_back(root)
    assert completed.exit_code == 3
    assert "nothing moved" in completed.stdout
    assert (store.champion().version, store.resolve("1").quarantine) == ("1", None)
    further = rolled_back(root)
    assert further.exit_code == 2
    assert "rolling back version 1" in further.stderr


def test_a_rerun_that_names_where_it_wanted_to_go_has_got_there(world):
    root = world("cut")
    assert dying.run(root, "rollback", 4) == -signal.SIGKILL
    assert rolled_back(root, "--to", "1").exit_code == 0
    assert PairStore(root, CONFIG).resolve("1").quarantine is None


def test_a_kill_while_the_schema_is_made_leaves_no_half_database(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert dying.die_while_the_schema_is_made(tmp_path) == -signal.SIGKILL
    assert PairStore(tmp_path, CONFIG).versions() == []
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize(
    ("actions", "ends"),
    [
        (("promote", "promote_other"), {("3", "4"), ("4", "3")}),
        (("promote", "rollback"), {("3", "2"), ("1", "3")}),
    ],
)
def test_two_processes_that_move_the_champion_take_turns(world, actions, ends):
    root = world("contended")
    with FileLock(root / "mlflow.db.lock"):  # until both are waiting
        children = [dying.start(root, action) for action in actions]
        for child in children:
            child.join(0.5)
            assert child.is_alive()
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    store = PairStore(root, CONFIG)
    require_sound(store, root / "fetched")
    assert tuple(move.version for move in store.history()[2:]) in ends
    assert store.resolve("@champion").quarantine is None


def test_a_rollback_waits_for_no_upload(world, monkeypatch):
    root, upload, ended = world("uploading"), mlflow_upload.upload, []

    def slow_upload(*given):
        ended.append(dying.run(root, "rollback"))
        return upload(*given)

    monkeypatch.setattr(mlflow_upload, "upload", slow_upload)
    store = PairStore(root, CONFIG)
    dying.register(store, root)
    assert ended == [0]
    assert store.champion().version == "1"
    assert store.challenger().version == "5"
    require_sound(store, root / "fetched")


def test_two_uploads_of_one_pair_take_turns(world):
    root = world("twice")
    with FileLock(root / "mlflow.db.uploads.lock"):  # until both are waiting
        children = [dying.start(root, "register") for _ in range(2)]
        for child in children:
            child.join(0.5)
            assert child.is_alive()
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    require_done("register", PairStore(root, CONFIG), root)


def big_files(folder, size=6 << 20):
    draft_dir, evidence = make_files(folder)
    write_text(draft_dir / "model.safetensors", "w" * size)
    return draft_dir, {"evidence": evidence, "tags": TAGS, "target_source": SOURCE}


@pytest.mark.parametrize("place", ["staging", "store"])
def test_a_disk_that_is_full_during_an_upload_leaves_no_version(
    store, tmp_path, monkeypatch, place
):
    draft_dir, arguments = big_files(tmp_path / "files")
    original = MlflowClient.log_model_artifacts

    def on_a_full_disk(*positional):
        with files_up_to(4 << 20):
            return original(*positional)

    with monkeypatch.context() as patch:
        if place == "store":
            patch.setattr(MlflowClient, "log_model_artifacts", on_a_full_disk)
        limit = files_up_to(4 << 20) if place == "staging" else contextlib.nullcontext()
        with limit, pytest.raises(ArtifactError, match=r"model\.safetensors.*File too large"):
            store.register(make_record(), draft_dir, **arguments)
    assert store.versions() == []
    assert store.register(make_record(), draft_dir, **arguments) == "1"
    store.fetch(store.resolve("1").pair, tmp_path / "fetched")


@pytest.mark.parametrize("call", ["create_model_version", "set_registered_model_alias"])
def test_a_database_that_cannot_be_written_is_one_error_and_the_rerun_completes(
    root, store, tmp_path, monkeypatch, call
):
    draft_dir, arguments = big_files(tmp_path / "files", size=64)
    original = getattr(MlflowClient, call)

    def on_a_full_disk(*positional, **options):
        with files_up_to(1 << 16):
            return original(*positional, **options)

    def register_and_promote():
        store.promote(store.register(make_record(), draft_dir, **arguments), ["fast"])

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, call, on_a_full_disk)
        with pytest.raises(DraftsmithError, match=r"disk|readonly|database"):
            register_and_promote()
    assert store.champion() is None
    register_and_promote()
    assert [item.pair.version for item in store.versions()] == ["1"]
    assert [move.version for move in store.history()] == ["1"]


def test_a_disk_that_is_full_during_a_fetch_keeps_what_was_there(store, tmp_path):
    draft_dir, arguments = big_files(tmp_path / "files")
    store.register(make_record(), draft_dir, **arguments)
    pair = store.resolve("1").pair
    folder = store.fetch(pair, tmp_path / "fetched")
    (folder / "pair.json").write_text("{}")
    with files_up_to(4 << 20), pytest.raises(ArtifactError, match="File too large"):
        store.fetch(pair, tmp_path / "fetched")
    assert (folder / "pair.json").read_text() == "{}"
    assert [path.name for path in (tmp_path / "fetched").iterdir()] == [short(pair.pair_digest)]
    store.fetch(pair, tmp_path / "fetched")
    assert read_json(folder / "pair.json")["pair_digest"] == pair.pair_digest


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.safetensors", "draft/"),
        ("pair.json", "pair.json"),
        ("evidence_history/*/benchmark.json", "evidence/"),
    ],
)
@pytest.mark.parametrize("is_lost", [False, True], ids=["changed", "lost"])
def test_a_version_whose_files_were_damaged_is_refused_by_name(root, register, name, part, is_lost):
    store = PairStore(root, CONFIG)
    register()
    (path,) = (root / "mlartifacts").rglob(name)
    if is_lost:
        path.unlink()
    else:
        path.write_text("{}")
    expected = f"fetching version 1 of demo: found {part} whose digest differs"
    with pytest.raises(RegistryError, match=expected):
        verify(store, "1", root=root)
    with pytest.raises(RegistryError, match=expected):
        load_pair("models:/demo/1", root=root)
    assert list((root / "models" / "champions").iterdir()) == []


def test_a_store_that_this_machine_does_not_see_marks_nothing_as_damaged(root, register):
    store = PairStore(root, CONFIG)
    register()
    (root / "mlartifacts").rename(root / "unmounted")
    with pytest.raises(RegistryError, match="found no folder .*mlartifacts"):
        verify(store, "1", root=root)
    assert store.resolve("1").damage is None
    (root / "unmounted").rename(root / "mlartifacts")
    assert store.fetch(store.resolve("1").pair, root / "fetched").is_dir()


@pytest.mark.parametrize("name", ["MLmodel", "artifacts/pyfunc_model.py", "draftsmith/errors.py"])
@pytest.mark.parametrize("damage", ["changed", "lost", "added"])
def test_what_mlflow_executes_is_hashed_by_verify(root, register, name, damage):
    store = PairStore(root, CONFIG)
    register()
    assert store.check_model(store.resolve("1").pair)
    (path,) = (root / "mlartifacts").rglob(name)
    match damage:
        case "changed":
            path.write_text(path.read_text() + "\n")
        case "lost":
            path.unlink()
        case "added":
            path.with_name("added.py").write_text("")
    with pytest.raises(RegistryError, match="version 1 of demo: found MLmodel or code whose"):
        verify(store, "1", root=root)
    assert "MLmodel" in store.resolve("1").damage


@pytest.mark.parametrize("damage", ["changed", "lost", "added"])
def test_fetched_evidence_that_was_damaged_is_fetched_again(store, register, tmp_path, damage):
    register()
    pair = store.resolve("1").pair
    folder = store.fetch(pair, tmp_path / "fetched") / "evidence"
    benchmark = folder / "benchmark.json"
    whole = benchmark.read_bytes()
    match damage:
        case "changed":
            benchmark.write_text('{"draft_length": 9}')
        case "lost":
            benchmark.unlink()
        case "added":
            (folder / "drift.json").write_text("{}")
    store.fetch(pair, tmp_path / "fetched")
    assert [path.name for path in folder.iterdir()] == ["benchmark.json"]
    assert benchmark.read_bytes() == whole


def test_evidence_that_no_longer_belongs_is_not_fetched(store, register, tmp_path):
    """A file of earlier evidence stays in the version's folder, for people."""
    draft_dir, evidence = make_files(tmp_path / "files")
    write_text(tmp_path / "old.json", "{}")
    arguments = {"tags": TAGS, "target_source": SOURCE}
    store.register(
        make_record(),
        draft_dir,
        evidence={**evidence, "old.json": tmp_path / "old.json"},
        **arguments,
    )
    store.register(make_record(), draft_dir, evidence=evidence, **arguments)
    folder = store.fetch(store.resolve("1").pair, tmp_path / "fetched")
    assert [path.name for path in (folder / "evidence").iterdir()] == ["benchmark.json"]


def test_a_reader_sees_the_stated_evidence_while_newer_evidence_is_attached(
    store, register, tmp_path, monkeypatch
):
    register()
    original = MlflowClient.set_model_version_tag
    seen = []

    def read_first(*positional):
        folder = store.fetch(store.resolve("1").pair, tmp_path / "fetched")
        seen.append(read_json(folder / "evidence" / "benchmark.json")["speedup"]["mean"])
        original(*positional)

    monkeypatch.setattr(MlflowClient, "set_model_version_tag", read_first)
    register(speedup=1.4, tags={**TAGS, "speedup": "1.4000"})
    assert seen == [1.2, 1.2]
    folder = store.fetch(store.resolve("1").pair, tmp_path / "fetched")
    assert read_json(folder / "evidence" / "benchmark.json")["speedup"]["mean"] == 1.4


def test_the_same_pair_under_another_name_leaves_the_first_ones_model_alone(root, store, register):
    register()
    draft_dir, arguments = big_files(root / "again", size=64)
    other = PairStore(root, RegistryConfig("other", CONFIG.experiment))
    other.register(make_record(), draft_dir, **arguments)
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name(CONFIG.experiment).experiment_id
    assert len(client.search_logged_models([experiment])) == 2
