"""Plots and metrics beside the reports.

CSV for `dvc plots`, pictures for people, flat JSON for `dvc metrics`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.artifacts import atomic_directory, write_json, write_text
from draftsmith.report.figures import (
    alpha_by_domain,
    speedup_by_batch_size,
    speedup_by_draft_length,
    survival_by_position,
    write_figure,
)

_FORMATS = ("png", "svg")


def write_evaluation_plots(evaluation: Mapping[str, Any], reports: Path) -> None:
    """Write reports/plots/evaluation/ and reports/metrics/evaluation.json."""
    recipes: Mapping[str, Mapping[str, Any]] = evaluation["recipes"]
    headline = evaluation["temperatures"][0]
    with atomic_directory(reports / "plots" / "evaluation") as folder:
        # At one temperature, and several recipes in the labels: the templates of DVC tell no series
        # of a file apart.
        header = ("recipe", "position", "survival")
        _write_csv(folder / "survival.csv", header, _survival(recipes, headline))
        header = ("recipe", "domain", "alpha")
        _write_csv(folder / "alpha.csv", header, _alpha(recipes, headline))
        for name, record in recipes.items():
            for suffix in _FORMATS:
                write_figure(survival_by_position(record), folder / f"survival_{name}.{suffix}")
                write_figure(alpha_by_domain(record, headline), folder / f"alpha_{name}.{suffix}")
    write_json(
        reports / "metrics" / "evaluation.json",
        {
            name: {
                "alpha": {t: estimate["mean"] for t, estimate in record["alpha"].items()},
                "tau": {t: estimate["mean"] for t, estimate in record["tau"].items()},
                "lossless": record["losslessness"]["holds"],
            }
            for name, record in recipes.items()
        },
    )


def write_benchmark_plots(benchmark: Mapping[str, Any], reports: Path) -> None:
    """Write reports/plots/benchmark/ and reports/metrics/benchmark.json."""
    recipes: Mapping[str, Mapping[str, Any]] = benchmark["recipes"]
    with atomic_directory(reports / "plots" / "benchmark") as folder:
        _write_csv(
            folder / "speedup.csv",
            ("recipe", "draft_length", "speedup"),
            (
                (name, _label(entry["draft_length"], name, recipes), entry["speedup"])
                for name, record in recipes.items()
                for entry in record["calibration"]
            ),
        )
        for name, record in recipes.items():
            for suffix in _FORMATS:
                write_figure(speedup_by_draft_length(record), folder / f"speedup_{name}.{suffix}")
                write_figure(speedup_by_batch_size(record), folder / f"batch_{name}.{suffix}")
    write_json(
        reports / "metrics" / "benchmark.json",
        {
            name: {
                "speedup": record["speedup"]["mean"],
                "speedup_low": record["speedup"]["low"],
                "predicted_speedup": record["predicted_speedup"],
                "draft_length": record["draft_length"],
                "cost_ratio": record["cost"]["cost_ratio"],
            }
            for name, record in recipes.items()
        },
    )


def _survival(
    recipes: Mapping[str, Mapping[str, Any]], temperature: str
) -> Iterable[Sequence[object]]:
    for name, record in recipes.items():
        for position, value in enumerate(record["survival"][temperature], start=1):
            yield name, _label(position, name, recipes), value


def _alpha(
    recipes: Mapping[str, Mapping[str, Any]], temperature: str
) -> Iterable[Sequence[object]]:
    for name, record in recipes.items():
        for domain, part in record["alpha"][temperature]["by_domain"].items():
            yield name, _label(domain, name, recipes), part["mean"]


def _label(place: object, recipe: str, recipes: Mapping[str, object]) -> str:
    """Of an axis that all recipes share: "chat", or "chat (eagle)" where there are several."""
    return f"{place} ({recipe})" if len(recipes) > 1 else str(place)


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_text(path, text.getvalue())
