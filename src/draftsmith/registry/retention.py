"""Which registered versions may be deleted. Pure: versions and moves in, reasons out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftsmith.registry.pair import PairVersion


@dataclass(frozen=True)
class Retention:
    """What becomes of the versions.

    Attributes:
        kept: Version -> why it stays.
        removed: Versions that nothing needs, oldest first.
    """

    kept: Mapping[str, str]
    removed: tuple[str, ...]


def retention(versions: Sequence[PairVersion], moved: Sequence[str], *, keep: int) -> Retention:
    """Decide what stays.

    A version stays while an alias points at it, while it is among the `keep` versions that were
    last champion and could be again, while a tag bars it (a pair that is forgotten would be built,
    registered and promoted again), and while it is the newest.

    Example: versions 1 to 5, champions in the order 1, 2, 4, and 3 and 5 blocked: with `keep=2`
    the versions 2 and 4 stay, and 5 as the newest; 1 and 3 may go.

    Args:
        versions: All versions.
        moved: Version that became champion, for every move of the alias, oldest first.
        keep: How many champions stay, the present one included.
    """
    usable = {item.pair.version for item in versions if item.state == "ok"}
    last = [version for version in dict.fromkeys(reversed(moved)) if version in usable]
    newest = max((int(item.pair.version) for item in versions), default=0)
    reasons = {
        item.pair.version: _reason(item, recent=last[:keep], newest=str(newest))
        for item in versions
    }
    return Retention(
        kept={version: reason for version, reason in reasons.items() if reason},
        removed=tuple(version for version, reason in reasons.items() if not reason),
    )


def _reason(item: PairVersion, *, recent: Sequence[str], newest: str) -> str | None:
    version = item.pair.version
    if item.aliases:
        return " and ".join(f"@{alias}" for alias in item.aliases)
    if item.quarantine is not None:
        return f"its quarantine keeps the pair out: {item.quarantine}"
    if item.pair.live_drift:
        return "its live-drift tag keeps the pair out"
    if version in recent:
        return "a rollback may need it"
    return "the newest version" if version == newest else None
