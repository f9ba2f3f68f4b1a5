"""Reading acceptance rates by prompt out of evaluation records.

A record is a RecipeEvaluation as `reports/evaluation.json` holds it. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import EvidenceError

ENGINE_PACKAGES = ("draftsmith", "torch", "transformers")


@dataclass(frozen=True)
class Recorded:
    """A registered pair and the evaluation record that was attached to it.

    Attributes:
        pair: RegisteredPair: name, version, digests, recipe, `live_drift`.
        record: RecipeEvaluation of that pair on its own target.
        benchmark: RecipeBenchmark of that pair with its device; None where it was not read.
    """

    pair: Mapping[str, Any]
    record: Mapping[str, Any]
    benchmark: Mapping[str, Any] | None = None

    @property
    def label(self) -> str:
        """How sentences name the pair."""
        return f"version {self.pair['version']}"

    def lacks(self, temperature: str) -> str:
        """A sentence where the record has no alpha at `temperature`; empty where it has one.

        An old record stays as it is: drift.temperature was another one when it was made, and its
        target may be gone.
        """
        measured = temperatures(self.record)
        if temperature in measured:
            return ""
        known = " and ".join(measured) or "none"
        return (
            f"{self.label.capitalize()} was measured at temperature {known} and not at "
            f"{temperature}, which drift.temperature asks for now, so nothing can be compared."
        )

    @property
    def engine_versions(self) -> dict[str, str]:
        """Versions of the packages that the pair was measured with, as far as its record says."""
        benchmark = self.benchmark or {}
        packages = benchmark.get("provenance", {}).get("packages", {})
        stated = {**benchmark.get("device", {}), **packages}
        return {name: str(stated[name]) for name in ENGINE_PACKAGES if stated.get(name)}


def alpha_by_prompt(record: Mapping[str, Any], temperature: str) -> dict[str, float]:
    """Acceptance rate of every prompt that was measured at `temperature` (a report key).

    Raises:
        EvidenceError: No prompt was measured at that temperature.
    """
    values = {
        prompt["prompt_id"]: float(prompt["alpha"][temperature])
        for prompt in record["prompts"]
        if prompt["alpha"].get(temperature) is not None
    }
    if not values:
        measured = temperatures(record)
        raise EvidenceError(
            f"reading alpha at temperature {temperature}",
            found=f"measurements at {', '.join(measured)}" if measured else "no measured prompt",
            expected=f"prompts measured at {temperature}",
            remedy="set drift.temperature to a measured one, or add it to evaluation.temperatures",
        )
    return values


def domain_by_prompt(record: Mapping[str, Any]) -> dict[str, str]:
    """Domain of every prompt of a record."""
    return {prompt["prompt_id"]: prompt["domain"] for prompt in record["prompts"]}


def temperatures(record: Mapping[str, Any]) -> list[str]:
    """Temperatures at which at least one prompt was measured, ascending."""
    keys = {
        key
        for prompt in record["prompts"]
        for key, value in prompt["alpha"].items()
        if value is not None
    }
    return sorted(keys, key=float)
