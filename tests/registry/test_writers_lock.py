"""Who keeps whom out: two projects of one server, two models, a lock that stays taken."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from filelock import FileLock

from draftsmith.errors import RegistryError
from draftsmith.registry import writers_lock as module
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.writers_lock import held, writers_lock
from tests.registry.small_pairs import CONFIG, ROOT, digest

SERVER = {"address": "https://registry.example.org", "name": "demo"}
HOLDER = """
import sys
from draftsmith.registry.writers_lock import held, writers_lock
with held(writers_lock(None, address="https://registry.example.org", name="demo")):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_two_projects_of_one_server_keep_each_other_out(tmp_path, monkeypatch):
    for project in ("one", "other"):
        (tmp_path / project).mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        cwd=tmp_path / "one",
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    monkeypatch.chdir(tmp_path / "other")
    mine = lock()
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RegistryError, match="held by another process"), held(mine):
            pass
        holder.stdin.close()
        assert holder.wait(60) == 0
    with held(mine):
        assert list(map(str, tmp_path.rglob("*.lock"))) == [mine.lock_file]
        assert not list((tmp_path / "one").iterdir())


def lock(**changes):
    return writers_lock(None, **(SERVER | changes))


def test_another_model_or_server_and_uploads_have_a_lock_of_their_own():
    assert lock().lock_file == lock(address=SERVER["address"] + "/").lock_file
    others = [lock(name="other"), lock(address="https://elsewhere.example.org")]
    others.append(lock(uploads=True))
    with held(lock()):
        for other in others:
            with held(other):
                assert other.is_locked


@pytest.mark.parametrize("is_new", [False, True], ids=["a registry", "a new database"])
def test_a_lock_that_stays_taken_is_an_error_that_names_it(root, is_new):
    folder = root / "new" if is_new else root
    folder.mkdir(exist_ok=True)
    named = "locking the registry: found .*mlflow.db.lock held by another process"
    with FileLock(folder / "mlflow.db.lock"), pytest.raises(RegistryError, match=named):
        PairStore(folder, CONFIG).set_challenger("1")


def test_who_only_reads_takes_no_lock_and_leaves_nothing_behind(root, stocked, tmp_path_factory):
    stocked.promote("1", ["first"])
    stocked.promote("2", ["faster"])
    (root / "mlflow.db.lock").unlink()
    before = sorted(root.rglob("*"))
    reader = PairStore(root, CONFIG)
    assert len(reader.versions()) == 4
    assert (reader.champion().version, reader.predecessor().version) == ("2", "1")
    assert [move.version for move in reader.history()] == ["1", "2"]
    assert reader.incumbents(digest("t9"))[0].version == "2"
    reader.fetch(reader.champion(), tmp_path_factory.mktemp("fetched"))
    assert sorted(root.rglob("*")) == before


def test_reading_an_empty_registry_makes_nothing_in_it(root):
    reader = PairStore(root, CONFIG)
    assert (reader.history(), reader.champion(), reader.incumbents(digest("t1"))) == ([], None, [])
    assert reader.catalog.client.get_experiment_by_name(CONFIG.experiment) is None
