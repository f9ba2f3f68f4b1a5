"""Where a registered pair's target can be found again, verified by digest.

A pair records the source of its target as text. Sources move, so none is trusted: whatever is
found must have the digest that the pair was measured with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from draftsmith.artifacts import short
from draftsmith.errors import DraftsmithError, TargetError
from draftsmith.targets.checkpoint import is_checkpoint
from draftsmith.targets.compatibility import require_target
from draftsmith.targets.identity import identify
from draftsmith.targets.loading import target_directory
from draftsmith.targets.settings import TargetConfig
from draftsmith.targets.snapshot import held_identity
from draftsmith.targets.source import resolve

FetchModel = Callable[[str, Path], Path]
TARGETS = Path("models", "targets")
_HUB = "hf:"


def describe_source(source: str, revision: str | None, *, root: Path) -> str:
    """The text that a pair records: paths made absolute, a Hub source with its revision."""
    if source.startswith(("models:", "package:")):
        return source
    if revision is not None:
        return f"{_HUB}{source.removeprefix(_HUB)}@{revision}"
    path = root / Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def find_target(
    digest: str, dtype: str, *, root: Path, source: str | None, fetch_model: FetchModel | None
) -> Path:
    """Folder with the target's checkpoint: its snapshot below `root`, or the recorded source.

    A source that is no checkpoint folder is fetched into a snapshot.

    Args:
        digest: The target's digest.
        dtype: The dtype that belongs to its identity.
        root: The project's folder.
        source: What `describe_source` returned; None when nothing was recorded.
        fetch_model: Downloads a `models:/` source.

    Raises:
        TargetError: The target is neither here nor there, or the source is another target now.
    """
    snapshots = root / TARGETS
    if held_identity(snapshots, digest) is not None:
        return target_directory(snapshots, digest)
    if not source:
        raise TargetError(
            f"finding the target {digest}",
            found=f"no intact snapshot {snapshots / short(digest)} and no recorded source",
            expected="the target that the pair was measured with",
            remedy="name its folder with the argument `target`",
        )
    folder = Path(source)
    if is_checkpoint(folder):
        require_target(identify(folder, dtype), digest)
        return folder
    identity = resolve(_config(source, dtype), root=snapshots, fetch_model=fetch_model)
    require_target(identity, digest)
    return target_directory(snapshots, digest)


def is_reachable(
    digest: str, dtype: str, *, root: Path, source: str | None, fetch_model: FetchModel | None
) -> bool:
    """Whether `find_target` would find it."""
    try:
        find_target(digest, dtype, root=root, source=source, fetch_model=fetch_model)
    except DraftsmithError:
        return False
    return True


def _config(source: str, dtype: str) -> TargetConfig:
    revision: str | None = None
    if source.startswith(_HUB):
        source, _, rest = source.partition("@")
        revision = rest or None
    return TargetConfig(
        name="recorded",
        source=source,
        revision=revision,
        dtype=dtype,
        snapshot="copy",
        trust_remote_code=False,
    )
