"""Copies of pairs and targets below models/ that nothing needs any more.

Both kinds can be made again: a pair's files come from the registry, a target's snapshot from its
source. So what is in doubt stays.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.artifacts import read_json, short
from draftsmith.errors import ArtifactError
from draftsmith.registry.pair import RegisteredPair
from draftsmith.registry.records import CHAMPIONS
from draftsmith.targets.resolved import TARGETS

_SNAPSHOT = re.compile(r"[0-9a-f]{16}")


def superfluous_copies(root: Path, name: str, kept: Sequence[RegisteredPair]) -> list[Path]:
    """Folders of fetched pairs and snapshots of targets that may go.

    Args:
        root: The project's folder.
        name: The registered model; pairs of another one stay, and so do their targets.
        kept: The versions that stay in the registry.

    Returns:
        None of them belongs to a kept version or to the target of build/target.json. Without that
        file no snapshot is listed.
    """
    needed = {short(pair.pair_digest) for pair in kept}
    targets = {short(pair.target_digest) for pair in kept}
    copies = []
    for folder in _folders(root / CHAMPIONS):
        foreign = _optional(folder / "origin.json").get("name", name) != name
        if foreign:
            targets |= _target_of(folder)
        elif folder.name not in needed:
            copies.append(folder)
    current = _optional(root / "build" / "target.json").get("digest")
    if current is not None:
        targets.add(short(str(current)))
        copies += [folder for folder in _folders(root / TARGETS) if folder.name not in targets]
    return copies


def remove(copies: Iterable[Path]) -> None:
    """Delete folders; of a link, the link only.

    Raises:
        ArtifactError: The disk refused.
    """
    for path in copies:
        try:
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)
        except OSError as error:
            raise ArtifactError(
                f"removing {path}",
                found=error.strerror or str(error),
                expected="permission to delete there",
                remedy="mend the permissions and prune again; what is left is harmless",
            ) from error


def num_bytes(copies: Iterable[Path]) -> int:
    """Bytes in folders; a link has none."""
    folders = [path for path in copies if not path.is_symlink()]
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files)


def _folders(place: Path) -> list[Path]:
    named = (path for path in place.glob("*") if _SNAPSHOT.fullmatch(path.name))
    return sorted(path for path in named if path.is_dir() or path.is_symlink())


def _target_of(folder: Path) -> set[str]:
    target = _optional(folder / "pair.json").get("target") or {}
    return {short(str(target["digest"]))} if "digest" in target else set()


def _optional(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is none to be read."""
    try:
        return read_json(path)
    except ArtifactError:
        return {}
