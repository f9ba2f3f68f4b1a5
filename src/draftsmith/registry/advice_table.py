"""What `draftsmith advise` found, read: for whom it holds, and which lengths it chooses.

Pure but for the reading. What the fields mean is said where they are written (`evaluation/advice`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.artifacts import read_json

ADVICE = Path("reports/advice.json")
SCHEMA = 3  # since 3 a draft length of 0 may stand beside copies, and a tree beside a length
SPECULATES = ("speculate", "about even")  # verdicts that speak against no draft
_DEVICE = ("kind", "name", "threads")


def read_advice(path: Path, pair_digest: str) -> dict[str, Any] | None:
    """What `draftsmith advise` wrote; None where it did not, or of another pair.

    Raises:
        ArtifactError: The file is damaged.
    """
    if not path.exists():
        return None
    advice = read_json(path)
    wanted = {"schema": SCHEMA, "pair_digest": pair_digest}
    return advice if wanted.items() <= advice.items() else None


def is_of_device(advice: Mapping[str, Any], device: Mapping[str, Any]) -> bool:
    """Whether it was measured on such a device, with as many threads."""
    measured = advice["device"]
    return all(measured.get(key) == device.get(key) for key in _DEVICE)


def is_checked(advice: Mapping[str, Any]) -> bool:
    """Whether enough workloads were decoded to say how far its predictions are off."""
    return advice["prediction"]["error_bar"] is not None


def nearest_entry(
    advice: Mapping[str, Any],
    *,
    rows: int,
    temperature: float,
    context: int = 256,
    new_tokens: int = 128,
) -> Mapping[str, Any] | None:
    """The workload that is most like one; None where nothing near it was advised on.

    Of two measured batch sizes the larger one counts; of larger batches than any, and of other
    temperatures, nothing is known. Of contexts and answers those count that are nearest by their
    ratio.
    """
    entries: list[Mapping[str, Any]] = [
        entry
        for entry in advice["workloads"]
        if float(entry["temperature"]) == temperature and int(entry["batch_size"]) >= rows
    ]
    if not entries:
        return None
    size = min(int(entry["batch_size"]) for entry in entries)

    def distance(entry: Mapping[str, Any]) -> float:
        wanted = {"context": context, "new_tokens": new_tokens}
        return sum(abs(math.log(entry[key] / value)) for key, value in wanted.items())

    return min((e for e in entries if int(e["batch_size"]) == size), key=distance)
