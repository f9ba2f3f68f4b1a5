"""Measure a pair's speed without the pipeline.

    python -m draftsmith.evaluation.speed --target DIR --draft DIR

Needs torch, Transformers and safetensors only, so it runs on a GPU machine that has neither DVC,
MLflow, Hydra nor datasets. Its JSON carries the digests of what it measured, the device and the
time: `draftsmith evidence import` makes it evidence of a registered pair.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith import provenance
from draftsmith.artifacts import write_json
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.any_pair import (
    CONFIG,
    LOOKUP_LENGTH,
    load_any_draft,
    measure,
    prompts_of,
)
from draftsmith.targets.loading import load_target

_EXIT_USER_ERROR = 2


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the speed of a pair on this machine.")
    parser.add_argument("--target", type=Path, required=True, help="Transformers checkpoint folder")
    parser.add_argument("--draft", type=Path, required=True, help="draft, or any checkpoint")
    parser.add_argument("--prompts", type=Path, help="JSONL; default: the bundled eval prompts")
    parser.add_argument("--dtype", default="auto", help="dtype the target is served in")
    parser.add_argument("--max-draft-length", type=int, default=4, metavar="N")
    parser.add_argument(
        "--lookup-length",
        type=int,
        default=LOOKUP_LENGTH,
        metavar="N",
        help="longest copy from the text, as evaluation.lookup_length; 0 never copies",
    )
    parser.add_argument("--num-prompts", type=int, default=24, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16], metavar="N")
    parser.add_argument("--out", type=Path, help="JSON file; default: standard output")
    return parser.parse_args(argv)


def _report(arguments: argparse.Namespace) -> dict[str, Any]:
    config = replace(
        CONFIG,
        max_draft_length=arguments.max_draft_length,
        prompts=arguments.num_prompts,
        max_new_tokens=arguments.max_new_tokens,
        batch_sizes=tuple(arguments.batch_sizes),
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(arguments.target, dtype=arguments.dtype, device=device)
    draft = load_any_draft(target, arguments.draft)
    prompts = prompts_of(arguments.prompts)
    lookup_length = arguments.lookup_length
    entry = measure(target, draft, prompts, config, lookup_length=lookup_length)
    return {
        "schema": 1,
        "target_digest": target.identity.digest,
        "device": provenance.device(),
        "recipes": {draft.manifest.recipe: entry},
        "provenance": provenance.collect(config.seed),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    arguments = _arguments(argv)
    try:
        report = _report(arguments)
        if arguments.out is None:
            sys.stdout.write(json.dumps(report, indent=2, sort_keys=True) + "\n")
        else:
            write_json(arguments.out, report)
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
