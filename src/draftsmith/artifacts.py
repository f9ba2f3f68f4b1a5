"""Atomic reads and writes of what stages exchange, and content digests.

A reader sees the old file or the new one, never half of one. Knows nothing of what the files mean.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftsmith.errors import ArtifactError, DraftsmithError

_SHORT_DIGITS = 16
_CHUNK_BYTES = 1 << 22
_SCRATCH = ".partial"
# A refused write in the words of those who raise no OSError: Rust (safetensors, tokenizers) and
# torch's archive writer, by its own checks or through the C++ stream.
_REFUSALS = ("(os error ", "inline_container", "iostream error", "iostream_category error")


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
    with writing(path), scratch_directory(path.parent, path.name) as scratch:
        new = scratch / "new"
        new.mkdir()
        yield new
        if path.exists():
            path.replace(scratch / "old")
        new.replace(path)


def flush(folder: Path) -> None:
    """Wait until the disk holds the files in `folder`, whichever library wrote them.

    Else a power cut may leave a folder its new name and its files without their content.
    """
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def scratch_directory(parent: Path, name: str) -> Iterator[Path]:
    """Yield an empty folder in `parent`, gone after the block.

    What killed processes left there under the same name goes first. A living owner holds a lock on
    its folder, which the system drops when the process ends, however it ends.

    Raises:
        ArtifactError: The disk refused to make the folder.
    """
    with writing(parent / name):
        parent.mkdir(parents=True, exist_ok=True)
        for left_over in parent.glob(f".{glob.escape(name)}.*{_SCRATCH}"):
            _remove_abandoned(left_over)
        folder, lock = _locked_folder(parent, name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked_folder(parent: Path, name: str) -> tuple[Path, int | None]:
    """A new folder and the descriptor of its lock; None where the file system has no locks."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=f".{name}.", suffix=_SCRATCH))
        try:
            lock = _lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process swept before the lock was there
        except OSError:
            return folder, None
        if folder.exists():
            return folder, lock
        os.close(lock)


def _remove_abandoned(folder: Path) -> None:
    try:
        lock = _lock(folder)
    except OSError:  # its owner lives, or nobody can tell
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def keep_only(folder: Path, name: str) -> None:
    """Remove the folders in `folder` other than `name`: partial work that no run will resume."""
    for path in folder.glob("*"):
        if path.name != name:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a refused write inside the block, whichever library made it, into an ArtifactError.

    Raises:
        ArtifactError: The disk refused.
    """
    try:
        yield
    except DraftsmithError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or any(words in str(error) for words in _REFUSALS):
            raise write_failure(path, error) from error
        raise


def write_failure(path: Path, error: Exception) -> ArtifactError:
    """The error for a write that the operating system refused."""
    reason = error.strerror if isinstance(error, OSError) else None
    text = str(error).partition("\n")[0]
    return ArtifactError(
        f"writing {path}",
        found=reason or f"a refused write ({text})",
        expected="room and permission to write there",
        remedy="free disk space or mend the permissions, then rerun; nothing was changed",
    )
