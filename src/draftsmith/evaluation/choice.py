"""What measured speed decides: which recipe is proposed, and at which lengths it is served.

The drift and the register stage must agree on the recipe, so the rule lives here. A recipe whose
pair every gate blocks, whoever signs for it, is chosen only where there is no other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.errors import EvidenceError

_UNMEASURED_LENGTH = 2


def unusable_recipes(
    evaluation: Mapping[str, Any], quarantined: Mapping[str, str]
) -> dict[str, str]:
    """The recipes whose pairs cannot be promoted, and why.

    Args:
        evaluation: reports/evaluation.json.
        quarantined: Digest of a pair in quarantine -> its version.
    """
    found = {}
    for name, entry in evaluation["recipes"].items():
        version = quarantined.get(entry["pair_digest"])
        if version is not None:
            found[name] = f"its pair is in quarantine, as version {version}"
        elif not entry["losslessness"]["holds"]:
            found[name] = "its losslessness self-test fails"
    return found


def best_recipe(benchmark: Mapping[str, Any], unusable: Collection[str]) -> str:
    """Name of the usable recipe with the highest measured speedup; ties go to the first name.

    Where none is usable all are compared, so that the gate says what is wrong with the fastest.

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
    usable = sorted(recipes.keys() - set(unusable)) or sorted(recipes)
    return max(usable, key=lambda name: recipes[name]["speedup"]["mean"])


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


def losers(benchmark: Mapping[str, Any], unusable: Mapping[str, str]) -> dict[str, str]:
    """Why each other recipe was not chosen."""
    best = best_recipe(benchmark, unusable)
    speed = {name: entry["speedup"]["mean"] for name, entry in benchmark["recipes"].items()}
    reasons = {} if best in unusable else unusable
    return {
        name: reasons.get(name, f"measured speedup {value:.3f}, below {speed[best]:.3f} of {best}")
        for name, value in speed.items()
        if name != best
    }
