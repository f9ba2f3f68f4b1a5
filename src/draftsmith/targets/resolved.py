"""What the project's target source meant when it was last resolved: the commit, the version.

Branches and aliases move, so a pair records what they stood for. Kept beside the snapshots and part
of no digest: another commit with the same content is the same target.
"""

from __future__ import annotations

from pathlib import Path

from draftsmith.artifacts import read_json, write_json
from draftsmith.targets.settings import TargetConfig

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
