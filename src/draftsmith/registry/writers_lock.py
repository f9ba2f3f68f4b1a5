"""Locks of those who write to a registry: MLflow numbers versions and moves aliases without one.

Readers take none. An upload lasts for minutes, so it has a lock of its own: a rollback waits for
none. Who needs both takes that of uploads first. Knows no MLflow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from draftsmith.artifacts import digest_json, short
from draftsmith.errors import RegistryError

_TIMEOUT_S = 1800.0


def writers_lock(
    database: Path | None, *, address: str, name: str, uploads: bool = False
) -> FileLock:
    """A lock of a registry; nothing is written yet.

    A database is one file, and so is its lock, beside it. A server's lock is this user's, whatever
    the project: a file in the project would keep no other clone out, and could be cleaned away.

    Args:
        database: The registry's sqlite file; None for a server.
        address: Of the server, without credentials.
        name: The registered model; each of a server's has locks of its own.
        uploads: The lock of uploads, not that of versions, tags and aliases.
    """
    suffix = ".uploads.lock" if uploads else ".lock"
    if database is not None:
        path = database.with_name(f"{database.name}{suffix}")
    else:
        states = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        digest = digest_json({"address": address.rstrip("/"), "name": name})
        path = Path(states) / "draftsmith" / "locks" / f"{short(digest)}{suffix}"
    # One object a path: who holds the lock can take it again.
    return FileLock(path, timeout=_TIMEOUT_S, is_singleton=True)


@contextlib.contextmanager
def held(lock: FileLock) -> Iterator[None]:
    """Hold the lock; reentrant within a thread.

    Raises:
        RegistryError: Another process held it for half an hour.
        OSError: The lock's file cannot be written.
    """
    Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:
        raise RegistryError(
            "locking the registry",
            found=f"{lock.lock_file} held by another process",
            expected="the lock within half an hour",
            remedy="wait for the other run to end, or stop it, then rerun",
        ) from None
    try:
        yield
    finally:
        lock.release()
