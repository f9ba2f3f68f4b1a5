"""What measured speed decides: which recipe is proposed, and at which lengths it is served.

The drift and the register stage must agree on the recipe, so the rule lives here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.errors import EvidenceError

_UNMEASURED_LENGTH = 2


def best_recipe(benchmark: Mapping[str, Any]) -> str:
    """Name of the recipe with the highest measured speedup; ties go to the first name.

    Raises:
        EvidenceError: Nothing was measured.
    """
    recipes: Mapping[str, Mapping[str, Any]] = benchmark["recipes"]
    if not recipes:
        raise EvidenceError(
            "choosing a recipe",
            found="a benchmark without recipes",
            expected="at least one measured recipe",
            remedy="name a recipe under `recipes` in params.yaml and rerun `dvc repro`",
        )
    return max(sorted(recipes), key=lambda name: recipes[name]["speedup"]["mean"])


def served_lengths(measured: Mapping[str, Any], *, rows: int) -> tuple[int, int]:
    """Draft and copy length of a pair at a batch size; (0, 0) where drafts did not pay.

    Args:
        measured: A recipe's entry of reports/benchmark.json; empty where nothing was measured.
        rows: Requests that are decoded together. Between two measured sizes the larger one counts,
            beyond all of them the largest.
    """
    entry = entry_of(measured, rows)
    if entry is not measured and entry.get("speedup", 1.0) < 1:
        return 0, 0
    copies = entry.get("lookup_length", measured.get("lookup_length"))
    return int(entry.get("draft_length", _UNMEASURED_LENGTH)), int(copies or 0)


def entry_of(measured: Mapping[str, Any], rows: int) -> Mapping[str, Any]:
    """What was measured for a batch size; arguments as in `served_lengths`."""
    batches = sorted(measured.get("batch", ()), key=lambda entry: int(entry["batch_size"]))
    if rows == 1 or not batches:
        return measured
    return next((e for e in batches if int(e["batch_size"]) >= rows), batches[-1])


def losers(benchmark: Mapping[str, Any]) -> dict[str, str]:
    """Why each other recipe was not chosen."""
    best = best_recipe(benchmark)
    speed = {name: entry["speedup"]["mean"] for name, entry in benchmark["recipes"].items()}
    return {
        name: f"measured speedup {value:.3f}, below {speed[best]:.3f} of {best}"
        for name, value in speed.items()
        if name != best
    }
