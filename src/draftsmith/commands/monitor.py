"""Commands that watch a served pair: what was registered against telemetry and metrics."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.artifacts import write_text
from draftsmith.commands.common import (
    EXIT_BLOCKED,
    HERE,
    AsJson,
    Root,
    open_store,
    reported,
    require_reason,
    write_json,
)
from draftsmith.config import load_section
from draftsmith.console import EXIT_USER_ERROR
from draftsmith.drift.export import exposition
from draftsmith.drift.settings import DriftConfig, MonitorConfig
from draftsmith.drift.telemetry_reading import Telemetry, read_telemetry
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.registry.records import CHAMPIONS, recorded

if TYPE_CHECKING:
    from draftsmith.drift.exposition import Snapshot
    from draftsmith.registry.mlflow_store import PairStore

_DECAY = "draft decay"
# With --fail; another code than decay has, lest somebody roll a good pair back.
_EXIT_CODES = {_DECAY: EXIT_BLOCKED, "no reference": 4}
_MAX_TAG_CHARACTERS = 2000
_UNTAGGED: Mapping[str, Any] = {"tagged": False, "not_tagged": None}

Fail = Annotated[
    bool,
    typer.Option("--fail", help="Exit 3 on draft decay, 4 where most have no reference."),
]


@reported
def monitor(  # noqa: PLR0913  one option a question
    files: Annotated[
        list[Path] | None, typer.Argument(help="Telemetry, one JSON line a request.")
    ] = None,
    *,
    metrics: Annotated[
        list[str] | None,
        typer.Option(help="Prometheus text of vLLM or SGLang: files, oldest first, then a URL."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="How often to scrape the URL.")] = 1,
    every: Annotated[float, typer.Option(min=0, help="Seconds between two scrapes.")] = 60.0,
    export: Annotated[
        Path | None, typer.Option(help="Write the telemetry's counters as Prometheus text.")
    ] = None,
    version: Annotated[
        str, typer.Option(help="Version or @alias that serves the traffic.")
    ] = "@champion",
    fail: Fail = False,
    tag: Annotated[bool, typer.Option(help="Tag the version on draft decay.")] = True,
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Compare live acceptance with the registered one: has the served draft decayed?"""
    from draftsmith.drift.live import VERDICTS  # noqa: PLC0415  scipy and river are slow to import

    _require_input(files or [], metrics or [], count, export)
    store = open_store(root)
    pair = store.resolve(version).pair
    store.fetch(pair, root / CHAMPIONS)
    telemetry = _read(files or [], export)
    snapshots = _scraped(metrics or [], count, every, pair.pair_digest)
    reports = _reports(root, dataclasses.asdict(pair), telemetry, snapshots)
    verdict = max((report["verdict"] for report in reports.values()), key=VERDICTS.index)
    result: dict[str, Any] = {
        "verdict": verdict,
        "version": pair.version,
        "pair_digest": pair.pair_digest,
        "telemetry": reports.get("telemetry"),
        "metrics": reports.get("metrics"),
    }
    if not as_json:  # before anything is written: the registry may refuse, or be slow to
        _show(result)
    result |= _tagged(store, pair.version, reports) if tag and verdict == _DECAY else _UNTAGGED
    if as_json:
        write_json(result)
    elif result["tagged"]:
        typer.echo("The version carries a live-drift tag now: the next `dvc repro` trains anew.")
    _end(result, fail=fail)


@reported
def clear_drift(
    reference: Annotated[str, typer.Argument(help="Version or @alias.")] = "@champion",
    *,
    reason: Annotated[str, typer.Option(help="Why the alarm is none; recorded.")],
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Take the live-drift tag off a version whose alarm was looked into and found to be none."""
    require_reason("clearing live drift", reason)
    store = open_store(root)
    version = store.resolve(reference).pair.version
    store.clear_live_drift(version, reason)
    if as_json:
        write_json({"version": version, "reason": reason})
    else:
        typer.echo(f"Version {version} carries no live-drift tag any more.")


def _require_input(
    files: Sequence[Path], metrics: Sequence[str], count: int, export: Path | None
) -> None:
    """Refuse input that would be judged as something that it is not."""
    from draftsmith.drift.exposition import is_address  # noqa: PLC0415  numpy is slow to import

    names = [*map(str, files), *metrics]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    has_address = bool(metrics) and is_address(metrics[-1])
    found, expected, remedy = "", "", "see docs/monitoring.md"
    if not names:
        found, expected = "neither telemetry files nor --metrics", "at least one of them"
        remedy = "pass files that `draftsmith generate --telemetry` writes, or --metrics URL"
    elif twice is not None:
        found, expected = f"{twice} twice", "every source once"
        remedy = "to scrape a URL again and again, pass it once with --count and --every"
    elif any(map(is_address, metrics[:-1])):
        found, expected = "a URL before another source", "files, oldest first, then one URL"
        remedy = "a URL shows what is counted now: name it last, and one server in a call"
    elif count > 1 and not has_address:
        found, expected = f"--count {count} without a URL", "--metrics URL"
    elif export is not None and not files:
        found, expected = "--export without telemetry files", "the files to count"
    if found:
        raise ConfigError("choosing what to monitor", found=found, expected=expected, remedy=remedy)


def _scraped(sources: Sequence[str], count: int, every: float, pair_digest: str) -> list[Snapshot]:
    """A snapshot of each source, and `count` of the last, `every` seconds apart."""
    from draftsmith.drift.exposition import scrape  # noqa: PLC0415  numpy is slow to import

    snapshots = [scrape(source, pair_digest=pair_digest) for source in sources]
    for _ in range(count - 1):
        time.sleep(every)
        snapshots.append(scrape(sources[-1], pair_digest=pair_digest))
    return snapshots


def _read(files: Sequence[Path], export: Path | None) -> dict[Path, Telemetry]:
    """The telemetry of each file; its counters are written to `export`."""
    read = {file: read_telemetry(file) for file in files}
    if export is not None:
        write_text(export, exposition(r for found in read.values() for r in found.requests))
    return read


def _reports(
    root: Path,
    pair: Mapping[str, Any],
    telemetry: Mapping[Path, Telemetry],
    snapshots: Sequence[Snapshot],
) -> dict[str, dict[str, Any]]:
    """What telemetry and metrics say, as far as they are given."""
    from draftsmith.drift.live import judge_live  # noqa: PLC0415  scipy and river are slow to import
    from draftsmith.drift.live_reference import registered_rates  # noqa: PLC0415
    from draftsmith.drift.prometheus import judge_metrics  # noqa: PLC0415

    path = root / "build" / "config.yaml"
    config = load_section(path, "monitor", MonitorConfig)
    margin = load_section(path, "drift", DriftConfig).margin
    evidence = recorded(pair, root=root / CHAMPIONS)
    rates = registered_rates(evidence.record if evidence else {})
    reports = {}
    if telemetry:
        requests = [request for found in telemetry.values() for request in found.requests]
        report = judge_live(
            requests, rates, pair_digest=pair["pair_digest"], config=config, margin=margin
        )
        torn = {str(file): found.torn for file, found in telemetry.items() if found.torn}
        report["torn_lines"] = torn
        report["notes"] += [
            f"{file}: {len(lines)} torn lines are left out, the first is {lines[0]}."
            for file, lines in torn.items()
        ]
        reports["telemetry"] = report
    if snapshots:
        reports["metrics"] = judge_metrics(snapshots, rates, config=config, margin=margin)
    return reports


def _tagged(
    store: PairStore, version: str, reports: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Tag the version; a registry that refuses the tag must not swallow the alarm."""
    try:
        store.set_live_drift(version, _evidence(reports)[:_MAX_TAG_CHARACTERS])
    except DraftsmithError as error:
        return {"tagged": False, "not_tagged": str(error)}
    return {"tagged": True, "not_tagged": None}


def _end(result: Mapping[str, Any], *, fail: bool) -> None:
    """Say where the version could not be tagged, and leave with the code of the verdict."""
    if result["not_tagged"] is not None:
        typer.echo(f"Error: the version is not tagged: {result['not_tagged']}", err=True)
    if fail and result["verdict"] in _EXIT_CODES:
        raise typer.Exit(_EXIT_CODES[result["verdict"]])
    if result["not_tagged"] is not None:
        raise typer.Exit(EXIT_USER_ERROR)


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
