"""A disk that refuses, without a disk of its own: no file of this process may grow past a limit."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Inside the block the system refuses every write past the first `num_bytes` of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
