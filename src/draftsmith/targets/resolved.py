"""What the project's target source meant when it was last resolved: the commit, the version.

Branches and aliases move, so a pair records what they stood for. Kept beside the snapshots and part
of no digest: another commit with the same content is the same target.
"""

from __future__ import annotations

from pathlib import Path

from draftsmith.artifacts import read_json, write_json
from draftsmith.targets.settings import TargetConfig

TARGETS = Path("models", "targets")
HUB_PREFIX = "hf:"
_FILE = ".resolved.json"


def remember_resolved(root: Path, config: TargetConfig, resolved: str) -> None:
    """Note below `root`, the folder of all snapshots, what `config` was resolved to.

    Raises:
        ArtifactError: The disk refused.
    """
    entry = {"source": config.source, "revision": config.revision, "resolved": resolved}
    write_json(root / _FILE, entry)


def last_resolved(root: Path, source: str, revision: str | None) -> str | None:
    """What this source was resolved to; None when another one, or none, was resolved last."""
    path = root / _FILE
    entry = read_json(path) if path.is_file() else {}
    is_same = (entry.get("source"), entry.get("revision")) == (source, revision)
    return str(entry["resolved"]) if is_same else None


def describe_source(source: str, revision: str | None, *, root: Path) -> str:
    """The text that a pair records: paths made absolute, branches and aliases as last resolved."""
    resolved = last_resolved(root / TARGETS, source, revision)
    if resolved is not None:
        source = resolved
    elif revision is not None:
        source = f"{HUB_PREFIX}{source.removeprefix(HUB_PREFIX)}@{revision}"
    if source.startswith(("models:", "package:", HUB_PREFIX)):
        return source
    path = root / Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source
