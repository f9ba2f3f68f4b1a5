"""Who is @champion, whom did it replace, who served another target, as far as they are intact."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.errors import DamagedPairError
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.pair import LIVE_DRIFT_TAG, RegisteredPair

_LOG = logging.getLogger(__name__)


def fetch_holders(store: PairStore, into: Path) -> dict[str, Any]:
    """Bring the files of the champion and its predecessor.

    Returns:
        The content of build/champion.json: `champion` and `predecessor`, a RegisteredPair or None;
        `history`, the versions that became champion, oldest first; `tagged`, draft digest -> the
        version whose traffic raised an alarm about it; `quarantined`, pair digest -> the version
        in quarantine.

    Raises:
        DamagedPairError: The champion's files are not what was registered; it is marked.
    """
    champion, predecessor = store.champion(), store.predecessor()
    if champion is not None:
        _fetch(store, champion, into)
    before = [] if predecessor is None else [predecessor]
    versions = store.versions()
    tagged = [item for item in versions if LIVE_DRIFT_TAG in item.tags]
    # A pair whose files were damaged may be registered again, free of what the old version had.
    barred = [item for item in versions if item.quarantine is not None and item.damage is None]
    return {
        "champion": champion,
        "predecessor": first_intact(store, before, into),
        "history": [move.version for move in store.history() if move.moved_alias],
        "tagged": {item.pair.draft_digest: item.pair.version for item in tagged},
        "quarantined": {item.pair.pair_digest: item.pair.version for item in barred},
    }


def first_intact(
    store: PairStore, pairs: Sequence[RegisteredPair], into: Path
) -> RegisteredPair | None:
    """Bring the files of the first pair whose files are what was registered; None without one.

    The pairs before it are marked as damaged, so that no run fails for an old pair twice.
    """
    return next((pair for pair in pairs if fetch_or_mark(store, pair, into)), None)


def fetch_or_mark(store: PairStore, pair: RegisteredPair, into: Path) -> bool:
    """Bring a pair's files, or mark its version as damaged and return False."""
    try:
        _fetch(store, pair, into)
    except DamagedPairError:
        return False
    return True


def _fetch(store: PairStore, pair: RegisteredPair, into: Path) -> None:
    """Bring a pair's files; a transfer may be cut, so a second one decides.

    Raises:
        DamagedPairError: They are not what was registered; the version is marked now.
    """
    try:
        try:
            store.fetch(pair, into)
        except DamagedPairError:
            store.fetch(pair, into)
    except DamagedPairError as error:
        store.set_damage(pair.version, error.found)
        _LOG.warning("event=damaged name=%s version=%s", pair.name, pair.version)
        raise
