"""Moving aliases: promotion, quarantine, rollback; and the mark of live drift.

Every move holds the registry's lock, is recorded before it is made, and is read back. A rollback
quarantines first: otherwise the next run would promote the bad version again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from draftsmith.artifacts import short
from draftsmith.errors import RegistryError
from draftsmith.registry.mlflow_catalog import CHAMPION
from draftsmith.registry.mlflow_connection import redact
from draftsmith.registry.mlflow_records import PROMOTION, ROLLBACK
from draftsmith.registry.pair import (
    CLEARED_TAG,
    LIVE_DRIFT_TAG,
    QUARANTINE_TAG,
    PairVersion,
    RegisteredPair,
)

if TYPE_CHECKING:
    from draftsmith.registry.mlflow_catalog import Catalog

Reachable = Callable[[PairVersion], bool]
_LOG = logging.getLogger(__name__)


def move_alias(catalog: Catalog, alias: str, version: str) -> None:
    """Point an alias at a version and read it back; call with the lock held.

    Raises:
        RegistryError: The alias points elsewhere after the move.
    """
    if catalog.aliases().get(alias) == version:
        return
    catalog.client.set_registered_model_alias(catalog.name, alias, version)
    holder = catalog.aliases().get(alias)
    if holder != version:
        raise RegistryError(
            f"moving @{alias} of {catalog.name}",
            found=f"version {holder} after the move",
            expected=f"version {version}",
            remedy="another process moved it; rerun to decide again",
        )


def promote(catalog: Catalog, version: str, reasons: Sequence[str]) -> str | None:
    """Move @champion to a version; does nothing when it is there already.

    Returns:
        The version that it replaced; None for the first champion.

    Raises:
        RegistryError: The version is quarantined, or another process moved the alias.
    """
    with catalog.connection.locked():
        champion = catalog.aliases().get(CHAMPION)
        if champion == version:
            catalog.log().settle(champion)
            return catalog.recorded_predecessor(version)
        chosen = catalog.resolve(version)
        if chosen.quarantine is not None:
            raise RegistryError(
                f"promoting version {version} of {catalog.name}",
                found=f"quarantine: {chosen.quarantine}",
                expected="a version that is not in quarantine",
                remedy="distil another draft: change the recipe, the corpus or the seed",
            )
        _move_champion(catalog, PROMOTION, chosen.pair, reasons)
        return champion


def quarantine(catalog: Catalog, version: str, reason: str) -> None:
    """Bar a version from being reused or promoted; the first reason stays."""
    with catalog.connection.locked():
        found = catalog.client.get_model_version(catalog.name, version)
        if QUARANTINE_TAG not in found.tags:
            text = redact(reason) or "no reason given"
            catalog.client.set_model_version_tag(catalog.name, version, QUARANTINE_TAG, text)


def mark_drifted(catalog: Catalog, version: str, reason: str) -> None:
    """Record that live traffic drifted away from a version; the first reason stays.

    Takes no lock: an alarm must not wait for an upload.
    """
    found = catalog.client.get_model_version(catalog.name, version)
    if LIVE_DRIFT_TAG not in found.tags:
        text = redact(reason) or "no reason given"
        catalog.client.set_model_version_tag(catalog.name, version, LIVE_DRIFT_TAG, text)


def clear_drift(catalog: Catalog, version: str, reason: str) -> None:
    """Take the live-drift tag off; why, and what the alarm said, stay in a tag of their own.

    Raises:
        RegistryError: The version carries no such tag.
    """
    alarm = catalog.client.get_model_version(catalog.name, version).tags.get(LIVE_DRIFT_TAG)
    if alarm is None:
        raise RegistryError(
            f"clearing the live drift of version {version} of {catalog.name}",
            found="no live-drift tag",
            expected="a version that `draftsmith monitor` tagged",
            remedy="choose another version; `draftsmith pairs` shows which ones are tagged",
        )
    text = f"{redact(reason)} (the alarm: {alarm})"
    catalog.client.set_model_version_tag(catalog.name, version, CLEARED_TAG, text)
    catalog.client.delete_model_version_tag(catalog.name, version, LIVE_DRIFT_TAG)


def rollback(
    catalog: Catalog, to: str | None, *, reason: str, is_reachable: Reachable
) -> RegisteredPair:
    """Quarantine the champion, then move @champion back.

    The rollback of a process that died after it had moved the alias is completed, not repeated:
    the champion that it chose would be put in quarantine otherwise.

    Returns:
        The new champion.

    Raises:
        RegistryError: There is no champion, or no version to go back to; nothing was changed.
    """
    with catalog.connection.locked():
        champion = catalog.aliases().get(CHAMPION)
        if champion is None:
            raise RegistryError(
                f"rolling back {catalog.name}",
                found="no champion",
                expected="a promoted version",
                remedy="run `dvc repro` to register and promote one",
            )
        if to in (None, champion) and _was_interrupted(catalog, champion, reason):
            catalog.log().settle(champion)
            return catalog.resolve(champion).pair
        choice = _choose(catalog, _earlier(catalog, champion, to), champion, is_reachable)
        quarantine(catalog, champion, reason)
        _move_champion(catalog, ROLLBACK, choice, [reason])
        return choice


def _was_interrupted(catalog: Catalog, champion: str, reason: str) -> bool:
    """Whether a rollback for this reason made `champion` what it is and died then."""
    move = catalog.log().interrupted(champion)
    return move is not None and (move.kind, move.reason) == (ROLLBACK, redact(reason))


def _earlier(catalog: Catalog, champion: str, to: str | None) -> list[str]:
    """Versions promoted before the champion was, newest first; with `to`, only that one.

    Example: after the promotions 1, 2, 3 and champion 3: [2, 1]; after a rollback to 2: [1].
    """
    moved = [move.version for move in catalog.moves() if move.kind == PROMOTION]
    if to is not None:
        return [to] if to in moved and to != champion else []
    last = max((i for i, version in enumerate(moved) if version == champion), default=len(moved))
    return [version for version in dict.fromkeys(reversed(moved[:last])) if version != champion]


def _choose(
    catalog: Catalog, candidates: Sequence[str], champion: str, is_reachable: Reachable
) -> RegisteredPair:
    versions = {item.pair.version: item for item in catalog.versions()}
    refused: list[str] = []
    for version in candidates:
        item = versions.get(version)
        obstacle = _obstacle(item, is_reachable)
        if item is not None and obstacle is None:
            return item.pair
        refused.append(f"version {version} {obstacle}")
    raise RegistryError(
        f"rolling back version {champion} of {catalog.name}",
        found="; ".join(refused) or "no other version that was champion before",
        expected="an earlier promoted version, not in quarantine, whose target is at hand",
        remedy="bring back the target's checkpoint, or promote another pair by `dvc repro`",
    )


def _obstacle(item: PairVersion | None, is_reachable: Reachable) -> str | None:
    if item is None:
        return "was deleted"
    if item.quarantine is not None:
        return f"is in quarantine ({item.quarantine})"
    if not is_reachable(item):
        return f"has a target ({short(item.pair.target_digest)}) that cannot be reached"
    return None


def _move_champion(
    catalog: Catalog, kind: str, pair: RegisteredPair, reasons: Sequence[str]
) -> None:
    champion = catalog.aliases().get(CHAMPION)
    log = catalog.log()
    texts = [redact(reason) for reason in reasons]
    run_id = log.begin(kind, pair, champion=champion, reasons=texts)
    move_alias(catalog, CHAMPION, pair.version)
    log.finish(run_id)
    _LOG.info("event=%s name=%s version=%s from=%s", kind, pair.name, pair.version, champion)
