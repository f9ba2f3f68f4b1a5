"""Where a registered pair's target can be found again, verified by digest.

A pair records the source of its target as text. Sources move, so none is trusted: whatever is
found must have the digest that the pair was measured with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftsmith.artifacts import short
from draftsmith.errors import DraftsmithError, RegistryError, TargetError
from draftsmith.targets.checkpoint import is_checkpoint
from draftsmith.targets.compatibility import require_target
from draftsmith.targets.identity import identify
from draftsmith.targets.loading import target_directory
from draftsmith.targets.resolved import HUB_PREFIX, TARGETS
from draftsmith.targets.settings import TargetConfig
from draftsmith.targets.snapshot import held_identity
from draftsmith.targets.source import FetchModel, resolve


def find_target(
    digest: str, dtype: str, *, root: Path, sources: Sequence[str], fetch_model: FetchModel
) -> Path:
    """Folder with the target's checkpoint: its snapshot below `root`, or the first source with it.

    A source that is no checkpoint folder is fetched into a snapshot.

    Args:
        digest: The target's digest.
        dtype: The dtype that belongs to its identity.
        root: The project's folder.
        sources: Where to look, such as what `describe_source` returned.
        fetch_model: Downloads a `models:/` source.

    Raises:
        TargetError: The target is in none of these places; what each of them holds is named.
        RegistryError: It is in none of those that could be asked, and the registry did not answer.
    """
    snapshots = root / TARGETS
    if held_identity(snapshots, digest) is not None:
        return target_directory(snapshots, digest)
    failures = [f"no intact snapshot {snapshots / short(digest)}"]
    kind: type[DraftsmithError] = TargetError
    for source in sources:
        try:
            return _fetch(source, digest, dtype, snapshots, fetch_model)
        except (TargetError, RegistryError) as error:
            failures.append(f"{error.what}: {error.found}")
            kind = RegistryError if isinstance(error, RegistryError) else kind
    raise kind(
        f"finding the target {digest}",
        found="; ".join(failures),
        expected="the target that the pair was measured with",
        remedy="bring it back to one of these places, or name its folder with the argument "
        "`target`",
    )


def _fetch(source: str, digest: str, dtype: str, snapshots: Path, fetch_model: FetchModel) -> Path:
    folder = Path(source)
    if is_checkpoint(folder):
        require_target(identify(folder, dtype), digest)
        return folder
    found = resolve(_config(source, dtype), root=snapshots, fetch_model=fetch_model)
    require_target(found.identity, digest)
    return target_directory(snapshots, digest)


def is_reachable(
    digest: str, dtype: str, *, root: Path, sources: Sequence[str], fetch_model: FetchModel
) -> bool:
    """Whether `find_target` would find it."""
    try:
        find_target(digest, dtype, root=root, sources=sources, fetch_model=fetch_model)
    except DraftsmithError:
        return False
    return True


def _config(source: str, dtype: str) -> TargetConfig:
    revision: str | None = None
    if source.startswith(HUB_PREFIX):
        source, _, rest = source.partition("@")
        revision = rest or None
    return TargetConfig("recorded", source, revision, dtype=dtype, snapshot="copy")
