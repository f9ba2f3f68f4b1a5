"""Moving aliases: promotion, quarantine, rollback; and the mark of live drift.

Every move holds the registry's lock, is recorded before it is made, and is read back. A rollback
quarantines first: otherwise the next run would promote the bad version again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftsmith.artifacts import short
from draftsmith.errors import PromotionRefusedError, RegistryError
from draftsmith.registry.mlflow_catalog import CHAMPION
from draftsmith.registry.mlflow_connection import redact
from draftsmith.registry.mlflow_pages import describe
from draftsmith.registry.mlflow_records import PROMOTION, ROLLBACK, as_recorded
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
ANY = "any"  # as the champion that a pair was judged against: nobody in particular
_DRIFT = "drift"  # the gate's check that a live-drift tag fails
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollback:
    """What a rollback came to.

    Attributes:
        champion: Who holds the alias now.
        quarantined: The version that it replaced.
        is_completion: An earlier rollback had moved the alias and died; it was completed, and
            nothing else was done.
    """

    champion: RegisteredPair
    quarantined: str | None
    is_completion: bool


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


def promote(
    catalog: Catalog,
    version: str,
    reasons: Sequence[str],
    *,
    against: str | None = ANY,
    overridden: Collection[str] = (),
) -> str | None:
    """Move @champion to a version; does nothing when it is there already.

    What may have changed since the pair was judged is asked again here, with the lock held.

    Returns:
        The version that it replaced; None for the first champion.

    Raises:
        PromotionRefusedError: The version is barred, or another became champion since it was judged
            against `against`.
        RegistryError: Another process moved the alias.
    """
    with catalog.connection.locked():
        champion = catalog.aliases().get(CHAMPION)
        if champion == version:
            describe(catalog)
            catalog.log().settle(champion)
            return catalog.recorded_predecessor(version)
        chosen = catalog.resolve(version)
        _require_unbarred(chosen, overridden)
        if against not in (ANY, champion):
            raise PromotionRefusedError(
                f"promoting version {version} of {catalog.name}",
                found=f"version {champion} as champion, and a judgement against "
                + ("none" if against is None else f"version {against}"),
                expected="a judgement against the present champion",
                remedy="run `dvc repro`, which judges again; to go back to a pair that was "
                f"champion before, `draftsmith rollback --to {version}`",
            )
        _move_champion(catalog, PROMOTION, chosen.pair, reasons)
        return champion


def _require_unbarred(item: PairVersion, overridden: Collection[str]) -> None:
    remedy = (
        "distil another draft: change the recipe, the corpus or the seed. `draftsmith release` "
        "takes a version out of quarantine, `draftsmith verify` a mark of damage off"
    )
    if item.damage is not None or item.quarantine is not None:
        found = item.state
    elif item.pair.live_drift and _DRIFT not in overridden:
        found = "a live-drift tag of its draft"
        remedy = "run `dvc repro`, which distils a new draft for the tagged one's target"
    else:
        return
    raise PromotionRefusedError(
        f"promoting version {item.pair.version} of {item.pair.name}",
        found=found,
        expected="a version that nothing bars",
        remedy=remedy,
    )


def quarantine(catalog: Catalog, version: str, reason: str) -> None:
    """Bar a version from being reused or promoted; the first reason stays."""
    with catalog.connection.locked():
        found = catalog.client.get_model_version(catalog.name, version)
        if QUARANTINE_TAG not in found.tags:
            text = redact(reason) or "no reason given"
            catalog.client.set_model_version_tag(catalog.name, version, QUARANTINE_TAG, text)


def mark_drifted(catalog: Catalog, version: str, reason: str) -> None:
    """Record that live traffic drifted away from a version; the first reason stays.

    Takes no lock: an alarm must wait for nobody.
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
    # An earlier record goes first, or nothing does: who may not delete learns it before a record
    # says that the alarm is cleared, while it is not.
    catalog.client.delete_model_version_tag(catalog.name, version, CLEARED_TAG)
    catalog.client.set_model_version_tag(catalog.name, version, CLEARED_TAG, text)
    catalog.client.delete_model_version_tag(catalog.name, version, LIVE_DRIFT_TAG)


def rollback(
    catalog: Catalog,
    to: str | None,
    *,
    reason: str,
    is_reachable: Reachable,
    leaving: str | None = None,
) -> Rollback:
    """Quarantine the champion, then move @champion back.

    The rollback of a process that died after it had moved the alias is completed, not repeated:
    the champion that it chose would be put in quarantine otherwise. Nobody can tell a rerun from a
    new rollback for the same reason, so the caller has to be told that nothing moved. `leaving`,
    the version that is to go, tells them apart, and keeps a second person who rolls back from going
    on to the next champion.

    Raises:
        RegistryError: There is no champion, or another than `leaving`, or no version to go back to;
            nothing was changed.
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
        wanted, left = (
            None if reference is None else catalog.resolve(reference).pair.version
            for reference in (to, leaving)
        )
        cut, told = catalog.log().interrupted(champion), as_recorded([redact(reason)])
        is_ours = cut is not None and (cut.kind, cut.reason) == (ROLLBACK, told)
        is_rerun = cut is not None and is_ours and left in (None, cut.predecessor)
        if cut is not None and is_rerun and wanted in (None, champion):
            describe(catalog)
            catalog.log().settle(champion)
            return Rollback(catalog.resolve(champion).pair, cut.predecessor, is_completion=True)
        if left is not None and left != champion:
            raise _left_already(catalog, champion, left)
        choice = _choose(catalog, champion, wanted, is_reachable)
        quarantine(catalog, champion, reason)
        _move_champion(catalog, ROLLBACK, choice, [reason])
        return Rollback(choice, champion, is_completion=False)


def _left_already(catalog: Catalog, champion: str, left: str) -> RegistryError:
    return RegistryError(
        f"rolling back version {left} of {catalog.name}",
        found=f"version {champion} as champion",
        expected=f"version {left}, as somebody may have rolled it back already",
        remedy="look at `draftsmith history`; name the present champion if that has to go, too",
    )


def _earlier(catalog: Catalog, champion: str) -> list[str]:
    """Versions that were champion: those promoted before this one, newest first, then the others.

    Example: after the promotions 1, 2, 3 and champion 3: [2, 1]; after a rollback to 2: [1, 3].
    """
    moved = [move.version for move in catalog.moves() if move.kind == PROMOTION]
    last = max((i for i, version in enumerate(moved) if version == champion), default=len(moved))
    ordered = dict.fromkeys([*reversed(moved[:last]), *reversed(moved)])
    return [version for version in ordered if version != champion]


def _choose(
    catalog: Catalog, champion: str, wanted: str | None, is_reachable: Reachable
) -> RegisteredPair:
    versions = {item.pair.version: item for item in catalog.versions()}
    candidates = _earlier(catalog, champion)
    if wanted is not None:
        candidates = [version for version in candidates if version == wanted]
    # What its traffic complained about is the last resort.
    drifted = {v for v in candidates if v in versions and versions[v].pair.live_drift}
    refused: list[str] = []
    for version in sorted(candidates, key=lambda version: version in drifted):
        item = versions.get(version)
        obstacle = _obstacle(item, is_reachable)
        if item is not None and obstacle is None:
            return item.pair
        refused.append(f"version {version} {obstacle}")
    nobody = "no other version that was champion before"
    if wanted is not None:
        is_same = wanted == champion
        nobody = f"version {wanted}, which {'is champion' if is_same else 'never was champion'}"
    raise RegistryError(
        f"rolling back version {champion} of {catalog.name}",
        found="; ".join(refused) or nobody,
        expected="an earlier promoted version, intact and not in quarantine, whose target is at "
        "hand",
        remedy="bring back the target's checkpoint, or promote another pair by `dvc repro`",
    )


def _obstacle(item: PairVersion | None, is_reachable: Reachable) -> str | None:
    if item is None:
        return "was deleted"
    if item.damage is not None:
        return f"is damaged ({item.damage})"
    if item.quarantine is not None:
        return f"is in quarantine ({item.quarantine})"
    if not is_reachable(item):
        return f"or its target ({short(item.pair.target_digest)}) cannot be loaded"
    return None


def _move_champion(
    catalog: Catalog, kind: str, pair: RegisteredPair, reasons: Sequence[str]
) -> None:
    champion = catalog.aliases().get(CHAMPION)
    log = catalog.log()
    texts = [redact(reason) for reason in reasons]
    run_id = log.begin(kind, pair, champion=champion, reasons=texts)
    move_alias(catalog, CHAMPION, pair.version)
    describe(catalog)  # before the record ends, so that a rerun completes it
    log.finish(run_id)
    _LOG.info("event=%s name=%s version=%s from=%s", kind, pair.name, pair.version, champion)
