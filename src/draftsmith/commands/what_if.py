"""The command that says whether distilling anew pays: what-if."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from draftsmith.artifacts import read_json
from draftsmith.commands.common import HERE, AsJson, Root, open_store, reported, write_json
from draftsmith.errors import EvidenceError
from draftsmith.registry.pair import PairVersion
from draftsmith.registry.records import CHAMPIONS
from draftsmith.registry.what_if import (
    Aged,
    Service,
    aged_drafts,
    alpha_when_new,
    outcome,
    report,
    retention,
)
from draftsmith.report.terminal import what_if_line, what_if_table

_INCUMBENT = Path("reports/incumbent.json")
_TARGET = Path("build/target.json")


@reported
def what_if(  # noqa: PLR0913  a command's options
    tokens_per_day: Annotated[float, typer.Option(min=1, help="Tokens of all answers.")],
    training_hours: Annotated[
        float, typer.Option(min=0, help="Device-hours of a run that distils a new draft.")
    ],
    *,
    price: Annotated[float, typer.Option(min=0, help="Of a device-hour, in any currency.")] = 1.0,
    updates: Annotated[int, typer.Option(min=1, help="Of the target, that a draft outlives.")] = 1,
    alpha: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Of the old draft then; default: by the registry."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 1,
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Say after how many days a new draft has paid for itself, against keeping the old one."""
    store = open_store(root)
    champion = store.resolve("@champion")
    target = _optional(root / _TARGET)
    drafts = aged_drafts(store.versions(), _optional(root / _INCUMBENT), target.get("digest"))
    own = _alpha_of(champion)
    fresh = alpha_when_new(drafts, champion.pair.draft_digest) or own
    aged = _aged_alpha(drafts, fresh, updates) if alpha is None else alpha
    folder = store.fetch(champion.pair, root / CHAMPIONS)
    measured, evaluated = (
        _optional(folder / "evidence" / f"{name}.json") for name in ("benchmark", "evaluation")
    )
    copied = evaluated.get("copied", {}).get(str(float(measured.get("temperature", 0.0))))
    service = Service(tokens_per_day, price, training_hours, batch)
    found = report(
        drafts,
        outcome(measured, service, fresh=fresh, aged=aged, own=own, copied=copied),
        updates=updates,
    )
    if as_json:
        write_json(found)
        return
    Console().print(what_if_table(found))
    typer.echo(what_if_line(found))


def _alpha_of(champion: PairVersion) -> float:
    try:
        return float(champion.tags["alpha"])
    except KeyError:
        raise EvidenceError(
            f"reading the alpha of version {champion.pair.version}",
            found="no tag `alpha`",
            expected="a version that `dvc repro` registered",
            remedy="rerun `dvc repro`, which measures and registers the pair",
        ) from None


def _optional(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.is_file() else {}


def _aged_alpha(drafts: Sequence[Aged], fresh: float, updates: int) -> float:
    kept = retention(drafts)
    if kept is None:
        raise EvidenceError(
            "asking how drafts age",
            found="a registry in which no draft was evaluated on a later target",
            expected="one that was: the incumbent test does so when the target changes",
            remedy="change the target and run `dvc repro`, or give the old draft's --alpha",
        )
    return float(min(1.0, fresh * kept**updates))
