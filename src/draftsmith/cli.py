"""The command line: what the registry holds, answers of a pair, moves of @champion, imports."""

from __future__ import annotations

import logging

import typer

from draftsmith.commands import (
    advise,
    decode,
    evidence,
    imports,
    inspect,
    monitor,
    moves,
    plan,
    serve,
    what_if,
)

app = typer.Typer(
    help="Keep speculative-decoding pairs alive while their target changes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def _entry() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # the error tells the last retry


for command in (
    inspect.status,
    inspect.pairs,
    inspect.history,
    inspect.diff,
    plan.plan,
    decode.generate,
    decode.measure,
    advise.advise,
    what_if.what_if,
    serve.serve,
    serve.export,
    moves.verify,
    moves.promote,
    moves.rollback,
    moves.release,
    moves.prune,
    imports.import_draft,
    monitor.monitor,
    monitor.clear_drift,
):
    app.command()(command)
app.add_typer(evidence.app, name="evidence")


if __name__ == "__main__":
    app()
