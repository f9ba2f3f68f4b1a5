"""Remembered identities: files that were not touched since need not be hashed again.

A stamp is made of absolute path, size, and modification and status-change times, so that an
overwrite in place is noticed even when the old modification time was put back. Losing this cache
costs time, never truth.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from draftsmith.artifacts import digest_json, read_json, write_json
from draftsmith.errors import ArtifactError, TargetError
from draftsmith.targets.identity import TargetIdentity

_LOGGER = logging.getLogger(__name__)
_CACHE_FILE = ".sources.json"


def stamp(files: Iterable[Path], settings: str) -> str:
    """Digest of where the files are, how large, when touched; and of what read them.

    Raises:
        TargetError: A file has gone or cannot be looked at.
    """
    facts: list[list[object]] = []
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise TargetError(
                f"reading {file}",
                found=error.strerror or str(error),
                expected="a readable file",
                remedy="wait until the checkpoint is written completely, then rerun",
            ) from error
        facts.append([str(file.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    # Another version may tokenise or convert otherwise: then the identity is worked out afresh.
    versions = [transformers.__version__, tokenizers.__version__]
    return digest_json([facts, settings, versions])


class IdentityCache:
    """Identities by key, each valid for one stamp, in `.sources.json` below `root`."""

    def __init__(self, root: Path) -> None:
        """Use the file below `root`; it is read at each call, so that processes can share it."""
        self._path = root / _CACHE_FILE

    def get(self, key: str, file_stamp: str) -> TargetIdentity | None:
        """The identity remembered for `key`, if its files still carry `file_stamp`."""
        entry = self._entries().get(key)
        if not isinstance(entry, dict) or entry.get("stamp") != file_stamp:
            return None
        try:
            return TargetIdentity(**entry["identity"])
        except (KeyError, TypeError):
            return None

    def put(self, key: str, file_stamp: str, identity: TargetIdentity) -> None:
        """Remember `identity`; an earlier one of the same key is replaced."""
        entries = self._entries()
        entries[key] = {"stamp": file_stamp, "identity": vars(identity)}
        write_json(self._path, entries)

    def _entries(self) -> dict[str, Any]:
        if not self._path.exists():
            return {}
        try:
            return read_json(self._path)
        except ArtifactError as error:
            _LOGGER.warning("event=identity_cache_unreadable path=%s error=%s", self._path, error)
            return {}
