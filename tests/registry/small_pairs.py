"""Small pairs for the store, which looks at no draft's content, and children that register them."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.parse
from pathlib import Path

from draftsmith.artifacts import digest_bytes, write_json, write_text
from draftsmith.registry.pair import DraftIdentity, PairRecord
from draftsmith.registry.settings import RegistryConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIG = RegistryConfig(name="demo", experiment="draftsmith", include_target=False)
TAGS = {"alpha": "0.4000", "tau": "1.5000", "speedup": "1.2000", "device": "A CPU", "drift": "pass"}
SOURCE = "package:llm/model.gguf"


def digest(text):
    return digest_bytes(text.encode())


def make_record(target="t1", draft="d1", *, recipe="small", corpus="c1"):
    return PairRecord(
        target={"digest": digest(target), "dtype": "float32", "num_parameters": 1},
        draft=DraftIdentity(
            family="student",
            recipe=recipe,
            recipe_digest=digest(recipe),
            digest=digest(draft),
            weights_digest=digest(f"weights of {draft}"),
            vocabulary_digest=None,
            target_digest=digest(target),
            corpus_digest=digest(corpus),
        ),
    )


def make_files(folder, draft="d1", *, speedup=1.2):
    """A draft folder and evidence."""
    write_json(folder / "draft" / "draft.json", {"draft": draft})
    write_text(folder / "draft" / "model.safetensors", f"weights of {draft}")
    estimate = {"mean": speedup, "low": speedup - 0.1, "high": speedup + 0.1}
    write_json(folder / "benchmark.json", {"draft_length": 2, "speedup": estimate})
    return folder / "draft", {"benchmark.json": folder / "benchmark.json"}


def weights_file(store, version):
    """Where the registry keeps the weights of a version's draft."""
    found = store.catalog.client.get_model_version(CONFIG.name, version)
    location = store.catalog.client.get_model_version_download_uri(found.name, found.version)
    folder = Path(urllib.parse.urlsplit(location).path)
    (weights,) = folder.rglob("model.safetensors")
    return weights


def make_little_code(folder):
    """What a version may hold in place of the hundred files of the package, to save time."""
    write_text(folder / "package" / "little.py", "")
    return folder / "package"


CHILD = """
import os, signal, sys
from pathlib import Path
from mlflow import MlflowClient
from draftsmith.registry.mlflow_store import PairStore
from tests.registry.small_pairs import CONFIG, SOURCE, TAGS, make_files, make_record

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

root, action, fatal_call = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if fatal_call:
    setattr(MlflowClient, fatal_call, die)
store = PairStore(root, CONFIG)
if action == "rollback":
    store.rollback(reason="slow", is_reachable=lambda item: True)
    sys.exit()
draft_dir, evidence = make_files(root / "files" / str(os.getpid()))
version = store.register(
    make_record(), draft_dir, evidence=evidence, tags=TAGS, target_source=SOURCE
)
store.promote(version, ["child"])
"""


def start_child(root, fatal_call="", *, action="register"):
    """A process that registers and promotes the default pair, or rolls back.

    It is killed when it comes to `fatal_call`, a method of MLflow's client.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), action, fatal_call],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
