"""Children that are killed at a write to the registry, forked from a process that imported it all.

Every public method of MLflow's client that asks no question counts as a write: one that is added
to the store is covered the day it is added.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import os
import shutil
import signal
import tempfile
from pathlib import Path

import sqlalchemy.orm
from mlflow import MlflowClient
from mlflow.utils import requirements_utils

from draftsmith.artifacts import write_json, write_text
from draftsmith.registry import mlflow_release, mlflow_upload
from draftsmith.registry.mlflow_store import PairStore
from tests.registry.small_pairs import (
    CONFIG,
    SOURCE,
    TAGS,
    make_files,
    make_little_code,
    make_record,
)

QUESTIONS = ("get_", "search_", "list_", "download_")
MOVED = "package:llm/moved.gguf"
REASON = "slow"


def always(_):
    return True


def register(store, root):
    """Register a new pair and propose it."""
    draft_dir, evidence = make_files(root / "new", "d9")
    history = [{"step": 1.0, "loss": 2.0, "alpha": 0.3}]
    write_json(draft_dir / "draft.json", {"training": {"history": history}})
    record = make_record("t9", "d9")
    version = store.register(record, draft_dir, evidence=evidence, tags=TAGS, target_source=SOURCE)
    store.set_challenger(version)


def register_again(store, root):
    """Register version 2's pair again: measured anew, its target elsewhere."""
    draft_dir, evidence = make_files(root / "news", "d2", speedup=1.9)
    write_json(root / "news" / "plots" / "speed.json", {"case": root.name})
    evidence = {**evidence, "plots/speed.json": root / "news" / "plots" / "speed.json"}
    tags = {**TAGS, "speedup": "1.9000"}
    record = make_record("t2", "d2")
    store.register(record, draft_dir, evidence=evidence, tags=tags, target_source=MOVED)


def promote(store, root):
    """Attach a decision to version 3 and promote it."""
    write_json(root / "decision.json", {"verdict": "promote", "reasons": ["faster"]})
    pages = [root / "report.html", root / "report.md"]
    for page in pages:
        write_text(page, "promote")
    store.attach_decision("3", root / "decision.json", *pages)
    store.promote("3", ["faster"])


def promote_other(store, _):
    store.promote("4", ["faster"])


def rollback(store, _):
    store.rollback(reason=REASON, is_reachable=always)


def release(store, _):
    """Take version 2 out of quarantine."""
    mlflow_release.release(store.catalog, "2", reason=REASON)


ACTIONS = {call.__name__: call for call in (register, register_again, promote, rollback)}
_ALL = {**ACTIONS, "promote_other": promote_other, "release": release}
# What takes long in a fresh process is done before the forks.
for _name in ("pyfunc", "store.tracking.sqlalchemy_store", "store.model_registry.sqlalchemy_store"):
    importlib.import_module(f"mlflow.{_name}")
sqlalchemy.orm.configure_mappers()
requirements_utils._init_modules_to_packages_map()
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["pytest", __name__])


def start(root, action, number=0, *, halfway=False):
    """Start a child; it dies at its write `number` (from 1; 0: never), or halfway through it."""
    child = _FORKS.Process(target=_act, args=(str(root), action, number, halfway))
    child.start()
    return child


def run(root, action, number=0, *, halfway=False):
    """The exit status of a child; the names of its writes are in `writes(root)`."""
    child = start(root, action, number, halfway=halfway)
    child.join(120)
    return child.exitcode


def writes(root):
    return (root / "writes.txt").read_text().split()


def die_while_the_schema_is_made(root):
    child = _FORKS.Process(target=_migrate_and_die, args=(str(root),))
    child.start()
    child.join(120)
    return child.exitcode


def _act(root, action, number, halfway):
    _prepare(Path(root))
    watch = _Watch(Path(root) / "writes.txt", number, halfway=halfway)
    for name, method in inspect.getmembers(MlflowClient, inspect.isfunction):
        if not name.startswith(("_", *QUESTIONS)):
            setattr(MlflowClient, name, watch.counted(method))
    _ALL[action](PairStore(Path(root), CONFIG), Path(root))


def _migrate_and_die(root):
    from alembic import command

    _prepare(Path(root))
    command.upgrade = _die
    PairStore(Path(root), CONFIG)


def _prepare(root):
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    tempfile.tempdir = str(root / "temporary")
    (root / "temporary").mkdir(exist_ok=True)
    mlflow_upload._PACKAGE = make_little_code(root)


def _die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def _die_halfway(source, destination, **_):
    data = Path(source).read_bytes()
    Path(destination).write_bytes(data[: len(data) // 2])
    _die()


class _Watch:
    def __init__(self, path, number, *, halfway):
        self.path, self.number, self.halfway = path, number, halfway
        self.count, self.is_inside = 0, False

    def counted(self, method):
        @functools.wraps(method)
        def call(*arguments, **options):
            if self.is_inside:
                return method(*arguments, **options)
            self.count += 1
            with self.path.open("a") as stream:
                stream.write(f"{method.__name__}\n")
            if self.count == self.number:
                self._kill()
            self.is_inside = True
            try:
                return method(*arguments, **options)
            finally:
                self.is_inside = False

        return call

    def _kill(self):
        if not self.halfway:
            _die()
        shutil.copy2 = _die_halfway  # how MLflow copies a folder into its store, and a file
        shutil.copyfileobj = _die
