"""Atomic reads and writes of what stages exchange, and content digests.

A reader sees the old file or the new one, never half of one. Knows nothing of what the files mean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftsmith.errors import ArtifactError

_SHORT_DIGITS = 16
_CHUNK_BYTES = 1 << 22


def short(digest: str) -> str:
    """The first 16 hex digits of a digest: long enough for a folder name."""
    return digest[:_SHORT_DIGITS]


def digest_bytes(data: bytes) -> str:
    """sha256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def digest_json(data: object) -> str:
    """sha256 of the canonical JSON form (sorted keys, no spaces) of `data`."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return digest_bytes(text.encode())


def digest_file(path: Path) -> str:
    """sha256 of a file's bytes.

    Raises:
        ArtifactError: The file cannot be read.
    """
    state = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                state.update(chunk)
    except OSError as error:
        raise ArtifactError(
            f"reading {path}",
            found=error.strerror or str(error),
            expected="a readable file",
            remedy="restore the file or rerun the stage that writes it",
        ) from error
    return state.hexdigest()


def digest_directory(path: Path, *, exclude: Sequence[str] = ()) -> str:
    """Digest of all files below `path` by relative name and content, without those in `exclude`."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    named = {file.relative_to(path).as_posix(): file for file in files}
    kept = {name: digest_file(file) for name, file in named.items() if name not in exclude}
    return digest_json(kept)


def _jsonable(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} does not belong in an artifact")


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step; parent folders are made.

    Raises:
        ArtifactError: The disk refused; the old file, if any, is untouched.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise write_failure(path, error) from error


def write_json(path: Path, data: object) -> None:
    """Write `data` (plain values or a dataclass) as indented JSON with sorted keys, atomically.

    NaN and infinity are refused with ValueError: an artifact is read by other tools.
    """
    text = json.dumps(data, indent=2, sort_keys=True, default=_jsonable, allow_nan=False)
    write_text(path, text + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ArtifactError: The file is missing, not JSON, or not an object.
    """
    remedy = "rerun `dvc repro`, which writes it"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(
            f"reading {path}", found=error.strerror or str(error), expected="a file", remedy=remedy
        ) from error
    except ValueError as error:
        raise ArtifactError(
            f"reading {path}", found=f"no JSON ({error})", expected="JSON", remedy=remedy
        ) from error
    if not isinstance(data, dict):
        raise ArtifactError(
            f"reading {path}", found=type(data).__name__, expected="a JSON object", remedy=remedy
        )
    return data


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty sibling folder that takes the place of `path` when the block succeeds.

    Raises:
        ArtifactError: The disk refused; `path` is as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise write_failure(path, error) from error
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        temporary.replace(path)
    except OSError as error:
        raise write_failure(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_failure(path: Path, error: OSError) -> ArtifactError:
    """The error for a write that the operating system refused."""
    return ArtifactError(
        f"writing {path}",
        found=error.strerror or str(error),
        expected="room and permission to write there",
        remedy="free disk space or mend the permissions, then rerun; nothing was changed",
    )
