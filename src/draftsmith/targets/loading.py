"""A target ready to run: model, tokenizer and identity, found by path or by digest.

Knows nothing of where targets come from; `source` puts them where this module finds them.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.artifacts import short
from draftsmith.errors import TargetError
from draftsmith.targets.compatibility import refuse_unservable, require_vocabulary
from draftsmith.targets.components import DTYPES, load_config, load_model, load_tokenizer
from draftsmith.targets.identity import TargetIdentity, identify
from draftsmith.targets.snapshot import held_identity

STORED = "stored"
_MEMORY = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")  # of this process, where it is in a container
_CONTAINER_FILES = ("memory.max", "memory.current")


@dataclass(frozen=True)
class LoadedTarget:
    """A target in memory.

    Attributes:
        model: In eval mode, `sdpa` attention, no parameter requires a gradient.
        tokenizer: Fast, with the target's chat template.
        identity: Of the files it was loaded from; when loaded by digest in another dtype, still
            the identity that the digest names.
        directory: Where these lie.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    identity: TargetIdentity
    directory: Path


def load_target(directory: Path, *, dtype: str, device: str = "cpu") -> LoadedTarget:
    """Load the checkpoint in `directory`; hashes all of its files.

    Args:
        directory: A Transformers checkpoint.
        dtype: "auto", bfloat16, float16 or float32.
        device: Where the model goes, in torch's words.

    Raises:
        TargetError: The checkpoint is damaged, incomplete, or of a kind that cannot be served.
    """
    refuse_unservable(load_config(directory), directory)
    identity = identify(directory, dtype)
    return _load(directory, identity, identity.dtype, device)


def target_directory(root: Path, digest: str) -> Path:
    """Folder of the target with `digest` below `root`.

    Raises:
        TargetError: There is none, or it is a link to a folder that has gone.
    """
    place = root / short(digest)
    if place.is_dir():
        return place
    found = "no such folder"
    if place.is_symlink():
        found = f"a link to {place.readlink()}, which has gone"
    raise TargetError(
        f"finding the target {digest} in {place}",
        found=found,
        expected="a snapshot of its checkpoint",
        remedy="point target.source at that checkpoint and run `dvc repro resolve_target`",
    )


def load_by_digest(
    root: Path, digest: str, *, dtype: str | None = None, device: str | None = None
) -> LoadedTarget:
    """Load the target with `digest` from its snapshot, after checking that it is the one.

    Args:
        root: Folder of all snapshots.
        digest: The identity's full digest.
        dtype: None for the dtype that the identity names; another one for analysis only; `STORED`
            for that of the files, which are mapped and not read.
        device: Where the model goes, in torch's words; None takes the accelerator where there is
            one, as `provenance.device` does.

    Raises:
        TargetError: There is no such snapshot, its files are another target's, or are damaged.
    """
    directory = target_directory(root, digest)
    identity = held_identity(root, digest)
    if identity is None:
        raise TargetError(
            f"loading the target {digest} from {directory}",
            found="damaged files, or another target's: the snapshot or its source was changed",
            expected=f"the files with digest {digest}",
            remedy="point target.source at that checkpoint and run `dvc repro resolve_target`; "
            "with target.snapshot: copy, overwriting a source does no harm",
        )
    chosen = identity.dtype if dtype is None else dtype
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return _load(directory, identity, chosen, place)


def _load(directory: Path, identity: TargetIdentity, dtype: str, device: str) -> LoadedTarget:
    tokenizer = load_tokenizer(directory)
    require_vocabulary(identity, tokenizer, directory)
    model = load_model(directory, dtype=None if dtype == STORED else dtype, device=device)
    return LoadedTarget(model, tokenizer, identity, directory)


def fits_memory(identity: TargetIdentity) -> bool:
    """Whether the weights, in the dtype that they are served in, fit into what memory is free."""
    needed_bytes = identity.num_parameters * DTYPES[identity.dtype].itemsize
    return needed_bytes < available_bytes()


def available_bytes() -> int:
    """Memory that this process may still take: of the machine, and of its container if it has one.

    Where the system does not tell, all of the machine's.
    """
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration, ValueError, IndexError):
        lines = _MEMORY.read_text().splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        available = int(found.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max" is no limit
        limit, taken = (int((_CONTAINER / name).read_text()) for name in _CONTAINER_FILES)
        available = min(available, max(0, limit - taken))
    return available
