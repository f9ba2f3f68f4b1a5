"""The command that says when to speculate: advise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftsmith import artifacts, provenance
from draftsmith.commands.common import (
    HERE,
    AsJson,
    Root,
    open_store,
    reported,
    seconds_of,
    write_json,
)
from draftsmith.report.terminal import advice_tables, alternatives_table, prediction_line

if TYPE_CHECKING:
    from draftsmith.evaluation.advice import Plan
    from draftsmith.registry.generation import Pair

ADVICE = Path("reports/advice.json")
_PARTIAL = Path("build/partial/advise")
_CORPUS = Path("data/corpus")
_NEW_TOKENS = (16, 64, 256)
_SHORTEST_CONTEXT = 64
_SCHEMA = 2


@reported
def advise(  # noqa: PLR0913  a command's options
    pair: Annotated[
        str | None, typer.Argument(help="models:/<name>@<alias>; default: the champion.")
    ] = None,
    *,
    budget: Annotated[str, typer.Option(help="Time to spend, such as 90s or 10m.")] = "10m",
    max_batch: Annotated[int, typer.Option(min=1, help="Most requests in flight.")] = 16,
    max_context: Annotated[int, typer.Option(min=16, help="Longest prompt, in tokens.")] = 1024,
    device: str = "cpu",
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Say for which workloads speculation pays on this machine, and with which lengths."""
    seconds = seconds_of(budget)
    from draftsmith.evaluation.advice import Plan  # noqa: PLC0415  torch is slow to import
    from draftsmith.registry.generation import LONGEST  # noqa: PLC0415
    from draftsmith.registry.loading import load_pair  # noqa: PLC0415

    uri = pair or f"models:/{open_store(root).name}@champion"
    plan = Plan(
        batch_sizes=_quadrupled(1, max_batch),
        contexts=_quadrupled(min(_SHORTEST_CONTEXT, max_context), max_context),
        new_tokens=_NEW_TOKENS,
        longest=LONGEST,
        seconds=seconds,
    )
    report = _report(load_pair(uri, root=root, device=device), plan, root)
    artifacts.write_json(root / ADVICE, report)
    if as_json:
        write_json(report)
        return
    for table in (*advice_tables(report), alternatives_table(report)):
        Console().print(table)
    typer.echo(f"{prediction_line(report)} All figures: {ADVICE}")


def _quadrupled(first: int, last: int) -> tuple[int, ...]:
    """1, 4, 16, ... up to `last`, which ends it."""
    points = [first]
    while points[-1] * 4 < last:
        points.append(points[-1] * 4)
    return tuple(sorted({*points, last}))


def _report(pair: Pair, plan: Plan, root: Path) -> dict[str, Any]:
    from draftsmith.console import count_phase  # noqa: PLC0415  torch is slow to import
    from draftsmith.corpus.dataset import read_split  # noqa: PLC0415
    from draftsmith.evaluation.advice import advice_report  # noqa: PLC0415
    from draftsmith.evaluation.profiling import Grid, cost_key  # noqa: PLC0415

    grid = Grid(plan.batch_sizes, plan.contexts, max(plan.longest) + 1)
    key = cost_key(pair.record.digest, pair.target.model, grid) | {"schema": _SCHEMA}
    found = advice_report(
        pair.contestants(),
        pair.survivals(),
        [row for row in read_split(root / _CORPUS, "eval") if row.temperature == 0],
        plan=plan,
        folder=root / _PARTIAL / artifacts.short(artifacts.digest_json(key)),
        on_phase=count_phase,
    )
    return {
        "schema": _SCHEMA,
        "pair_digest": pair.record.digest,
        "device": provenance.device(),
        "provenance": provenance.collect(),
        **found,
    }
