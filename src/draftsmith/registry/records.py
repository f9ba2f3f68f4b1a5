"""The files of registered pairs on this machine, and the records that verdicts compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.artifacts import read_json, short
from draftsmith.drift.evidence import Recorded

CHAMPIONS = Path("models", "champions")


def pair_folder(pair: Mapping[str, Any], *, root: Path = CHAMPIONS) -> Path:
    """Where `resolve_champion` put the pair's files."""
    return root / short(str(pair["pair_digest"]))


def recorded(pair: Mapping[str, Any] | None, *, root: Path = CHAMPIONS) -> Recorded | None:
    """A registered pair with its own records; None stays None."""
    if pair is None:
        return None
    evidence = pair_folder(pair, root=root) / "evidence"
    speed = evidence / "benchmark.json"
    benchmark = read_json(speed) if speed.exists() else None
    return Recorded(pair, read_json(evidence / "evaluation.json"), benchmark)


def known_record(
    start: Mapping[str, Any],
    evaluated: Mapping[str, Any],
    target_digest: str,
    *,
    root: Path = CHAMPIONS,
) -> Recorded | None:
    """The record of a draft that stage start took from a known pair; None for every other start.

    Args:
        start: The recipe's entry of build/start.json.
        evaluated: The recipe's entry of reports/evaluation.json.
        target_digest: The target that it was evaluated on.
        root: Folder of fetched pairs.
    """
    if start["action"] != "known":
        return None
    pair = {
        "version": start["source_version"],
        "pair_digest": start["source_pair_digest"],
        "draft_digest": evaluated["draft_digest"],
        "target_digest": target_digest,
    }
    return recorded(pair, root=root)
