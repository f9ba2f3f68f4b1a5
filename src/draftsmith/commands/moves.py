"""Commands that act on versions: promote, rollback, release, verify, prune."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from draftsmith.commands.common import (
    EXIT_BLOCKED,
    HERE,
    AsJson,
    Root,
    TargetFolder,
    open_store,
    reported,
    require_reason,
    write_json,
)
from draftsmith.errors import PromotionRefusedError
from draftsmith.registry.local_copies import num_bytes, remove, superfluous_copies
from draftsmith.registry.overrides import as_of
from draftsmith.registry.pair import DECISION_TAG, PairVersion
from draftsmith.registry.records import CHAMPIONS

if TYPE_CHECKING:
    from draftsmith.registry.mlflow_moves import Rollback


@reported
def promote(
    reference: Annotated[str, typer.Argument(help="Version or @alias.")] = "@challenger",
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Move @champion to a version whose recorded decision is to promote; exits 3 if it is not."""
    store = open_store(root)
    found = store.resolve(reference)
    recorded = json.loads(found.tags.get(DECISION_TAG, "{}"))
    decision = as_of(recorded, datetime.now(UTC).date())
    reasons = decision.get("reasons") or ["no decision is recorded: run `dvc repro`"]
    promoted = decision.get("verdict") == "promote"
    version, before = found.pair.version, None
    if promoted:
        judged = {name: decision[name] for name in ("against", "overridden") if name in decision}
        try:
            before = store.promote(version, reasons, **judged)
        except PromotionRefusedError as error:
            promoted, reasons = False, [str(error)]
    if as_json:
        write_json(
            {"promoted": promoted, "version": version, "predecessor": before, "reasons": reasons}
        )
    elif promoted:
        typer.echo(f"@champion is version {version}; it replaced {before or 'nothing'}.")
    else:
        typer.echo(f"Version {version} is not promoted: {'; '.join(reasons)}", err=True)
    if not promoted:
        raise typer.Exit(EXIT_BLOCKED)


@reported
def rollback(
    to: Annotated[
        str | None, typer.Option(help="Version or @alias; default: the newest usable one.")
    ] = None,
    leaving: Annotated[
        str | None,
        typer.Option("--from", help="Version that is to go; refused where another is champion."),
    ] = None,
    reason: Annotated[
        str, typer.Option(help="Recorded with the quarantine.")
    ] = "rolled back on the command line",
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Put the champion in quarantine and move @champion back to an earlier pair.

    Exits 3 where it only completed the record of an interrupted rollback, which may be an old one,
    and neither --to nor --from says what was wanted.
    """
    from draftsmith.registry.holders import fetch_or_mark  # noqa: PLC0415  MLflow is slow
    from draftsmith.registry.loading import target_reachable  # noqa: PLC0415  torch is slow

    store = open_store(root)

    def can_be_loaded(item: PairVersion) -> bool:
        return target_reachable(item, root=root) and fetch_or_mark(
            store, item.pair, root / CHAMPIONS
        )

    done = store.rollback(to, reason=reason, is_reachable=can_be_loaded, leaving=leaving)
    if as_json:
        write_json(dataclasses.asdict(done))
    else:
        _tell(done)
    if done.is_completion and to is None and leaving is None:
        raise typer.Exit(EXIT_BLOCKED)


def _tell(done: Rollback) -> None:
    version = done.champion.version
    typer.echo(f"Version {done.quarantined} is in quarantine; @champion is version {version}.")
    if done.is_completion:
        typer.echo(
            "An interrupted rollback had done so, for this reason; its record is complete now and "
            f"nothing moved. To roll back version {version} too, run this again."
        )
    if done.champion.live_drift:
        typer.echo("Its draft carries a live-drift tag; no earlier champion without one is usable.")


@reported
def release(
    reference: Annotated[str, typer.Argument(help="Version or @alias.")],
    *,
    reason: Annotated[str, typer.Option(help="Why it may serve again; recorded.")],
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Take a version out of quarantine: the next `dvc repro` may propose and promote it again."""
    from draftsmith.registry.mlflow_release import release as released  # noqa: PLC0415  slow

    require_reason("taking a version out of quarantine", reason)
    item = released(open_store(root).catalog, reference, reason=reason)
    version = item.pair.version
    if as_json:
        write_json({"version": version, "reason": reason, "quarantine": item.quarantine})
    else:
        typer.echo(f"Version {version} is out of quarantine, where it was for: {item.quarantine}")


@reported
def verify(
    reference: Annotated[str, typer.Argument(help="Version or @alias.")] = "@champion",
    target: TargetFolder = None,
    device: str = "cpu",
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Hash a version's files again, load it and test that it is lossless; exits 3 if not."""
    from draftsmith.registry import verification  # noqa: PLC0415  torch is slow to import

    found = verification.verify(
        open_store(root), reference, root=root, target=target, device=device
    )
    if as_json:
        write_json(found)
    else:
        typer.echo(
            f"Version {found['version']}: files as registered"
            + ("" if found["model_checked"] else ", MLmodel and code not known (an older version)")
            + f"; {found['num_identical']} of "
            f"{found['num_prompts']} answers the same with and without drafts, in float32."
        )
    if not found["holds"]:
        raise typer.Exit(EXIT_BLOCKED)


@reported
def prune(
    keep: Annotated[
        int,
        typer.Option(min=2, help="How many of the last champions stay, the present one included."),
    ] = 3,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Delete versions that nothing needs and their copies here; the history of @champion stays."""
    from draftsmith.registry.mlflow_retention import prune as pruned  # noqa: PLC0415  slow

    store = open_store(root)
    pairs = {item.pair.version: item.pair for item in store.versions()}
    decided = pruned(store.catalog, keep=keep, dry_run=dry_run)
    kept = [pairs[version] for version in decided.kept if version in pairs]
    copies = superfluous_copies(root, store.name, kept)
    size = num_bytes(copies)
    if not dry_run:
        remove(copies)
    names = [path.relative_to(root).as_posix() for path in copies]
    data = {"dry_run": dry_run, "kept": dict(decided.kept), "removed": list(decided.removed)}
    if as_json:
        write_json({**data, "copies": names, "bytes": size})
        return
    for version, reason in decided.kept.items():
        typer.echo(f"kept     version {version}: {reason}")
    word = "would go" if dry_run else "deleted"
    for name in (*(f"version {version}" for version in decided.removed), *names):
        typer.echo(f"{word:8} {name}")
    typer.echo(
        f"{len(decided.removed)} versions and {len(names)} copies ({size / 1e6:.1f} MB) {word}."
        + (" `mlflow gc` frees the registry's own files." if decided.removed else "")
    )
