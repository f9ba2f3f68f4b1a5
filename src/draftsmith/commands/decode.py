"""Commands that decode: generate, and measure, which needs no registry."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftsmith.commands.common import HERE, AsJson, Root, TargetFolder, reported, write_json
from draftsmith.drift.telemetry import append_telemetry, describe_request
from draftsmith.errors import ConfigError
from draftsmith.report.terminal import measured_table

_FIGURES = ("block_efficiency", "tokens_per_s")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@reported
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
    telemetry: Annotated[
        Path | None, typer.Option(help="File that gets one line about the request.")
    ] = None,
    domain: Annotated[
        str | None, typer.Option(help="Kind of the request, for --telemetry.")
    ] = None,
    device: str = "cpu",
    root: Root = HERE,
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
        write_json({**dataclasses.asdict(result), "pair_digest": pair.record.digest})
    else:
        typer.echo(result.text)
        tau, speed = (f"{getattr(result, name):.2f}" for name in _FIGURES)
        typer.echo(
            f"\ntau {tau}  {speed} tokens/s  {len(result.token_ids)} tokens in "
            f"{result.num_rounds} rounds, {result.num_accepted} of {result.num_drafted} drafted "
            "tokens accepted",
        )
    if telemetry is not None:
        line = describe_request(
            result.trace,
            result.params,
            time_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
            pair_digest=pair.record.digest,
            domain=domain or None,
            prompt_tokens=result.num_prompt_tokens,
            latency_s=round(result.latency_s, 6),
        )
        append_telemetry(telemetry, line)


@reported
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
        write_json(result)
        return
    Console().print(measured_table(result))
    typer.echo(f"\n{result['verdict']}: {' '.join(result['reasons'])}")


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
