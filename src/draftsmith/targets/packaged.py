"""Targets that arrive inside something else: a Python package, an MLflow model.

Finds files; runs no code of the package and knows no MLflow: the caller brings the download.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from draftsmith.errors import TargetError
from draftsmith.targets.checkpoint import TEMPLATE_FILE, is_checkpoint

_PACKAGE = re.compile(r"package:([A-Za-z_]\w*)/(.+)")
_MODEL_URI = re.compile(r"models:/[^/@]+(/[^/@]+|@[^/@]+)")
_MAX_NAMED = 3


def find_in_package(source: str) -> Path:
    """Path of `package:<package>/<file>` in the installed package, which is not imported.

    Raises:
        TargetError: Another form, no such package or file, or a path that leaves the package.
    """
    match = _PACKAGE.fullmatch(source)
    if match is None:
        raise TargetError(
            f"reading target.source {source}",
            found="another form",
            expected="package:<package>/<file>, the package at top level",
            remedy="name the package as it is imported, then the file inside it",
        )
    package, name = match.groups()
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise TargetError(
            f"finding target.source {source}",
            found=f"no installed package {package}",
            expected="a package that holds the model's file",
            remedy="install it in this environment (for the default target: `make setup`)",
        )
    for folder in map(Path, folders):
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise TargetError(
                f"reading target.source {source}",
                found=f"a path outside the package ({path})",
                expected=f"a file below {folder}",
                remedy="give the file's path inside the package; for another place use its path",
            )
        if path.exists():
            return path
    files = sorted(file.name for folder in folders for file in Path(folder).glob("*.gguf"))
    raise TargetError(
        f"finding target.source {source}",
        found=f"no such file; GGUF files there: {', '.join(files) or 'none'}",
        expected=f"a file below {folders[0]}",
        remedy="correct the file's name, or install the version of the package that has it",
    )


def require_model_uri(source: str) -> None:
    """Check the form of a `models:/` source.

    Raises:
        TargetError: Neither a version nor an alias is named.
    """
    if _MODEL_URI.fullmatch(source) is None:
        raise TargetError(
            f"reading target.source {source}",
            found="another form",
            expected="models:/<name>/<version> or models:/<name>@<alias>",
            remedy="name the registered model with a version or an alias",
        )


def find_in_model(folder: Path, source: str) -> tuple[Path, Path]:
    """The checkpoint directory in a downloaded MLflow model, and the one with its tokenizer.

    MLflow's Transformers flavour keeps the tokenizer apart, in components/tokenizer.

    Raises:
        TargetError: The model holds no checkpoint, or several.
    """
    configs = sorted(folder.rglob("config.json"))
    places = [config.parent for config in configs if is_checkpoint(config.parent)]
    if len(places) != 1:
        names = [str(place.relative_to(folder)) for place in places[:_MAX_NAMED]]
        raise TargetError(
            f"finding the checkpoint in {source}",
            found=f"{len(places)} folders with config.json and safetensors {names or ''}".strip(),
            expected="exactly one",
            remedy="log the model with mlflow.transformers.log_model, which saves safetensors, "
            "or log one checkpoint directory as an artifact of the model",
        )
    apart = folder / "components" / "tokenizer"
    has_own = any((places[0] / name).is_file() for name in ("tokenizer.json", TEMPLATE_FILE))
    return places[0], apart if apart.is_dir() and not has_own else places[0]
