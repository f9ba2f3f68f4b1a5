"""Several processes of one training, as `accelerate launch` starts them; one process is the rule.

All compute, the main one writes. Launched with FSDP they also divide the frozen target among them:
each holds a part of every decoder layer and gathers a whole one while a forward runs through it.
What is outside the layers each holds for itself, because the draft reads it, and so is the draft.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from draftsmith.decoding.features import decoder_layers

_LONGEST_WAIT = timedelta(days=1)  # for the target's signals, which the main process computes
_FSDP = "ACCELERATE_USE_FSDP"
T = TypeVar("T")


def join() -> PartialState:
    """This process among the others; each takes its own device."""
    divides_target()
    return PartialState(cpu=not torch.cuda.is_available(), timeout=_LONGEST_WAIT)


def of_all(value: T) -> list[T]:
    """The value of every process, in their order; all processes call it together."""
    join()
    values: list[T] = gather_object([value])
    return values


@functools.cache
def divides_target() -> bool:
    """Whether the launcher was asked for FSDP.

    It is read once and taken away: `accelerate` would divide the draft by it, and Transformers
    would leave weights out.
    """
    return os.environ.pop(_FSDP, "false").lower() == "true"


def loading_device() -> str | None:
    """Where a target is loaded: one that is divided afterwards may be too large for a device."""
    return "cpu" if divides_target() else None


def divide(target: PreTrainedModel) -> None:
    """Divide the decoder layers among the processes, in place; the rest goes to their devices.

    From then on a forward is one of all processes: each runs as many as every other.
    """
    state = join()
    mesh = init_device_mesh(state.device.type, (state.num_processes,))
    for layer in decoder_layers(target):
        fully_shard(layer, mesh=mesh)
    whole = {p for p in target.base_model.parameters() if not isinstance(p, DTensor)}
    fully_shard(target.base_model, mesh=mesh, ignored_params=whole)
    target.to(state.device)


@contextlib.contextmanager
def written_by_main(path: Path) -> Iterator[Path]:
    """Yield `path` in the main process, in the others one of its name that nobody keeps."""
    if join().is_main_process:
        yield path
        return
    with tempfile.TemporaryDirectory() as dropped:
        yield Path(dropped) / path.name
