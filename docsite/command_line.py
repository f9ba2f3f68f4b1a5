"""Reference of the command line, read off the parser that runs it."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from typer.core import TyperCommand, TyperGroup

from docsite.tables import code, plain, table
from draftsmith.cli import app


def commands() -> Iterator[tuple[str, TyperCommand]]:
    """Every command by its full name, such as `evidence import`."""
    return _leaves(typer.main.get_command(app), "")


def _leaves(group: TyperGroup, prefix: str) -> Iterator[tuple[str, TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from _leaves(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def command_line() -> str:
    """Markdown: a section for every command."""
    return "\n\n".join(_section(name, command) for name, command in commands())


def _section(name: str, command: TyperCommand) -> str:
    context = typer.Context(command, info_name=f"draftsmith {name}")
    usage = " ".join(command.get_usage(context).removeprefix("Usage:").split())
    records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [(code(record[0]), plain(record[1])) for record in records if record is not None]
    told = "\n\n".join(plain(paragraph) for paragraph in (command.help or "").split("\n\n"))
    options = table(("parameter", "meaning"), rows)
    return f"## {name}\n\n{told}\n\n```text\n{usage}\n```\n\n{options}"
