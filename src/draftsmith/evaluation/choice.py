"""Which recipe is proposed: the fastest on this device.

The drift and the register stage must agree, so the rule lives here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.errors import EvidenceError


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


def losers(benchmark: Mapping[str, Any]) -> dict[str, str]:
    """Why each other recipe was not chosen."""
    best = best_recipe(benchmark)
    speed = {name: entry["speedup"]["mean"] for name, entry in benchmark["recipes"].items()}
    return {
        name: f"measured speedup {value:.3f}, below {speed[best]:.3f} of {best}"
        for name, value in speed.items()
        if name != best
    }
