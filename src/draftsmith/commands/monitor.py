"""The command that watches a served pair: telemetry and metrics against what was registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.commands.common import (
    EXIT_BLOCKED,
    HERE,
    AsJson,
    Root,
    open_store,
    reported,
    write_json,
)
from draftsmith.config import load_section
from draftsmith.drift.settings import DriftConfig, MonitorConfig
from draftsmith.errors import ConfigError
from draftsmith.registry.records import CHAMPIONS, recorded

_DECAY = "draft decay"
_MAX_TAG_CHARACTERS = 2000


@reported
def monitor(  # noqa: PLR0913  one option a question
    files: Annotated[
        list[Path] | None, typer.Argument(help="Telemetry, one JSON line a request.")
    ] = None,
    *,
    metrics: Annotated[
        list[str] | None,
        typer.Option(help="Prometheus text of vLLM or SGLang: URL or file; repeat, oldest first."),
    ] = None,
    version: Annotated[
        str, typer.Option(help="Version or @alias that serves the traffic.")
    ] = "@champion",
    fail: Annotated[bool, typer.Option("--fail", help="Exit 3 on draft decay.")] = False,
    tag: Annotated[bool, typer.Option(help="Tag the version on draft decay.")] = True,
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Compare live acceptance with the registered one: has the served draft decayed?"""
    from draftsmith.drift.live import VERDICTS  # noqa: PLC0415  scipy and river are slow to import

    _require_input(files, metrics)
    store = open_store(root)
    pair = store.resolve(version).pair
    store.fetch(pair, root / CHAMPIONS)
    reports = _reports(root, dataclasses.asdict(pair), files or [], metrics or [])
    verdict = max((report["verdict"] for report in reports.values()), key=VERDICTS.index)
    tagged = verdict == _DECAY and tag
    if tagged:
        store.set_live_drift(pair.version, _evidence(reports)[:_MAX_TAG_CHARACTERS])
    result = {
        "verdict": verdict,
        "version": pair.version,
        "pair_digest": pair.pair_digest,
        "tagged": tagged,
        "telemetry": reports.get("telemetry"),
        "metrics": reports.get("metrics"),
    }
    if as_json:
        write_json(result)
    else:
        _show(result)
    if verdict == _DECAY and fail:
        raise typer.Exit(EXIT_BLOCKED)


def _require_input(files: list[Path] | None, metrics: list[str] | None) -> None:
    if not files and not metrics:
        raise ConfigError(
            "choosing what to monitor",
            found="neither telemetry files nor --metrics",
            expected="at least one of them",
            remedy="pass files that `draftsmith generate --telemetry` writes, or --metrics URL",
        )


def _reports(
    root: Path, pair: Mapping[str, Any], files: Sequence[Path], sources: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """What telemetry and metrics say, as far as they are given."""
    from draftsmith.drift.live import judge_live  # noqa: PLC0415  scipy and river are slow to import
    from draftsmith.drift.live_reference import registered_rates  # noqa: PLC0415
    from draftsmith.drift.prometheus import judge_metrics, scrape  # noqa: PLC0415
    from draftsmith.drift.telemetry import read_telemetry  # noqa: PLC0415

    path = root / "build" / "config.yaml"
    config = load_section(path, "monitor", MonitorConfig)
    margin = load_section(path, "drift", DriftConfig).margin
    evidence = recorded(pair, root=root / CHAMPIONS)
    rates = registered_rates(evidence.record if evidence else {})
    reports = {}
    if files:
        requests = [request for file in files for request in read_telemetry(file)]
        reports["telemetry"] = judge_live(
            requests, rates, pair_digest=pair["pair_digest"], config=config, margin=margin
        )
    if sources:
        snapshots = [scrape(source) for source in sources]
        reports["metrics"] = judge_metrics(snapshots, rates, config=config, margin=margin)
    return reports


def _evidence(reports: Mapping[str, Mapping[str, Any]]) -> str:
    decayed = [report for report in reports.values() if report["verdict"] == _DECAY]
    return " ".join(sentence for report in decayed for sentence in report["reasons"])


def _show(result: Mapping[str, Any]) -> None:
    console = Console()
    if result["telemetry"] and result["telemetry"]["strata"]:
        console.print(_table(result["telemetry"]["strata"]))
    typer.echo(f"{result['verdict']}: version {result['version']}")
    for name in ("telemetry", "metrics"):
        report = result[name]
        for sentence in [*report["reasons"], *report["notes"]] if report else []:
            typer.echo(f"  {name}: {sentence}")
    if result["tagged"]:
        typer.echo("The version carries a live-drift tag now: the next `dvc repro` trains anew.")


def _table(strata: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None)
    for column in ("T", "domain", "n", "live", "registered", "change", "signal"):
        table.add_column(column)
    for entry in strata:
        change = entry["change"]
        figures = ["-", "-", "not comparable"]
        if change is not None:
            span = f"{change['change']:+.3f} ({change['low']:+.2f} to {change['high']:+.2f})"
            figures = [f"{change['survival']:.3f}", f"{change['registered']:.3f}", span]
        first = [index + 1 for index in entry["signal"].values() if index is not None]
        row = [entry["temperature"], entry["domain"], str(entry["num_requests"]), *figures]
        table.add_row(*row, str(min(first)) if first else "-")
    return table
