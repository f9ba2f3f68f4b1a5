"""What a report is made of: the JSON reports of one run, and what was measured beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.drift.prediction import break_even_alpha
from draftsmith.errors import EvidenceError

Report = Mapping[str, Any]


@dataclass(frozen=True)
class ReportInputs:
    """The reports, as read from their files.

    Attributes:
        decision: `reports/decision.json`.
        registration: `reports/registration.json`; names the recipe that the page is about.
        evaluation: `reports/evaluation.json`.
        benchmark: `reports/benchmark.json`.
        drift: `reports/drift.json`.
        target: `build/target.json`.
        champion: RegisteredPair that holds the alias, from `build/champion.json`.
        champion_record: The RecipeEvaluation attached to it.
        incumbent: `reports/incumbent.json`.
        manifest: `draft.json` of the registered recipe.
        advice: `reports/advice.json`, where it is of this pair.
    """

    decision: Report
    registration: Report
    evaluation: Report
    benchmark: Report
    drift: Report
    target: Report
    champion: Report | None = None
    champion_record: Report | None = None
    incumbent: Report | None = None
    manifest: Report | None = None
    advice: Report | None = None

    @property
    def recipe(self) -> str:
        """The registered recipe."""
        return str(self.registration["recipe"])

    @property
    def evaluated(self) -> Report:
        """RecipeEvaluation of the registered recipe."""
        return of_recipe(self.evaluation, self.recipe, name="evaluation")

    @property
    def benchmarked(self) -> Report:
        """RecipeBenchmark of the registered recipe."""
        return of_recipe(self.benchmark, self.recipe, name="benchmark")

    @property
    def break_even(self) -> float | None:
        """Least alpha with which the pair's draft length pays on the device of the benchmark."""
        return break_even_alpha(self.benchmarked)

    @property
    def keeps_target(self) -> bool:
        """Whether the champion serves the very target that this pair is for."""
        held = (self.champion or {}).get("target_digest")
        return held is not None and held == self.target["digest"]


def of_recipe(report: Report, recipe: str, *, name: str) -> Report:
    """The record of one recipe.

    Raises:
        EvidenceError: The report does not cover it.
    """
    recipes: Mapping[str, Report] = report["recipes"]
    if recipe not in recipes:
        raise EvidenceError(
            f"reporting on reports/{name}.json",
            found=f"recipes {', '.join(sorted(recipes)) or 'none'}",
            expected=f"the registered recipe {recipe}",
            remedy=f"rerun `dvc repro` so that {name} covers the registered recipe",
        )
    return recipes[recipe]
