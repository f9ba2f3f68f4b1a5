"""The import contracts of pyproject.toml hold, and each would notice a breach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"

# One forbidden line a contract; the file is made where it does not exist.
BREACHES = {
    "layers": ("src/draftsmith/targets/breach.py", "import draftsmith.corpus"),
    "pipeline": ("src/draftsmith/errors.py", "import pipeline"),
    "pipeline-cli": ("pipeline/breach.py", "import draftsmith.cli"),
    "mlflow": ("src/draftsmith/corpus/breach.py", "import mlflow"),
    "omegaconf": ("src/draftsmith/artifacts.py", "import omegaconf"),
    "decoding": ("src/draftsmith/decoding/breach.py", "import datasets"),
    "speed": ("src/draftsmith/evaluation/speed.py", "import datasets"),
    "report": ("src/draftsmith/report/breach.py", "import torch"),
}


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    return subprocess.run(
        [sys.executable, "-c", COMMAND],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def contract_names() -> dict[str, str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {contract["id"]: contract["name"] for contract in contracts["contracts"]}


def test_imports_point_down_only():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_contract_notices_a_breach(tmp_path):
    names = contract_names()
    assert sorted(names) == sorted(BREACHES)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("src", "pipeline"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "data")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file, line in BREACHES.values():
        with (tmp_path / file).open("a") as stream:
            stream.write(f"\n\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    kept = [name for name in names.values() if f"{name} BROKEN" not in done.stdout]
    assert kept == [], done.stdout
