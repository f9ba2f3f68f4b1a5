"""The command line: what the registry holds, one answer of a pair, and moves of the champion.

`measure` needs no registry. Under `--json` standard output is one JSON value; messages go to
standard error.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.artifacts import read_json, short
from draftsmith.config import load_section
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.registry.pair import DECISION_TAG, METRIC_TAGS, PairVersion
from draftsmith.registry.settings import RegistryConfig
from draftsmith.report.terminal import decision_line, measured_table, pair_line, target_line

if TYPE_CHECKING:
    from draftsmith.registry.mlflow_store import PairStore

P = ParamSpec("P")

EXIT_USER_ERROR, EXIT_BLOCKED = 2, 3
_HEADLINE_TAGS = (*METRIC_TAGS, "temperature", "draft_length", "device", "drift")
_FIGURES = ("block_efficiency", "tokens_per_s")

app = typer.Typer(
    help="Keep speculative-decoding pairs alive while their target changes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Root = Annotated[Path, typer.Option("--root", help="The project's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON value on standard output.")]
TargetFolder = Annotated[
    str | None, typer.Option(help="Folder of the target, if not where the registry says.")
]
_HERE = Path()


def _reported(command: Callable[P, None]) -> Callable[P, None]:
    """Turn a user's error into one message on standard error and exit code 2."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except DraftsmithError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(EXIT_USER_ERROR) from None

    return run


@app.callback()
def _entry() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")


@app.command()
@_reported
def status(root: Root = _HERE, as_json: AsJson = False) -> None:
    """Show target, champion, challenger, last decision and headline evidence."""
    store = _store(root)
    versions = store.versions()
    target = _optional_json(root / "build" / "target.json")
    decision = _optional_json(root / "reports" / "decision.json")
    champion = _held(versions, "champion")
    digest = None if target is None else target.get("digest")
    data = {
        "name": store.name,
        "target": target,
        "champion": _described(champion),
        "challenger": _described(_held(versions, "challenger")),
        "champion_is_for_target": champion is not None and champion.pair.target_digest == digest,
        "decision": decision,
    }
    if as_json:
        _write_json(data)
    else:
        _show_status(data)


@app.command()
@_reported
def pairs(root: Root = _HERE, as_json: AsJson = False) -> None:
    """List every registered pair with its aliases and figures."""
    versions = _store(root).versions()
    if as_json:
        _write_json([_described(item) for item in versions])
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
            _state(item),
        )
    Console().print(table if versions else "No pair is registered yet: run `dvc repro`.")


@app.command()
@_reported
def generate(  # noqa: PLR0913  one option a sampling parameter
    uri: Annotated[
        str, typer.Argument(help="models:/NAME@ALIAS, models:/NAME/VERSION or a folder.")
    ],
    prompt: Annotated[str, typer.Argument(help="One user turn, or a text without chat template.")],
    *,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: int = 0,
    draft_length: Annotated[
        int | None, typer.Option(min=0, help="Tokens drafted a round; default: the best measured.")
    ] = None,
    target: TargetFolder = None,
    device: str = "cpu",
    root: Root = _HERE,
    as_json: AsJson = False,
) -> None:
    """Load a pair and answer one prompt; prints the text, tau and tokens/s."""
    from draftsmith.registry.loading import load_pair  # noqa: PLC0415  torch is slow to import

    pair = load_pair(uri, root=root, target=target, device=device)
    result = pair.generate(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        draft_length=draft_length,
    )
    if as_json:
        _write_json({**dataclasses.asdict(result), "pair_digest": pair.record.digest})
        return
    typer.echo(result.text)
    tau, speed = (f"{getattr(result, name):.2f}" for name in _FIGURES)
    typer.echo(
        f"\ntau {tau}  {speed} tokens/s  {len(result.token_ids)} tokens in {result.num_rounds} "
        f"rounds, {result.num_accepted} of {result.num_drafted} drafted tokens accepted",
    )


@app.command()
@_reported
def measure(
    target: Annotated[Path, typer.Option(help="Folder of the target's checkpoint.")],
    draft: Annotated[Path, typer.Option(help="Folder of a draft, or of any checkpoint.")],
    *,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL; default: prompts that come with draftsmith.")
    ] = None,
    budget: Annotated[str, typer.Option(help="Time to spend, such as 90s or 3m.")] = "3m",
    device: str = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure any pair: acceptance, speed on this machine and a verdict; no registry needed."""
    from draftsmith.console import count_phase  # noqa: PLC0415  torch is slow to import
    from draftsmith.evaluation import any_pair  # noqa: PLC0415
    from draftsmith.targets.loading import load_target  # noqa: PLC0415

    seconds = _seconds(budget)
    asked = any_pair.prompts_of(prompts)
    loaded = load_target(target, dtype="auto", device=device)
    joined = any_pair.load_any_draft(loaded, draft)
    config = any_pair.budgeted(loaded, joined, asked[0], seconds=seconds)
    result = any_pair.measure(loaded, joined, asked, config, count_phase)
    if as_json:
        _write_json(result)
        return
    Console().print(measured_table(result))
    typer.echo(f"\n{result['verdict']}: {' '.join(result['reasons'])}")


@app.command()
@_reported
def history(root: Root = _HERE, as_json: AsJson = False) -> None:
    """List every move of @champion: when, from which version to which, and why."""
    moves = _store(root).history()
    if as_json:
        _write_json([dataclasses.asdict(move) for move in moves])
        return
    table = Table(box=None)
    for column in ("move", "time", "kind", "from", "to", "reason"):
        table.add_column(column)
    for move in moves:
        cells = (move.time_utc, move.kind, move.predecessor or "-", move.version, move.reason)
        table.add_row(str(move.sequence), *cells)
    Console().print(table if moves else "@champion has never moved: run `dvc repro`.")


@app.command()
@_reported
def diff(
    first: Annotated[str, typer.Argument(help="Version or @alias.")],
    second: Annotated[str, typer.Argument(help="Version or @alias.")],
    root: Root = _HERE,
    as_json: AsJson = False,
) -> None:
    """Show in what two registered pairs differ."""
    store = _store(root)
    sides = [store.resolve(reference).tags for reference in (first, second)]
    names = sorted({name for tags in sides for name in tags} - {DECISION_TAG})
    changed = {
        name: [tags.get(name) for tags in sides]
        for name in names
        if sides[0].get(name) != sides[1].get(name)
    }
    if as_json:
        _write_json(changed)
        return
    table = Table("", first, second, box=None)
    for name, values in changed.items():
        table.add_row(name, *(value or "-" for value in values))
    Console().print(table if changed else "They do not differ.")


@app.command()
@_reported
def verify(
    reference: Annotated[str, typer.Argument(help="Version or @alias.")] = "@champion",
    target: TargetFolder = None,
    device: str = "cpu",
    root: Root = _HERE,
    as_json: AsJson = False,
) -> None:
    """Hash a version's files again, load it and test that it is lossless; exits 3 if not."""
    from draftsmith.registry import verification  # noqa: PLC0415  torch is slow to import

    found = verification.verify(_store(root), reference, root=root, target=target, device=device)
    if as_json:
        _write_json(found)
    else:
        typer.echo(
            f"Version {found['version']}: files as registered; {found['num_identical']} of "
            f"{found['num_prompts']} answers the same with and without drafts, in float32."
        )
    if not found["holds"]:
        raise typer.Exit(EXIT_BLOCKED)


@app.command()
@_reported
def promote(
    reference: Annotated[str, typer.Argument(help="Version or @alias.")] = "@challenger",
    root: Root = _HERE,
    as_json: AsJson = False,
) -> None:
    """Move @champion to a version whose recorded decision is to promote; exits 3 if it is not."""
    store = _store(root)
    found = store.resolve(reference)
    decision = json.loads(found.tags.get(DECISION_TAG, "{}"))
    reasons = decision.get("reasons") or ["no decision is recorded: run `dvc repro`"]
    promoted = decision.get("verdict") == "promote"
    before = store.promote(found.pair.version, reasons) if promoted else None
    version = found.pair.version
    if as_json:
        _write_json(
            {"promoted": promoted, "version": version, "predecessor": before, "reasons": reasons}
        )
    elif promoted:
        typer.echo(f"@champion is version {version}; it replaced {before or 'nothing'}.")
    else:
        typer.echo(f"Version {version} is not promoted: {'; '.join(reasons)}", err=True)
    if not promoted:
        raise typer.Exit(EXIT_BLOCKED)


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    try:
        seconds = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(
            "reading --budget",
            found=repr(text),
            expected="a number with s, m or h, such as 90s or 3m",
            remedy="pass such a time",
        )
    return seconds


@app.command()
@_reported
def rollback(
    to: Annotated[str | None, typer.Option(help="Version; default: the newest usable one.")] = None,
    reason: Annotated[
        str, typer.Option(help="Recorded with the quarantine.")
    ] = "rolled back on the command line",
    root: Root = _HERE,
    as_json: AsJson = False,
) -> None:
    """Put the champion in quarantine and move @champion back to an earlier pair."""
    from draftsmith.registry.loading import target_reachable  # noqa: PLC0415  torch is slow

    store = _store(root)
    before = store.champion()
    after = store.rollback(
        to, reason=reason, is_reachable=functools.partial(target_reachable, root=root)
    )
    quarantined = None if before is None else before.version
    if as_json:
        _write_json({"champion": dataclasses.asdict(after), "quarantined": quarantined})
        return
    typer.echo(f"Version {quarantined} is in quarantine; @champion is version {after.version}.")


def _write_json(data: object) -> None:
    typer.echo(json.dumps(data, indent=2, sort_keys=True, allow_nan=False))


def _store(root: Path) -> PairStore:
    from draftsmith.registry.mlflow_store import PairStore  # noqa: PLC0415  MLflow is slow

    config = load_section(root / "build" / "config.yaml", "registry", RegistryConfig)
    return PairStore(root, config)


def _optional_json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


def _held(versions: list[PairVersion], alias: str) -> PairVersion | None:
    return next((item for item in versions if alias in item.aliases), None)


def _described(item: PairVersion | None) -> dict[str, Any] | None:
    if item is None:
        return None
    return {
        **dataclasses.asdict(item.pair),
        "aliases": list(item.aliases),
        "created_utc": item.created_utc,
        "quarantine": item.quarantine,
        "tags": dict(item.tags),
    }


def _state(item: PairVersion) -> str:
    if item.quarantine is not None:
        return f"quarantine: {item.quarantine}"
    return "live drift" if item.pair.live_drift else "ok"


def _show_status(data: Mapping[str, Any]) -> None:
    table = Table(box=None, show_header=False)
    table.add_row("registry", str(data["name"]))
    table.add_row("target", target_line(data["target"]))
    for alias in ("champion", "challenger"):
        table.add_row(alias, pair_line(data[alias]))
    if data["champion"] and data["target"] and not data["champion_is_for_target"]:
        table.add_row("", "the champion belongs to another target: run `dvc repro`")
    for tag in _HEADLINE_TAGS:
        if data["champion"] and tag in data["champion"]["tags"]:
            table.add_row(f"  {tag}", data["champion"]["tags"][tag])
    table.add_row("decision", decision_line(data["decision"]))
    Console().print(table)


if __name__ == "__main__":
    app()
