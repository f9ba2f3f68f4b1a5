"""Commands that put a pair to work: serve it, or hand it to another server."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.commands.common import HERE, AsJson, Root, TargetFolder, reported, write_json
from draftsmith.commands.decode import AtLeastOne, Pair, parse_draft_length
from draftsmith.errors import ConfigError

Verify = Annotated[
    str,
    typer.Option(metavar="rejection|match", help="match: a seed's answer depends on no draft."),
]
Seconds = Annotated[float, typer.Option(min=0.1)]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
MaxRows = Annotated[int, typer.Option(min=1, help="Samples decoded at once.")]
MaxQueue = Annotated[int, typer.Option(min=0, help="Samples that may wait.")]
MaxContext = Annotated[int, typer.Option(min=2, help="Tokens, prompt and answer.")]
ServedLength = Annotated[
    str | None,
    typer.Option(
        metavar="N|adaptive",
        help="Tokens drafted a round; default: adaptive where costs of this device were "
        "measured, else the best length. `adaptive` measures them at need.",
    ),
]
Drain = Annotated[int, typer.Option(min=0, help="Seconds to end what was begun.")]
Poll = Annotated[float, typer.Option(min=0, help="Seconds; 0 follows no alias.")]
Telemetry = Annotated[Path | None, typer.Option(help="File that gets one line a request.")]
ApiKeys = Annotated[
    Path | None, typer.Option(help="File, one key a line; else DRAFTSMITH_API_KEYS.")
]
# Kernels that torch keeps on a CPU, one for every shape of a product: in oneDNN, and before it.
# 1,024 in each by default, which a service that meets all shapes fills up in hours: a gigabyte.
_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}


@reported
def serve(  # noqa: PLR0913  one option a question
    uri: Pair,
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    max_rows: MaxRows = 8,
    max_queue: MaxQueue = 64,
    max_context: MaxContext = 4096,
    max_body: AtLeastOne = 1 << 20,
    draft_length: ServedLength = None,
    verify: Verify = "rejection",
    request_timeout: Seconds = 600.0,
    client_timeout: Seconds = 30.0,
    drain: Drain = 60,
    poll: Poll = 2.0,
    telemetry: Telemetry = None,
    api_keys: ApiKeys = None,
    target: TargetFolder = None,
    device: str = "cpu",
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Serve a pair over OpenAI's API until a signal; follows the alias. --json: the address."""
    for variable, most in _KERNEL_CACHES.items():
        os.environ.setdefault(variable, most)  # read once, where torch is imported
    from draftsmith.serving.served_pair import EngineOptions  # noqa: PLC0415  slow to import
    from draftsmith.serving.server import PairServer, ServeOptions  # noqa: PLC0415
    from draftsmith.serving.settings import Limits, read_keys  # noqa: PLC0415
    from draftsmith.serving.source import PairSource  # noqa: PLC0415

    _require_mode(verify)
    options = ServeOptions(
        PairSource(uri, root, target, device),
        engine=EngineOptions(parse_draft_length(draft_length), verify),  # type: ignore[arg-type]  # just checked
        limits=Limits(max_rows, max_queue, max_context, max_body, request_timeout, client_timeout),
        host=host,
        port=port,
        telemetry=telemetry,
        keys=read_keys(api_keys),
        poll_s=poll,
        drain_s=drain,
    )
    server = PairServer(options)

    def on_ready() -> None:
        if as_json and server.state is not None:
            write_json({"url": server.url, **server.state.health()})

    logging.getLogger("draftsmith").setLevel(logging.INFO)
    server.run(on_ready)


def _require_mode(verify: str) -> None:
    if verify not in ("rejection", "match"):
        raise ConfigError(
            "reading --verify",
            found=repr(verify),
            expected="rejection or match",
            remedy="pass one of these",
        )


@reported
def export(
    uri: Pair,
    directory: Annotated[Path, typer.Argument(help="Folder to be made.")],
    *,
    to: Annotated[str, typer.Option(metavar="transformers|vllm", help="Who is to load it.")],
    target: TargetFolder = None,
    root: Root = HERE,
    as_json: AsJson = False,
) -> None:
    """Write a pair's draft as a whole model that another server can draft with."""
    from draftsmith.registry.loading import load_pair  # noqa: PLC0415  torch is slow to import
    from draftsmith.serving.export import export_pair  # noqa: PLC0415

    written = export_pair(load_pair(uri, root=root, target=target), directory, to=to)
    if as_json:
        write_json(written)
        return
    typer.echo(
        f"{directory} holds the draft of {uri}; its logits are those of the source "
        f"(largest difference {written['largest_difference']:.3g})."
    )
    typer.echo((directory / "README.md").read_text(encoding="utf-8"))
