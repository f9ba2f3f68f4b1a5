"""Commands that decode: generate, and measure, which needs no registry."""

from __future__ import annotations

import dataclasses
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from draftsmith.commands.common import (
    HERE,
    AsJson,
    Root,
    TargetFolder,
    reported,
    seconds_of,
    write_json,
)
from draftsmith.drift.telemetry import ServedRequest, append_telemetry, describe_request
from draftsmith.errors import ConfigError
from draftsmith.report.terminal import measured_table

if TYPE_CHECKING:
    from draftsmith.registry.generation import Generation

_FIGURES = ("block_efficiency", "tokens_per_s")


Pair = Annotated[str, typer.Argument(help="models:/NAME@ALIAS, models:/NAME/VERSION or a folder.")]
Prompt = Annotated[str, typer.Argument(help="One user turn, or a text without chat template.")]
AtLeastOne = Annotated[int, typer.Option(min=1)]
OffAtZero = Annotated[float, typer.Option(help="0 is off.")]
DraftLength = Annotated[
    str | None,
    typer.Option(
        metavar="N|adaptive", help="Tokens drafted a round; default: the best length found."
    ),
]
TelemetryFile = Annotated[
    Path | None, typer.Option(help="File that gets one line about the request.")
]
Domain = Annotated[str | None, typer.Option(help="Kind of the request, for --telemetry.")]


@reported
def generate(  # noqa: PLR0913  one option a sampling parameter
    uri: Pair,
    prompt: Prompt,
    *,
    max_new_tokens: AtLeastOne = 128,
    min_new_tokens: Annotated[int, typer.Option(min=0, help="No stop before; 0 is off.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: OffAtZero = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    presence_penalty: OffAtZero = 0.0,
    frequency_penalty: OffAtZero = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer before it; repeatable.")
    ] = None,
    seed: int = 0,
    draft_length: DraftLength = None,
    target: TargetFolder = None,
    telemetry: TelemetryFile = None,
    domain: Domain = None,
    device: str = "cpu",
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Load a pair and answer one prompt; prints the text, tau and tokens/s."""
    from draftsmith.registry.loading import load_pair  # noqa: PLC0415  torch is slow to import

    pair = load_pair(uri, root=root, target=target, device=device)
    result = pair.generate(
        prompt,
        draft_length=parse_draft_length(draft_length),
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop_strings=stop or (),
        seed=seed,
    )
    if telemetry is not None:
        append_telemetry(telemetry, _line(result, pair.record.digest, domain or None))
    if as_json:
        write_json({**dataclasses.asdict(result), "pair_digest": pair.record.digest})
    else:
        _show(result)


def parse_draft_length(text: str | None) -> int | Literal["adaptive"] | None:
    """A number, `adaptive`, or None for what the caller takes by default.

    Raises:
        ConfigError: It is neither.
    """
    if text is None:
        return None
    if text == "adaptive":
        return "adaptive"
    if not text.isdecimal():
        raise ConfigError(
            "reading --draft-length",
            found=repr(text),
            expected="a number of tokens, 0 or more, or adaptive",
            remedy="pass one of these",
        )
    return int(text)


def _line(result: Generation, pair_digest: str, domain: str | None) -> ServedRequest:
    return describe_request(
        result.trace,
        result.params,
        time_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
        pair_digest=pair_digest,
        domain=domain,
        prompt_tokens=result.num_prompt_tokens,
        latency_s=round(result.latency_s, 6),
    )


def _show(result: Generation) -> None:
    typer.echo(result.text)
    tau, speed = (f"{getattr(result, name):.2f}" for name in _FIGURES)
    typer.echo(
        f"\ntau {tau}  {speed} tokens/s  {len(result.token_ids)} tokens in {result.num_rounds} "
        f"rounds, {result.num_accepted} of {result.num_drafted} drafted tokens accepted",
    )


@reported
def measure(
    target: Annotated[
        str, typer.Option(help="Checkpoint: a folder, org/name[@revision] of the Hub, a .gguf.")
    ],
    draft: Annotated[str, typer.Option(help="Folder of a draft, or any checkpoint as above.")],
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
    from draftsmith.targets.source import checkpoint_folder  # noqa: PLC0415

    seconds = seconds_of(budget)
    asked = any_pair.prompts_of(prompts)
    folders = [checkpoint_folder(source, root=_checkpoint_cache()) for source in (target, draft)]
    loaded = load_target(folders[0], dtype="auto", device=device)
    joined = any_pair.load_any_draft(loaded, folders[1])
    config = any_pair.budgeted(loaded, joined, asked[0], seconds=seconds)
    result = any_pair.measure(loaded, joined, asked, config, on_phase=count_phase)
    if as_json:
        write_json(result)
        return
    Console().print(measured_table(result))
    typer.echo(f"\n{result['verdict']}: {' '.join(result['reasons'])}")


def _checkpoint_cache() -> Path:
    """Where converted checkpoints are kept: there may be no project."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "draftsmith" / "checkpoints"
