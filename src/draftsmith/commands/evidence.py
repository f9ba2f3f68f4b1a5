"""Commands about speed that was measured on other machines: evidence import, evidence list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.commands.common import HERE, AsJson, Root, open_store, reported, write_json
from draftsmith.registry.device_evidence import evidence_of, summary
from draftsmith.registry.evidence_files import keep, read_measurement
from draftsmith.registry.pair import DTYPE_TAG
from draftsmith.report.tables import MISSING, interval

app = typer.Typer(help="Speed of other machines, by device and day.", no_args_is_help=True)

Version = Annotated[str, typer.Option("--version", help="Version or @alias.")]


@app.command("import")
@reported
def import_evidence(
    file: Annotated[
        Path, typer.Argument(help="JSON of `python -m draftsmith.evaluation.speed --out FILE`.")
    ],
    version: Version = "@challenger",
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Attach a measurement of exactly this pair to its version, where the gate finds it too."""
    from draftsmith.registry import mlflow_evidence  # noqa: PLC0415  MLflow is slow to import

    measured = read_measurement(file)
    store = open_store(root)
    found = store.resolve(version)
    dtype = found.tags[DTYPE_TAG]
    report = evidence_of(measured, found.pair, dtype=dtype, path=str(file))
    mlflow_evidence.attach(store.catalog, found.pair.version, report)
    place = keep(report, root=root).relative_to(root).as_posix()
    entry = summary(report)
    if as_json:
        write_json({**entry, "version": found.pair.version, "file": place})
        return
    typer.echo(
        f"Version {found.pair.version} on {entry['device']}: speedup {interval(entry['speedup'])}. "
        f"It is in {place}, for Git. The gate takes it where gate.device asks for that device and "
        "this machine is another: run `dvc repro`."
    )


@app.command("list")
@reported
def list_evidence(
    version: Version = "@challenger", root: Root = HERE, as_json: AsJson = False
) -> None:
    """List every measurement of a version's speed, oldest first."""
    from draftsmith.registry import mlflow_evidence  # noqa: PLC0415  MLflow is slow to import

    store = open_store(root)
    entries = mlflow_evidence.attached(store.catalog, store.resolve(version).pair.version)
    if as_json:
        write_json(entries)
        return
    table = Table(box=None)
    for column in ("day", "device", "draft length", "speedup", "origin"):
        table.add_column(column)
    for entry in entries:
        table.add_row(*_row(entry))
    Console().print(table if entries else "No speed was measured yet: run `dvc repro`.")


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    length = entry["draft_length"]
    return (
        entry["time_utc"].partition("T")[0],
        entry["device"] or MISSING,
        MISSING if length is None else str(length),
        interval(entry["speedup"], 2),
        entry["origin"],
    )
