"""How often the live verdict errs at its default settings: `python -m benchmarks.live_calibration`.

Writes docs/measurements/live-calibration.json; docs/monitoring.md has the figures. One process of
some minutes.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.live_service import (
    DIGEST,
    MARGIN,
    MEASURED,
    evaluation_record,
    monitor_config,
    stream,
)
from draftsmith import provenance
from draftsmith.artifacts import write_json
from draftsmith.drift.live import judge_live
from draftsmith.drift.live_reference import registered_rates
from draftsmith.drift.telemetry import ServedRequest

OUTPUT = MEASURED.parent / "live-calibration.json"
CONFIG = monitor_config()
# Requests of a stream, and prompts of each domain that the reference was decoded on.
SIZES = ((400, 11), (1000, 11), (1000, 30))
DROPS = (0.0, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1)
PER_DOMAIN = 11
NUM_STREAMS = 100
NUM_STATIONARY = 300
EASY, HARD = "maths", "translation"
MIDDLE = 500

_LOG = logging.getLogger(__name__)


def verdicts(
    make: Callable[[int], list[ServedRequest]], *, num_streams: int, per_domain: int
) -> dict[str, float]:
    """Share of streams by verdict; each stream has a reference of its own."""
    counts: Counter[str] = Counter()
    for seed in range(num_streams):
        rates = registered_rates(evaluation_record(10_000 + seed, per_domain=per_domain))
        report = judge_live(make(seed), rates, pair_digest=DIGEST, config=CONFIG, margin=MARGIN)
        counts[report["verdict"]] += 1
    return {verdict: count / num_streams for verdict, count in sorted(counts.items())}


def drops() -> list[dict[str, Any]]:
    """A draft that accepts less from the middle of the stream on; 0 is a false alarm."""
    rows = []
    for (length, per_domain), drop in itertools.product(SIZES, DROPS):
        shares = verdicts(
            lambda seed, n=length, d=drop: stream(n, seed, lost=lambda i: d * (i >= n // 2)),
            num_streams=NUM_STREAMS if drop else NUM_STATIONARY,
            per_domain=per_domain,
        )
        row = {"num_requests": length, "decoded_prompts": 6 * per_domain, "drop": drop}
        _LOG.info("%s %s", row, shares)
        rows.append(row | {"verdicts": shares})
    return rows


def shifts() -> list[dict[str, Any]]:
    """Traffic or engine that changes in the middle, and acceptance with it; the draft does not."""
    cases: dict[str, dict[str, Any]] = {
        "domain mix, labelled": {
            "domain": lambda i: [EASY] * 3 + [HARD] if i < MIDDLE else [EASY] + [HARD] * 3
        },
        "domain mix, unlabelled": {
            "domain": lambda i: EASY if i < MIDDLE else HARD,
            "labelled": False,
        },
        "prompts that are longer and harder": {
            "prompt_tokens": lambda i: 50 + i % 90 if i < MIDDLE else 400 + i % 200,
            "lost": lambda i: 0.12 * (i >= MIDDLE),
        },
        "draft length, and acceptance with it": {
            "draft_length": lambda i: 1 if i < MIDDLE else 4,
            "lost": lambda i: 0.1 * (i >= MIDDLE),
        },
    }
    rows = []
    for name, given in cases.items():
        shares = verdicts(
            lambda seed, g=given: stream(2 * MIDDLE, seed, **g),
            num_streams=NUM_STREAMS,
            per_domain=11,
        )
        _LOG.info("%s %s", name, shares)
        rows.append({"shift": name, "verdicts": shares})
    return rows


def main() -> None:
    """Simulate everything and write the results."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    report = {
        "schema": 1,
        "measured": Path(MEASURED).name,
        "settings": asdict(CONFIG) | {"margin": MARGIN},
        "drops": drops(),
        "shifts": shifts(),
        "provenance": provenance.collect(0),
    }
    write_json(OUTPUT, report)


if __name__ == "__main__":
    main()
