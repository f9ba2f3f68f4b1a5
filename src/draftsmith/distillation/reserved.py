"""Files that have all their blocks before they are mapped into memory.

A memory-mapped write to a block that a full disk does not have would kill the process.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from draftsmith.artifacts import writing
from draftsmith.errors import ArtifactError

_BLOCK_BYTES = 1 << 20


def have_files(directory: Path, sizes: Mapping[str, int]) -> bool:
    """Whether there are files of these names and sizes in bytes."""
    files = [(directory / name, size) for name, size in sizes.items()]
    return all(file.exists() and file.stat().st_size == size for file, size in files)


def reserve_files(directory: Path, sizes: Mapping[str, int]) -> None:
    """Make `directory` anew with files of these sizes, in bytes.

    Raises:
        ArtifactError: There is no room; nothing is left.
    """
    shutil.rmtree(directory, ignore_errors=True)
    try:
        with writing(directory):
            directory.mkdir(parents=True)
            for name, size in sizes.items():
                with (directory / name).open("wb") as stream:
                    _allocate(stream, size)
    except ArtifactError:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _allocate(stream: BinaryIO, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(stream.fileno(), 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    for start in range(0, size, _BLOCK_BYTES):
        stream.write(bytes(min(_BLOCK_BYTES, size - start)))
