"""Which pair a benchmark measures, and where its result is kept."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith import load_pair
from draftsmith.config import load_value
from draftsmith.drafts.joined import LoadedDraft
from draftsmith.evaluation.any_pair import load_any_draft
from draftsmith.evaluation.cost_model import Survival
from draftsmith.targets.loading import LoadedTarget, load_target

_DOCS = Path("docs/measurements")


class AnyPair(NamedTuple):
    """A pair, and its evaluated survival at temperature 0, which is empty where none was."""

    target: LoadedTarget
    draft: LoadedDraft
    survival: Survival


def arguments(
    argv: Sequence[str] | None, *, description: str, kind: str, budget: float
) -> argparse.Namespace:
    """Options of a benchmark: the pair, prompts, a budget in seconds, the file of the result."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pair", help="models:/NAME@ALIAS or a folder; default: the champion")
    parser.add_argument("--target", type=Path, help="folder of a target, instead of --pair")
    parser.add_argument("--draft", type=Path, help="folder of its draft")
    parser.add_argument("--prompts", type=Path, help="JSONL; default: the bundled eval prompts")
    parser.add_argument("--budget", type=float, default=budget, metavar="SECONDS")
    parser.add_argument("--out", type=Path, help=f"JSON; default: {_DOCS}/{kind}-*.json")
    found = parser.parse_args(argv)
    if (found.target is None) != (found.draft is None):
        parser.error("--target and --draft go together")
    return found


def load(chosen: argparse.Namespace) -> AnyPair:
    """The pair that the options name."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if chosen.target is not None:
        target = load_target(chosen.target, dtype="auto", device=device)
        return AnyPair(target, load_any_draft(target, chosen.draft), Survival(()))
    pair = load_pair(chosen.pair or champion(), device=device)
    return AnyPair(pair.target, pair.draft, pair.survivals().get(0.0, Survival(())))


def champion() -> str:
    """Address of the champion of the project in this folder."""
    return f"models:/{load_value(Path('build/config.yaml'), 'registry.name', str)}@champion"


def place(kind: str, device: Mapping[str, Any]) -> Path:
    """The file of a result of this device, named after it."""
    name = re.sub(r"[^a-z0-9]+", "-", str(device["name"]).lower()).strip("-")
    return _DOCS / f"{kind}-{name}-{device['threads']}-threads.json"
