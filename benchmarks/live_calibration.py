"""How often the live verdict errs at its default settings, asked for again and again as cron does.

`python -m benchmarks.live_calibration [quiet] [drops] [shifts] [metrics]` simulates these parts, or
all, and writes them into docs/measurements/live-calibration.json; docs/statistics.md has the
figures. One process of about an hour.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from draftsmith.artifacts import read_json, write_json
from draftsmith.drift.counters import DRAFT_TOKENS, FIRST_ACCEPTED, ROUNDS, Engine
from draftsmith.drift.exposition import Snapshot
from draftsmith.drift.live import judge_live
from draftsmith.drift.live_reference import Registered, registered_rates
from draftsmith.drift.prometheus import judge_metrics
from draftsmith.drift.telemetry import ServedRequest

OUTPUT = MEASURED.parent / "live-calibration.json"
CONFIG = monitor_config()
DECAY = "draft decay"
# Prompts of each of six domains that the reference was decoded on; 11 is the default.
PER_DOMAIN = (11, 30)
LOOK = 40  # requests between two looks
LOOKS_A_DAY = 48
# Name, requests between looks, looks, streams.
QUIET = (
    ("a look every 40 requests", LOOK, 7 * LOOKS_A_DAY, 100),
    ("a look every 400 requests", 400, LOOKS_A_DAY, 100),
)
DROPS = (0.04, 0.05, 0.06, 0.08, 0.1)
BEFORE = 1000
AFTER = (200, 400, 800, 1600)
NUM_STREAMS = 60
EASY, HARD = "maths", "translation"
MIDDLE = 500

_LOG = logging.getLogger(__name__)
Rates = Mapping[str, Registered]


def rates_of(seed: int, per_domain: int) -> Rates:
    """What was registered: each stream has a reference of its own, with its own error."""
    return registered_rates(evaluation_record(10_000 + seed, per_domain=per_domain))


def looks(
    requests: Sequence[ServedRequest], rates: Rates, every: int, *, start: int = 0
) -> Iterator[tuple[int, str]]:
    """How many requests there were at each look from `start` on, and the verdict on all of them."""
    for end in range(start + every, len(requests) + 1, every):
        report = judge_live(requests[:end], rates, pair_digest=DIGEST, config=CONFIG, margin=MARGIN)
        yield end, report["verdict"]


def first_alarm(requests: Sequence[ServedRequest], rates: Rates, every: int) -> int | None:
    """How many requests had come at the first look that said decay; None if none did."""
    found = (end for end, verdict in looks(requests, rates, every) if verdict == DECAY)
    return next(found, None)


def shares_within(alarms: Sequence[int | None], spans: Sequence[int]) -> dict[str, float]:
    """Share of the streams whose alarm came within each number of requests."""
    return {
        str(span): sum(a is not None and a <= span for a in alarms) / len(alarms) for span in spans
    }


def quiet() -> list[dict[str, Any]]:
    """A draft that stays as it was: every alarm is false."""
    rows = []
    for (name, every, num_looks, num_streams), per_domain in itertools.product(QUIET, PER_DOMAIN):
        alarms = [
            first_alarm(stream(every * num_looks, seed), rates_of(seed, per_domain), every)
            for seed in range(num_streams)
        ]
        spans = [every * LOOKS_A_DAY * day for day in (1, 7) if day * LOOKS_A_DAY <= num_looks]
        row = {"looks": name, "decoded_prompts": 6 * per_domain, "num_streams": num_streams}
        rows.append(row | {"alarms_within": shares_within(alarms, spans)})
        _LOG.info("%s", rows[-1])
    return rows


def drops() -> list[dict[str, Any]]:
    """A draft that accepts less from request `BEFORE` on: how soon is the alarm?"""
    rows = []
    for drop, per_domain in itertools.product(DROPS, PER_DOMAIN):
        alarms = []
        for seed in range(NUM_STREAMS):
            length = BEFORE + AFTER[-1]
            requests = stream(length, seed, lost=lambda i, d=drop: d * (i >= BEFORE))
            found = looks(requests, rates_of(seed, per_domain), LOOK, start=BEFORE)
            alarms.append(next((end - BEFORE for end, verdict in found if verdict == DECAY), None))
        row = {"drop": drop, "decoded_prompts": 6 * per_domain, "num_streams": NUM_STREAMS}
        rows.append(row | {"alarms_within": shares_within(alarms, AFTER)})
        _LOG.info("%s", rows[-1])
    return rows


def shifts() -> list[dict[str, Any]]:
    """Traffic or engine that changes in the middle; the draft does not."""
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
        "draft length 1 to 4": {"draft_length": lambda i: 1 if i < MIDDLE else 4},
    }
    rows = []
    for name, given in cases.items():
        last: Counter[str] = Counter()
        num_alarms = 0
        for seed in range(NUM_STREAMS):
            requests = stream(2 * MIDDLE, seed, **given)
            found = [verdict for _, verdict in looks(requests, rates_of(seed, 11), LOOK)]
            num_alarms += DECAY in found
            last[found[-1]] += 1
        row = {"shift": name, "num_streams": NUM_STREAMS, "alarms": num_alarms / NUM_STREAMS}
        shares = {verdict: count / NUM_STREAMS for verdict, count in sorted(last.items())}
        rows.append(row | {"last_verdicts": shares})
        _LOG.info("%s", rows[-1])
    return rows


def metrics() -> list[dict[str, Any]]:
    """Counters of an unchanged draft, the window between two scrapes judged at each look."""
    rows = []
    for name, given in (("all domains", {}), ("the hardest domain alone", {"domain": HARD})):
        alarms = []
        for seed in range(NUM_STREAMS):
            requests = stream(7 * LOOKS_A_DAY * LOOK, seed, **given)
            rates, before = rates_of(seed, PER_DOMAIN[0]), _counters([])
            alarm = None
            for end in range(LOOK, len(requests) + 1, LOOK):
                now = _counters(requests[:end])
                report = judge_metrics([before, now], rates, config=CONFIG, margin=MARGIN)
                before = now
                if report["verdict"] == DECAY:
                    alarm = end
                    break
            alarms.append(alarm)
        spans = [LOOK * LOOKS_A_DAY * day for day in (1, 7)]
        row = {"traffic": name, "num_streams": NUM_STREAMS}
        rows.append(row | {"alarms_within": shares_within(alarms, spans)})
        _LOG.info("%s", rows[-1])
    return rows


def _counters(requests: Sequence[ServedRequest]) -> Snapshot:
    counts = {
        ROUNDS: float(sum(request.rounds for request in requests)),
        DRAFT_TOKENS: float(sum(sum(request.drafted) for request in requests)),
        FIRST_ACCEPTED: float(sum(request.accepted[0] for request in requests)),
    }
    return Snapshot(engines={"": Engine(counts, {})}, accept_length=None)


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "quiet": quiet,
    "drops": drops,
    "shifts": shifts,
    "metrics": metrics,
}


def main() -> None:
    """Simulate the parts that are named and write the results."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    report = {
        **(read_json(OUTPUT) if OUTPUT.exists() else {}),
        "schema": 2,
        "measured": Path(MEASURED).name,
        "settings": asdict(CONFIG) | {"margin": MARGIN},
        "provenance": provenance.collect(0),
    }
    for name in sys.argv[1:] or PARTS:
        write_json(OUTPUT, report := {**report, name: PARTS[name]()})


if __name__ == "__main__":
    main()
