"""Our own copy of a target's files, under a folder named by its digest.

Teams overwrite checkpoints in place, so the copy shares no inode with its source: reflinks where
the file system has them, plain copies elsewhere, hardlinks never.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from pathlib import Path

from draftsmith.artifacts import atomic_directory, scratch_directory, short, writing
from draftsmith.errors import DraftsmithError, TargetError
from draftsmith.targets.checkpoint import needed_files
from draftsmith.targets.components import DTYPES
from draftsmith.targets.identity import TargetIdentity, identify, with_dtype
from draftsmith.targets.stamps import IdentityCache, stamp

_LOGGER = logging.getLogger(__name__)
_KEY_DTYPE = "float32"  # any one name will do: snapshots are remembered without their dtype
_FICLONE = 0x40049409  # Linux: share the extents, copy on write


def clone_file(source: Path, destination: Path) -> None:
    """Copy a file's content, by reflink where the file system can.

    Raises:
        OSError: The disk refused.
    """
    with source.open("rb") as reader, destination.open("wb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            return
        except OSError:
            pass
        shutil.copyfileobj(reader, writer, 1 << 22)


def identity_of(directory: Path, dtype: str, *, cache: IdentityCache) -> TargetIdentity:
    """Identity of a checkpoint directory, remembered while its files stay untouched.

    Raises:
        TargetError: The checkpoint is unusable, or changed while it was read.
    """
    key, before = _remembered_as(directory, dtype)
    known = cache.get(key, before)
    if known is not None:
        return known
    identity = identify(directory, dtype)
    if _remembered_as(directory, dtype) != (key, before):
        raise moving_target(directory)
    cache.put(key, before, identity)
    return identity


def _remembered_as(directory: Path, dtype: str) -> tuple[str, str]:
    """Cache key of a directory and the stamp of its files."""
    settings = f"dtype={dtype}"
    files = needed_files(directory)
    return f"{directory.absolute()} {settings}", stamp(files, settings)


def moving_target(directory: Path) -> TargetError:
    """The error for a source that was written while it was read."""
    return TargetError(
        f"reading the target {directory}",
        found="files that changed while they were read",
        expected="a checkpoint that nobody is writing",
        remedy="rerun when the checkpoint is complete",
    )


def keep_copy(source: Path, identity: TargetIdentity, root: Path) -> Path:
    """Make sure that `root` holds a whole copy of `source`; does nothing when it does.

    Args:
        source: Checkpoint directory whose identity is `identity`.
        identity: Decides the folder's name; the copy is read back and must have it.
        root: Folder of all snapshots.

    Raises:
        TargetError: The source changed meanwhile; nothing is left behind.
        ArtifactError: The disk refused; nothing is left behind.
    """
    place = root / short(identity.digest)
    is_held = held_identity(root, identity.digest) is not None
    if is_held and not place.is_symlink():
        return place
    if place.is_symlink():
        place.unlink()
    with atomic_directory(place) as folder:
        for file in needed_files(source):
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            clone_file(file, copy)
        copied = identify(folder, identity.dtype)
        if copied.digest != identity.digest:
            raise moving_target(source)
    key, fresh = _remembered_as(place, _KEY_DTYPE)
    IdentityCache(root).put(key, fresh, with_dtype(identity, _KEY_DTYPE))
    _LOGGER.info("event=target_snapshot digest=%s folder=%s", identity.digest, place)
    return place


def keep_link(source: Path, identity: TargetIdentity, root: Path) -> Path:
    """Let `root` point at `source` itself, for those who never overwrite a checkpoint.

    A whole copy that is already there stays.

    Raises:
        ArtifactError: The disk refused.
    """
    place = root / short(identity.digest)
    if held_identity(root, identity.digest) is not None:
        return place
    with writing(place), scratch_directory(root, place.name) as scratch:
        link = scratch / "link"
        link.symlink_to(source.resolve(), target_is_directory=True)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        link.replace(place)
    return place


def held_identity(root: Path, digest: str) -> TargetIdentity | None:
    """Identity of the snapshot of `digest` if its files are whole and have that digest, else None.

    A snapshot does not say in which dtype it is served, but the digest covers it: all are tried.
    """
    place = root / short(digest)
    if not place.is_dir():
        return None
    try:
        found = identity_of(place, _KEY_DTYPE, cache=IdentityCache(root))
    except DraftsmithError as error:
        _LOGGER.warning("event=snapshot_damaged folder=%s error=%s", place, error)
        return None
    identities = (with_dtype(found, name) for name in DTYPES)
    return next((identity for identity in identities if identity.digest == digest), None)
