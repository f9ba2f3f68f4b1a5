"""Several processes of one training, as `accelerate launch` starts them; one process is the rule.

All compute, the main one writes.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState

_LONGEST_WAIT = timedelta(days=1)  # for the target's signals, which the main process computes


def join() -> PartialState:
    """This process among the others; each takes its own device."""
    return PartialState(cpu=not torch.cuda.is_available(), timeout=_LONGEST_WAIT)


@contextlib.contextmanager
def written_by_main(path: Path) -> Iterator[Path]:
    """Yield `path` in the main process, in the others one of its name that nobody keeps."""
    if join().is_main_process:
        yield path
        return
    with tempfile.TemporaryDirectory() as dropped:
        yield Path(dropped) / path.name
