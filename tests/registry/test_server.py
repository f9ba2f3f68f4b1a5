"""The store against a real tracking server: SQL backend, proxied artifacts, basic auth, faults."""

from __future__ import annotations

import logging
import shutil
import urllib.parse
from pathlib import PurePosixPath

import mlflow
import pytest
from mlflow import MlflowClient

from draftsmith import load_pair
from draftsmith.artifacts import read_json, short, write_json, write_text
from draftsmith.errors import DamagedPairError, RegistryError, TargetError
from draftsmith.registry import mlflow_upload
from draftsmith.registry.holders import fetch_or_mark
from draftsmith.registry.mlflow_release import release
from draftsmith.registry.mlflow_retention import prune
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.mlflow_target import fetch_model
from draftsmith.registry.settings import RegistryConfig
from draftsmith.targets.resolved import TARGETS
from tests.registry import tracking_server
from tests.registry.small_pairs import (
    SOURCE,
    TAGS,
    digest,
    make_files,
    make_little_code,
    make_record,
)
from tests.registry.tiny_models import save_draft_for, save_target
from tests.registry.tracking_server import IN_UPLOAD, PASSWORD, USER, Proxy, after, noting

pytestmark = pytest.mark.slow

EXPERIMENT = "draftsmith"
ADMIN = (USER, PASSWORD)
READER, EDITOR = ("reader", "reads-and-never-writes"), ("editor", "writes-and-never-deletes")


def always(_):
    return True


def log_in(monkeypatch, user, password):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)


@pytest.fixture(scope="module")
def server(empty_registry, tmp_path_factory):
    """Folder and port of a server; one for the module, a registered model a test."""
    pytest.importorskip("flask_wtf", reason="MLflow's basic auth needs Flask-WTF")
    root = tmp_path_factory.mktemp("server")
    shutil.copyfile(empty_registry / "mlflow.db", root / "server.db")
    with tracking_server.running(root, f"sqlite:///{root}/server.db") as port:
        for user in (READER, EDITOR):
            tracking_server.add_user(f"http://127.0.0.1:{port}", *user)
        yield root, port


@pytest.fixture(scope="module")
def relay(server):
    with Proxy(server[1]) as proxy:
        yield proxy


@pytest.fixture
def proxy(relay, monkeypatch, tmp_path):
    """The way to the server, in order; what clients read is set to name it and the user."""
    relay.heal()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", relay.url)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    log_in(monkeypatch, *ADMIN)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name, value in tracking_server.IMPATIENCE.items():
        monkeypatch.setenv(name, value)
    yield relay
    relay.heal()


@pytest.fixture
def little_code(monkeypatch, tmp_path):
    """A version holds one file of source instead of a hundred: faults are found sooner."""
    monkeypatch.setattr(mlflow_upload, "_PACKAGE", make_little_code(tmp_path))


@pytest.fixture
def open_store(proxy, tmp_path, request):
    """Opens the store of this test's own registered model."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return lambda: PairStore(tmp_path / "project", RegistryConfig(name, EXPERIMENT))


@pytest.fixture
def register(tmp_path):
    """Registers a pair in a store; returns its version."""

    def call(store, target="t1", draft="d1", *, speedup=1.2):
        draft_dir, evidence = make_files(tmp_path / f"{target}-{draft}", draft, speedup=speedup)
        record = make_record(target, draft)
        tags = {**TAGS, "speedup": f"{speedup:.4f}"}
        return store.register(record, draft_dir, evidence=evidence, tags=tags, target_source=SOURCE)

    return call


def pair_runs(store, draft="d1", target="t1"):
    """Status of each upload of a pair."""
    client = MlflowClient()
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    pair = f"tags.pair_digest = '{make_record(target, draft).digest}' and tags.kind = 'pair'"
    found = client.search_runs([experiment], f"{pair} and tags.pair_name = '{store.name}'")
    return sorted(run.info.status for run in found)


def require_no_secret(text):
    assert PASSWORD not in text
    assert tracking_server.encoded(USER, PASSWORD) not in text


@pytest.fixture
def require_nothing_recorded(server, caplog):
    """Reads all that clients and server logged, the database and every file of every version."""
    for name in (None, "urllib3"):
        caplog.set_level(logging.DEBUG, logger=name)

    def call():
        require_no_secret(caplog.text)
        stored = [path for path in (server[0] / "artifacts").rglob("*") if path.is_file()]
        assert stored
        for path in (server[0] / "server.log", *server[0].glob("server.db*"), *stored):
            require_no_secret(path.read_bytes().decode(errors="replace"))

    return call


@pytest.mark.usefixtures("little_code")
def test_a_pairs_life_on_a_server_with_basic_auth(
    open_store, register, tmp_path, require_nothing_recorded
):
    store = open_store()
    assert store.versions() == []
    assert [register(store, "t1", "d1"), register(store, "t2", "d2")] == ["1", "2"]
    assert register(store, "t1", "d1", speedup=1.5) == "1"
    folder = store.fetch(store.resolve("1").pair, tmp_path / "fetched")
    assert (folder / "draft" / "model.safetensors").read_text() == "weights of d1"
    assert read_json(folder / "evidence" / "benchmark.json")["speedup"]["mean"] == 1.5
    store.set_challenger("2")
    write_json(tmp_path / "decision.json", {"verdict": "promote", "reasons": []})
    store.attach_decision("2", tmp_path / "decision.json", tmp_path / "decision.json")
    assert store.promote("1", ["first"]) is None
    assert store.promote("2", [f"faster than {PASSWORD}"]) == "1"
    assert store.incumbents(digest("t2"))[0].version == "1"
    assert store.rollback(reason=f"slow: {PASSWORD}", is_reachable=always).champion.version == "1"
    assert store.resolve("2").quarantine == "slow: ***"
    assert store.champion().version == "1"
    moves = [(move.kind, move.predecessor, move.version) for move in store.history()]
    assert moves == [("promotion", None, "1"), ("promotion", "1", "2"), ("rollback", "2", "1")]
    require_nothing_recorded()


@pytest.mark.usefixtures("little_code")
def test_credentials_in_the_address_are_not_recorded_either(
    proxy, open_store, register, tmp_path, require_nothing_recorded, monkeypatch
):
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME")
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD")
    address = proxy.url.replace("://", f"://{USER}:{PASSWORD}@")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    store = open_store()
    register(store)
    store.fetch(store.resolve("1").pair, tmp_path / "fetched")
    proxy.deal = lambda *_: "down"
    with pytest.raises(RegistryError) as caught:
        store.promote("1", [])
    require_no_secret(str(caught.value))
    require_nothing_recorded()


def test_a_pair_is_loaded_from_a_server(open_store, tmp_path, require_nothing_recorded):
    store = open_store()
    save_target(tmp_path / "target")
    record = save_draft_for(tmp_path / "target", tmp_path / "draft")
    arguments = {"evidence": {}, "tags": TAGS, "target_source": str(tmp_path / "target")}
    store.promote(store.register(record, tmp_path / "draft", **arguments), [])
    uri = f"models:/{store.name}@champion"
    answer = load_pair(uri, root=tmp_path / "elsewhere").generate("hello", max_new_tokens=4)
    assert answer.num_rounds
    loaded = mlflow.pyfunc.load_model(uri, model_config={"max_new_tokens": 4})
    assert loaded.predict(["hello"]) == [answer.text]
    assert store.check_model(store.champion())
    require_nothing_recorded()


def test_writers_of_all_projects_of_a_server_share_a_lock(proxy, open_store, tmp_path, monkeypatch):
    mine = open_store()
    config = RegistryConfig(mine.name, EXPERIMENT)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.url.replace("://", f"://{USER}:{PASSWORD}@"))
    stores = [mine, PairStore(tmp_path / "clone", config)]
    (path,) = {store.catalog.connection.lock.lock_file for store in stores}
    assert path.startswith(str(tmp_path / "state"))


@pytest.mark.parametrize("password", ["wrong-password", None])
def test_a_wrong_or_missing_password_is_one_clear_error(open_store, monkeypatch, password):
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD")
    if password is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
    with pytest.raises(
        RegistryError, match=r"(?s)not authenticated.*MLFLOW_TRACKING_PASSWORD"
    ) as error:
        open_store()
    assert "wrong-password" not in str(error.value)
    assert error.value.__suppress_context__


@pytest.mark.usefixtures("little_code")
def test_a_user_who_may_only_read_changes_nothing(open_store, register, monkeypatch):
    store = open_store()
    register(store)
    log_in(monkeypatch, *READER)
    reader = open_store()
    for change in (
        lambda: register(reader, "t2", "d2"),
        lambda: reader.promote("1", []),
        lambda: reader.quarantine("1", "slow"),
        lambda: reader.set_live_drift("1", "alpha fell"),
    ):
        with pytest.raises(RegistryError, match="Permission denied") as error:
            change()
        assert READER[1] not in str(error.value)
    assert reader.champion() is None
    assert [item.quarantine for item in reader.versions()] == [None]


@pytest.mark.usefixtures("little_code")
def test_a_user_who_may_edit_registers_and_moves_but_deletes_nothing(
    proxy, open_store, register, monkeypatch
):
    store = open_store()
    register(store, "t1", "d1")
    mine = {"experiment": store.catalog.experiment_id(), "registered_model": store.name}
    tracking_server.grant(proxy.url, EDITOR[0], "EDIT", **mine)
    log_in(monkeypatch, *EDITOR)
    editor = open_store()
    editor.promote("1", ["first"])
    editor.promote(register(editor, "t2", "d2"), ["faster"])
    assert editor.rollback(reason="slow", is_reachable=always).champion.version == "1"
    register(editor, "t3", "d3")
    register(editor, "t4", "d4")
    editor.set_damage("2", "draft/ is gone")
    editor.set_live_drift("2", "alpha fell")
    for change in (
        lambda: editor.set_damage("2", None),
        lambda: editor.clear_live_drift("2", "a false alarm"),
        lambda: release(editor.catalog, "2", reason="it was the disk"),
        lambda: prune(editor.catalog, keep=2, dry_run=False),
    ):
        with pytest.raises(RegistryError, match="Permission denied"):
            change()
    assert [item.pair.version for item in editor.versions()] == ["1", "2", "3", "4"]
    assert editor.resolve("2").tags["live_drift"] == "alpha fell"
    assert editor.resolve("2").quarantine == "slow"
    assert [move.kind for move in editor.history()] == ["promotion", "promotion", "rollback"]
    assert "live_drift_cleared" not in editor.resolve("2").tags, "half of it was done"


AT_READY = {"method": "PATCH", "ending": ""}
AT_VERSION = {"method": "POST", "ending": "model-versions/create"}


@pytest.mark.usefixtures("little_code")
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(("down", 5, IN_UPLOAD), id="down in the upload"),
        pytest.param(("error", 5, IN_UPLOAD), id="500 in the upload"),
        pytest.param(("slow", 5, IN_UPLOAD), id="slow in the upload"),
        pytest.param(("down", 1, AT_VERSION), id="down at the version"),
        pytest.param(("error", 1, AT_VERSION), id="500 at the version"),
        pytest.param(("lost", 1, AT_VERSION), id="unanswered at the version"),
    ],
)
def test_a_server_that_fails_in_an_upload_is_one_error_and_the_rerun_makes_one_version(
    proxy, open_store, register, tmp_path, monkeypatch, fault
):
    kind, number, place = fault
    if kind == "slow":
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    store = open_store()
    proxy.deal = after(number, kind, **place)
    with pytest.raises(RegistryError, match="registering small") as error:
        register(store)
    require_no_secret(str(error.value))
    assert error.value.__suppress_context__
    proxy.heal()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    for item in store.versions():  # only where the answer was lost
        assert kind == "lost"
        store.fetch(item.pair, tmp_path / item.pair.version)
    register(store)
    assert [item.pair.version for item in store.versions()] == ["1"]
    store.fetch(store.resolve("1").pair, tmp_path / "fetched")
    is_resumed = place is IN_UPLOAD or kind == "lost"
    assert pair_runs(store) == (["FINISHED"] if is_resumed else ["FINISHED", "KILLED"])


@pytest.fixture
def broken_off(little_code, proxy, open_store, register):
    """A store in which an upload of a pair lacks no file and was not finished."""
    store = open_store()
    proxy.deal = after(1, "down", **AT_READY)
    with pytest.raises(RegistryError, match="registering small"):
        register(store)
    return store


def files_sent(proxy, call):
    """Names of the model's files that a call sends."""
    sent = []
    proxy.deal = noting(sent, "PUT")
    call()
    return {PurePosixPath(path).name for path in sent if "/models/" in path}


def test_what_arrived_before_an_upload_broke_off_is_not_sent_again(
    proxy, server, broken_off, register, tmp_path
):
    cut = max((server[0] / "artifacts").rglob("draft.json"), key=lambda path: path.stat().st_mtime)
    cut.write_text("{")
    sent = files_sent(proxy, lambda: register(broken_off))
    assert {"MLmodel", "draft.json"} <= sent
    assert not {"model.safetensors", "pair.json"} & sent
    (version,) = broken_off.versions()
    broken_off.fetch(version.pair, tmp_path / "fetched")
    assert broken_off.check_model(version.pair)
    assert pair_runs(broken_off) == ["FINISHED"]


def test_an_upload_of_other_code_goes_on_from_none(proxy, broken_off, register):
    write_text(mlflow_upload._PACKAGE / "more.py", "")
    sent = files_sent(proxy, lambda: register(broken_off))
    assert {"MLmodel", "model.safetensors", "more.py"} <= sent
    assert broken_off.check_model(broken_off.versions()[0].pair)
    assert pair_runs(broken_off) == ["FINISHED", "KILLED"]


@pytest.mark.usefixtures("little_code")
def test_requests_that_are_sent_twice_have_one_effect(proxy, open_store, register, tmp_path):
    """The first answer to every change is lost on the way back, so the client sends it again."""
    sent = set()

    def deal(method, path, body):
        if method == "GET" or (method, path, body) in sent:
            return "pass"
        sent.add((method, path, body))
        return "lost"

    store = open_store()
    proxy.deal = deal
    assert register(store, "t1", "d1") == "1"
    second = register(store, "t2", "d2")  # not 2: the first one's repeat had that number
    store.promote("1", ["first"])
    store.promote(second, ["faster"])
    store.rollback(reason="slow", is_reachable=always)
    proxy.heal()
    assert [item.pair.version for item in store.versions()] == ["1", second]
    assert [move.version for move in store.history()] == ["1", second, "1"]
    assert pair_runs(store) == ["FINISHED", "KILLED"]
    store.fetch(store.champion(), tmp_path / "fetched")


@pytest.mark.usefixtures("little_code")
def test_a_server_that_fails_in_a_promotion_leaves_a_history_that_is_true(
    proxy, open_store, register
):
    store = open_store()
    champion, other = register(store, "t1", "d1"), register(store, "t2", "d2")
    store.promote(champion, ["first"])
    moves = [champion]
    places = ("alias", "runs/update")
    for place, kind in zip(places * 2, ("down", "error", "lost", "lost"), strict=True):
        proxy.deal = after(1, kind, method="POST", ending=place)
        with pytest.raises(RegistryError, match="promoting a pair"):
            store.promote(other, ["faster"])
        proxy.heal()
        is_moved = place == "runs/update" or kind == "lost"
        holder = other if is_moved else champion
        assert store.champion().version == store.history()[-1].version == holder
        assert store.promote(other, ["faster"]) == champion
        moves.append(other)
        assert [move.version for move in store.history()] == moves
        assert store.champion().version == other
        champion, other = other, champion


@pytest.mark.usefixtures("little_code")
@pytest.mark.parametrize("file", ["model.safetensors", "pair.json", "benchmark.json"])
def test_a_download_that_breaks_off_is_no_damage_and_the_next_one_is_whole(
    proxy, open_store, register, tmp_path, file
):
    store = open_store()
    register(store)
    pair = store.resolve("1").pair
    proxy.deal = after(1, "cut", method="GET", ending=file)
    with pytest.raises(RegistryError, match="fetching version 1") as error:
        store.fetch(pair, tmp_path / "fetched")
    assert not isinstance(error.value, DamagedPairError)
    assert list((tmp_path / "fetched").iterdir()) == []
    proxy.heal()
    folder = store.fetch(pair, tmp_path / "fetched")
    assert (folder / "draft" / "model.safetensors").read_text() == "weights of d1"


@pytest.mark.usefixtures("little_code")
@pytest.mark.parametrize(
    ("lost", "part"),
    [
        ("draft", "draft/"),
        ("draft/*", "draft/"),
        ("draft/draft.json", "draft/"),
        ("pair.json", "pair.json"),
        ("evidence_history/*", "evidence/"),
        ("evidence_history/*/benchmark.json", "evidence/"),
    ],
)
def test_what_the_server_lost_is_damage_that_the_version_is_marked_with(
    server, open_store, register, tmp_path, lost, part
):
    store = open_store()
    register(store)
    found = [path for folder in folders(server, store, "1") for path in folder.rglob(lost)]
    assert found
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    pair = store.resolve("1").pair
    with pytest.raises(DamagedPairError, match=f"fetching version 1 .* found {part} whose digest"):
        store.fetch(pair, tmp_path / "fetched")
    assert not fetch_or_mark(store, pair, tmp_path / "fetched")
    assert store.resolve("1").damage.startswith(part)


def folders(server, store, version):
    """Where the server keeps the files of a version and of its run."""
    client = store.catalog.client
    run_id = client.get_model_version(store.name, version).run_id
    places = (
        client.get_model_version_download_uri(store.name, version),
        client.get_run(run_id).info.artifact_uri,
    )
    return [server[0] / "artifacts" / urllib.parse.urlsplit(uri).path[1:] for uri in places]


@pytest.fixture
def whole(open_store, tmp_path):
    """The address of a pair whose target is only in the version."""
    save_target(tmp_path / "target")
    record = save_draft_for(tmp_path / "target", tmp_path / "draft")
    project = tmp_path / "project"
    (project / TARGETS).mkdir(parents=True)
    (tmp_path / "target").rename(project / TARGETS / short(record.target_digest))
    store = PairStore(project, RegistryConfig(open_store().name, EXPERIMENT, include_target=True))
    arguments = {"evidence": {}, "tags": TAGS, "target_source": str(tmp_path / "target")}
    return f"models:/{store.name}/{store.register(record, tmp_path / 'draft', **arguments)}"


@pytest.mark.usefixtures("little_code")
def test_a_target_whose_download_breaks_off_is_not_called_missing(proxy, whole, tmp_path):
    root = tmp_path / "elsewhere"
    proxy.deal = after(1, "down", method="GET", ending="target/model.safetensors")
    with pytest.raises(RegistryError, match="(?s)finding the target .*fetching a target"):
        load_pair(whole, root=root)
    proxy.heal()
    assert load_pair(whole, root=root).generate("hello", max_new_tokens=2).num_rounds
    assert len(list((root / TARGETS).glob("*/model.safetensors"))) == 1


@pytest.mark.parametrize("uri", ["models:/nobody/1", "models:/nobody@champion"])
@pytest.mark.parametrize("user", [ADMIN, READER], ids=["administrator", "reader"])
@pytest.mark.usefixtures("proxy")
def test_a_model_that_is_not_there_is_no_fault_of_the_server(monkeypatch, tmp_path, uri, user):
    """Nor where MLflow calls it forbidden, which is what it tells all but administrators."""
    log_in(monkeypatch, *user)
    with pytest.raises(TargetError, match=f"fetching a target from {uri}"):
        fetch_model(uri, tmp_path, root=tmp_path)
