"""How often the drift verdicts err at their default settings: `python -m benchmarks.calibration`.

Writes docs/measurements/drift-calibration.json and .png; docs/statistics.md explains the figures.
One process of twelve minutes (2-core Xeon VM).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.simulation import (
    MEASUREMENTS,
    Judge,
    Measured,
    default_config,
    detectable_drop,
    flag_runs,
    pooled_runs,
    shares,
)
from draftsmith import provenance
from draftsmith.artifacts import write_json
from draftsmith.drift.incumbent import judge as judge_incumbent
from draftsmith.drift.verdict import judge as judge_challenger

# A light update of the target under the same draft, and a second draft of the same target.
SOURCES = ("light-fine-tune", "retrained-draft")
HEAVY_TAILED = "light-fine-tune"
TEMPERATURES = ("0.0", "0.7")
CONFIG = default_config()
JUDGES: Mapping[str, Judge] = {"incumbent": judge_incumbent, "challenger": judge_challenger}
DROPS = (0.0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.06)
POWERS = (0.8, 0.95)
NUM_PROMPTS = 200
OTHER_NUMBERS = (400, 800)
NUM_RUNS = 2000
NUM_DOMAIN_RUNS = 1000
DOMAIN_DROPS = (0.04, 0.08)
SEED = 0

_LOG = logging.getLogger(__name__)


def main() -> None:
    """Simulate everything and write the results."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    pooled, domains = [], []
    for source, temperature in itertools.product(SOURCES, TEMPERATURES):
        measured = Measured.read(source, temperature)
        cases = {source: measured}
        if source == HEAVY_TAILED:
            cases[f"{source}, without its largest change"] = measured.without_largest()
        for (name, case), mirrored in itertools.product(cases.items(), (False, True)):
            label = {"source": name, "temperature": temperature, "mirrored": mirrored}
            _LOG.info("simulating=%s", label)
            pooled.append(label | pooled_results(case, mirrored=mirrored))
            domains.append(label | domain_results(case, mirrored=mirrored))
    report = {
        "schema": 1,
        "margin": CONFIG.margin,
        "confidence": CONFIG.confidence,
        "min_prompts": CONFIG.min_prompts,
        "num_runs": NUM_RUNS,
        "num_domain_runs": NUM_DOMAIN_RUNS,
        "seed": SEED,
        "pooled": pooled,
        "domains": domains,
        "provenance": {"packages": {"numpy": np.__version__}}
        | {key: provenance.collect()[key] for key in ("git_revision", "python", "processor")},
    }
    write_json(MEASUREMENTS / "drift-calibration.json", report)
    picture(report).savefig(MEASUREMENTS / "drift-calibration.png", dpi=120)


def pooled_results(measured: Measured, *, mirrored: bool) -> dict[str, Any]:
    """Rates of both verdicts by true drop, and the drops that they find."""
    changes = measured.changes(mirrored=mirrored)
    spread = float(changes.std(ddof=1))
    runs = pooled_runs(
        measured, num_runs=NUM_RUNS, num_prompts=NUM_PROMPTS, seed=SEED, mirrored=mirrored
    )
    more = {
        number: pooled_runs(
            measured, num_runs=NUM_RUNS // 4, num_prompts=number, seed=SEED, mirrored=mirrored
        )
        for number in OTHER_NUMBERS
    }
    return {
        "num_measured": len(changes),
        "num_prompts": NUM_PROMPTS,
        "spread": spread,
        "skew": float((changes**3).mean() / changes.std() ** 3),
        "interval_above": sum(run.low > 0 for run in runs) / NUM_RUNS,
        "interval_below": sum(run.high < 0 for run in runs) / NUM_RUNS,
        "by_drop": [
            {"drop": drop}
            | {n: shares(runs, judge, drop=drop, config=CONFIG) for n, judge in JUDGES.items()}
            for drop in DROPS
        ],
        "detectable_drop": [
            {"num_prompts": number, "power": power}
            | {n: detectable_drop(r, j, power=power, config=CONFIG) for n, j in JUDGES.items()}
            for number, r in [(NUM_PROMPTS, runs), *more.items()]
            for power in POWERS
        ],
        "unchanged_by_number": [
            {"num_prompts": number}
            | {n: shares(r, judge, drop=0.0, config=CONFIG) for n, judge in JUDGES.items()}
            for number, r in [(NUM_PROMPTS, runs), *more.items()]
        ],
    }


def domain_results(measured: Measured, *, mirrored: bool) -> dict[str, Any]:
    """Flags when no domain changed, and when one fell."""
    names = sorted(set(measured.domains))
    unchanged = flag_runs(
        measured, drops={}, num_runs=NUM_DOMAIN_RUNS, seed=SEED, config=CONFIG, mirrored=mirrored
    )
    one_fell = []
    for name, drop in itertools.product(names, DOMAIN_DROPS):
        runs = flag_runs(
            measured,
            drops={name: drop},
            num_runs=NUM_DOMAIN_RUNS // 10,
            seed=SEED,
            config=CONFIG,
            mirrored=mirrored,
        )
        one_fell.append(
            {
                "domain": name,
                "num_prompts": list(measured.domains).count(name),
                "drop": drop,
                "flagged": sum(name in run for run in runs) / len(runs),
                "another_flagged": sum(bool(run - {name}) for run in runs) / len(runs),
            }
        )
    return {
        "any_flagged_unchanged": sum(map(bool, unchanged)) / NUM_DOMAIN_RUNS,
        "flagged_unchanged": {
            name: sum(name in run for run in unchanged) / NUM_DOMAIN_RUNS for name in names
        },
        "one_fell": one_fell,
    }


def picture(report: Mapping[str, Any]) -> Figure:
    """Both verdicts by true drop, one field a measurement."""
    cases = [
        case for case in report["pooled"] if case["source"] in SOURCES and not case["mirrored"]
    ]
    figure = Figure(figsize=(10, 4 * -(-len(cases) // 2)), layout="constrained")
    for place, case in enumerate(cases, start=1):
        axes = figure.add_subplot(-(-len(cases) // 2), 2, place)
        drops = [100 * entry["drop"] for entry in case["by_drop"]]
        for verdict, colour in (("matched", "C2"), ("unknown", "C7"), ("drifted", "C3")):
            values = [100 * entry["incumbent"].get(verdict, 0.0) for entry in case["by_drop"]]
            axes.plot(drops, values, "o-", color=colour, label=f"incumbent: {verdict}")
        blocked = [100 * entry["challenger"].get("drifted", 0.0) for entry in case["by_drop"]]
        axes.plot(drops, blocked, "s--", color="C0", label="challenger: blocked")
        axes.axvline(100 * report["margin"], color="black", linewidth=0.8)
        axes.set_title(
            f"{case['source']}, temperature {case['temperature']}\n"
            f"{case['num_prompts']} prompts, spread {case['spread']:.3f}"
        )
        axes.set_xlabel("true drop of alpha, points (line: the margin)")
        axes.set_ylabel("share of runs, %")
        axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
