"""Commands that look: status, pairs, history, diff."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.artifacts import read_json, short
from draftsmith.commands.common import (
    HERE,
    AsJson,
    Root,
    described,
    open_store,
    reported,
    write_json,
)
from draftsmith.registry.overrides import as_of
from draftsmith.registry.pair import DECISION_TAG, METRIC_TAGS, PairVersion
from draftsmith.report.terminal import decision_line, pair_line, target_line

_HEADLINE_TAGS = (*METRIC_TAGS, "temperature", "draft_length", "device", "drift")


@reported
def status(root: Root = HERE, as_json: AsJson = False) -> None:
    """Show target, champion, challenger, last decision and headline evidence."""
    store = open_store(root)
    versions = store.versions()
    target = _optional_json(root / "build" / "target.json")
    decided = _optional_json(root / "reports" / "decision.json")
    decision = None if decided is None else as_of(decided, datetime.now(UTC).date())
    champion = _held(versions, "champion")
    digest = None if target is None else target.get("digest")
    data = {
        "name": store.name,
        "target": target,
        "champion": described(champion),
        "challenger": described(_held(versions, "challenger")),
        "champion_is_for_target": champion is not None and champion.pair.target_digest == digest,
        "decision": decision,
    }
    if as_json:
        write_json(data)
    else:
        _show_status(data)


@reported
def pairs(root: Root = HERE, as_json: AsJson = False) -> None:
    """List every registered pair with its aliases and figures."""
    versions = open_store(root).versions()
    if as_json:
        write_json([described(item) for item in versions])
        return
    table = Table(box=None)
    for column in ("version", "aliases", "recipe", "target", *METRIC_TAGS, "device", "state"):
        table.add_column(column)
    for item in versions:
        figures = [item.tags.get(tag, "-") for tag in (*METRIC_TAGS, "device")]
        table.add_row(
            item.pair.version,
            " ".join(f"@{alias}" for alias in item.aliases),
            item.pair.recipe,
            short(item.pair.target_digest),
            *figures,
            item.state,
        )
    Console().print(table if versions else "No pair is registered yet: run `dvc repro`.")


@reported
def history(root: Root = HERE, as_json: AsJson = False) -> None:
    """List every move of @champion and every release from quarantine: when, which and why."""
    moves = open_store(root).history()
    if as_json:
        write_json([dataclasses.asdict(move) for move in moves])
        return
    table = Table(box=None)
    for column in ("move", "time", "kind", "from", "to", "reason"):
        table.add_column(column)
    for move in moves:
        cells = (move.time_utc, move.kind, move.predecessor or "-", move.version, move.reason)
        table.add_row(str(move.sequence), *cells)
    Console().print(table if moves else "@champion has never moved: run `dvc repro`.")


@reported
def diff(
    first: Annotated[str, typer.Argument(help="Version or @alias.")],
    second: Annotated[str, typer.Argument(help="Version or @alias.")],
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Show in what two registered pairs differ."""
    store = open_store(root)
    sides = [store.resolve(reference).tags for reference in (first, second)]
    names = sorted({name for tags in sides for name in tags} - {DECISION_TAG})
    changed = {
        name: [tags.get(name) for tags in sides]
        for name in names
        if sides[0].get(name) != sides[1].get(name)
    }
    if as_json:
        write_json(changed)
        return
    table = Table("", first, second, box=None)
    for name, values in changed.items():
        table.add_row(name, *(value or "-" for value in values))
    Console().print(table if changed else "They do not differ.")


def _optional_json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


def _held(versions: list[PairVersion], alias: str) -> PairVersion | None:
    return next((item for item in versions if alias in item.aliases), None)


def _show_status(data: Mapping[str, Any]) -> None:
    table = Table(box=None, show_header=False)
    table.add_row("registry", str(data["name"]))
    table.add_row("target", target_line(data["target"]))
    for alias in ("champion", "challenger"):
        table.add_row(alias, pair_line(data[alias]))
        if data[alias] and data[alias]["state"] != "ok":
            table.add_row("", f"its state: {data[alias]['state']}")
    if data["champion"] and data["target"] and not data["champion_is_for_target"]:
        table.add_row("", "the champion belongs to another target: run `dvc repro`")
    for tag in _HEADLINE_TAGS:
        if data["champion"] and tag in data["champion"]["tags"]:
            name = "drift when registered" if tag == "drift" else tag
            table.add_row(f"  {name}", data["champion"]["tags"][tag])
    table.add_row("decision", decision_line(data["decision"]))
    Console().print(table)
