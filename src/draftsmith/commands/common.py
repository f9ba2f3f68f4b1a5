"""What every command shares: its options, one error message, one JSON value, the store.

Under `--json` standard output is one JSON value; messages go to standard error.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from draftsmith.config import load_section
from draftsmith.console import EXIT_USER_ERROR
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.registry.settings import RegistryConfig

if TYPE_CHECKING:
    from draftsmith.registry.mlflow_store import PairStore
    from draftsmith.registry.pair import PairVersion

P = ParamSpec("P")

EXIT_BLOCKED = 3
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
HERE = Path()

Root = Annotated[Path, typer.Option("--root", help="The project's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON value on standard output.")]
TargetFolder = Annotated[
    str | None, typer.Option(help="Folder of the target, if not where the registry says.")
]


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Turn a user's error into one message on standard error and exit code 2."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except DraftsmithError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(EXIT_USER_ERROR) from None

    return run


def seconds_of(budget: str) -> float:
    """The value of `--budget`.

    Raises:
        ConfigError: It is no time.
    """
    number, unit = budget[:-1], budget[-1:]
    try:
        seconds = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(
            "reading --budget",
            found=repr(budget),
            expected="a number with s, m or h, such as 90s or 3m",
            remedy="pass such a time",
        )
    return seconds


def require_reason(what: str, reason: str) -> None:
    """Refuse a --reason that says nothing.

    Raises:
        ConfigError: It is empty.
    """
    if not reason.strip():
        raise ConfigError(
            what,
            found="an empty --reason",
            expected="why",
            remedy="say it: it stays on record",
        )


def write_json(data: object) -> None:
    """Write the command's result to standard output."""
    typer.echo(json.dumps(data, indent=2, sort_keys=True, allow_nan=False))


def open_store(root: Path) -> PairStore:
    """The registry that the project's configuration names."""
    from draftsmith.registry.mlflow_store import PairStore  # noqa: PLC0415  MLflow is slow

    config = load_section(root / "build" / "config.yaml", "registry", RegistryConfig)
    return PairStore(root, config)


def described(item: PairVersion | None) -> dict[str, Any] | None:
    """A version as `--json` shows it."""
    if item is None:
        return None
    return {
        **dataclasses.asdict(item.pair),
        "aliases": list(item.aliases),
        "created_utc": item.created_utc,
        "quarantine": item.quarantine,
        "damage": item.damage,
        "state": item.state,
        "tags": dict(item.tags),
    }
