"""How often the live verdict errs at its default settings, asked for again and again as cron does.

`python -m benchmarks.live_calibration [--minutes N] [quiet] [drops] [shifts] [counters] [gauges]`
adds simulated streams to docs/measurements/live-calibration.json, one of every case in turn, until
each has a hundred or the time is over; docs/statistics.md has the figures. All of it takes hours.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.live_service import (
    DIGEST,
    MARGIN,
    MEASURED,
    RATES,
    evaluation_record,
    monitor_config,
    stream,
)
from draftsmith import provenance
from draftsmith.artifacts import read_json, write_json
from draftsmith.drift import live_strata
from draftsmith.drift.counters import DRAFT_TOKENS, FIRST_ACCEPTED, ROUNDS, Engine
from draftsmith.drift.detectors import Signal
from draftsmith.drift.exposition import Snapshot
from draftsmith.drift.live import judge_live
from draftsmith.drift.live_reference import Registered, registered_rates
from draftsmith.drift.prometheus import judge_metrics
from draftsmith.drift.telemetry import ServedRequest

SCHEMA = 3
OUTPUT = MEASURED.parent / "live-calibration.json"
CONFIG = monitor_config()
DECAY, HARMLESS = "draft decay", ("not enough requests", "ok")
NUM_STREAMS = 100
# Prompts of each of six domains that the reference was decoded on; 11 is the default.
PER_DOMAIN = (11, 30)
LOOK = 40  # requests between two looks
WEEK = 7 * 48  # looks, one every half hour
BEFORE, AFTER = 1000, 1600  # requests before a drop and after it
DROPS = (0.04, 0.05, 0.06, 0.08, 0.1)
MIDDLE = 500
EASY, HARD = (pick(RATES, key=lambda d: statistics.fmean(RATES[d])) for pick in (max, min))
COUNTED = (40, 400, 4000)  # requests in a window of counters
COUNTED_DROPS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
NUM_SCRAPES = 20  # of a gauge

_LOG = logging.getLogger(__name__)
Rates = Mapping[str, Registered]
# How many requests had come at the first look that said decay, and what the last look said.
Outcome = tuple[int | None, str]
Cases = dict[str, Callable[[int], Outcome]]


def rates_of(seed: int, per_domain: int = PER_DOMAIN[0]) -> Rates:
    """What was registered: each stream has a reference of its own, with its own error."""
    return registered_rates(evaluation_record(10_000 + seed, per_domain=per_domain))


def looks(
    requests: Sequence[ServedRequest], rates: Rates, every: int, *, start: int = 0
) -> Iterator[tuple[int, str]]:
    """How many requests came after `start` at each look since, and the verdict on all of them."""
    for end in range(start + every, len(requests) + 1, every):
        yield end - start, _verdict(requests[:end], rates)


def _verdict(requests: Sequence[ServedRequest], rates: Rates) -> str:
    """As `judge_live` says it, but sooner: the detectors take long and can only acquit."""
    judge = partial(judge_live, pair_digest=DIGEST, config=CONFIG, margin=MARGIN)
    with mock.patch.object(live_strata, "signal_of_drop", return_value=Signal(0, 0)):
        accused = judge(requests, rates)["verdict"]
    return accused if accused in HARMLESS else judge(requests, rates)["verdict"]


def windows_of_counters(
    requests: Sequence[ServedRequest], rates: Rates, size: int
) -> Iterator[tuple[int, str]]:
    """The verdict on every window of `size` requests, between two scrapes of vLLM's counters."""
    before = dict.fromkeys((ROUNDS, DRAFT_TOKENS, FIRST_ACCEPTED), 0.0)
    for end in range(size, len(requests) + 1, size):
        window = requests[end - size : end]
        counts = (
            sum(request.rounds for request in window),
            sum(sum(request.drafted) for request in window),
            sum(request.accepted[0] for request in window),
        )
        now = {key: before[key] + count for key, count in zip(before, counts, strict=True)}
        scrapes = [Snapshot({"": Engine(side, {})}, None) for side in (before, now)]
        yield end, judge_metrics(scrapes, rates, config=CONFIG, margin=MARGIN)["verdict"]
        before = now


def scrapes_of_gauge(requests: Sequence[ServedRequest], rates: Rates) -> str:
    """The verdict on SGLang's accept length, set anew between scrapes `LOOK` requests apart."""
    windows = [requests[start : start + LOOK] for start in range(0, len(requests), LOOK)]
    scrapes = [
        Snapshot({}, 1 + sum(sum(r.accepted) for r in window) / sum(r.rounds for r in window))
        for window in windows
    ]
    return str(judge_metrics(scrapes, rates, config=CONFIG, margin=MARGIN)["verdict"])


def outcome(verdicts: Iterable[tuple[int, str]]) -> Outcome:
    """Nobody looks on after an alarm."""
    last = ""
    for end, last in verdicts:
        if last == DECAY:
            return end, last
    return None, last


def _quiet(every: int, num_looks: int, seed: int) -> Outcome:
    return outcome(looks(stream(every * num_looks, seed), rates_of(seed), every))


def _drop(drop: float, per_domain: int, seed: int) -> Outcome:
    requests = stream(BEFORE + AFTER, seed, lost=lambda i: drop * (i >= BEFORE))
    return outcome(looks(requests, rates_of(seed, per_domain), LOOK, start=BEFORE))


def _shift(given: Mapping[str, Any], seed: int) -> Outcome:
    return outcome(looks(stream(2 * MIDDLE, seed, **given), rates_of(seed), LOOK))


def _counters(num_requests: int, size: int, given: Mapping[str, Any], seed: int) -> Outcome:
    requests = stream(num_requests, seed, **given)
    return outcome(windows_of_counters(requests, rates_of(seed), size))


def _gauge(given: Mapping[str, Any], seed: int) -> Outcome:
    requests = stream(NUM_SCRAPES * LOOK, seed, **given)
    return outcome([(len(requests), scrapes_of_gauge(requests, rates_of(seed)))])


_SHIFTS: dict[str, dict[str, Any]] = {
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
# Part -> case -> how its stream of a seed ends.
PARTS: dict[str, Cases] = {
    "quiet": {
        f"a look every {every} requests": partial(_quiet, every, num_looks)
        for every, num_looks in ((LOOK, WEEK), (10 * LOOK, WEEK // 7))
    },
    "drops": {
        f"{drop}, {6 * per_domain} prompts": partial(_drop, drop, per_domain)
        for drop, per_domain in itertools.product(DROPS, PER_DOMAIN)
    },
    "shifts": {name: partial(_shift, given) for name, given in _SHIFTS.items()},
    "counters": {
        "unchanged, all domains": partial(_counters, LOOK * WEEK, LOOK, {}),
        "unchanged, the hardest domain": partial(_counters, LOOK * WEEK, LOOK, {"domain": HARD}),
        **{
            f"{drop}, {size} requests": partial(_counters, size, size, {"lost": drop})
            for size, drop in itertools.product(COUNTED, COUNTED_DROPS)
        },
    },
    "gauges": {
        f"{drop}, draft length {length}": partial(_gauge, {"lost": drop, "draft_length": length})
        for length, drop in itertools.product((1, 4), (0.0, *COUNTED_DROPS))
    },
}


def simulate(report: dict[str, Any], parts: Sequence[str], *, until: float) -> None:
    """Add streams to the report, to the case that has fewest first, till the clock says `until`."""
    cases = [(report.setdefault(part, {}), name, part) for part in parts for name in PARTS[part]]
    for held, name, _ in cases:
        held.setdefault(name, {"num_streams": 0, "alarms": [], "last_verdicts": {}})
    while time.monotonic() < until:
        held, name, part = min(cases, key=lambda case: case[0][case[1]]["num_streams"])
        found = held[name]
        if found["num_streams"] >= NUM_STREAMS:
            return
        alarm, last = PARTS[part][name](found["num_streams"])
        found["num_streams"] += 1
        found["alarms"] += [] if alarm is None else [alarm]
        found["last_verdicts"][last] = found["last_verdicts"].get(last, 0) + 1
        _LOG.info("part=%s case=%s alarm=%s last=%s", part, name, alarm, last)


def main() -> None:
    """Simulate the parts that are named and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    made_of = {
        "schema": SCHEMA,
        "measured": Path(MEASURED).name,
        "settings": asdict(CONFIG) | {"margin": MARGIN},
    }
    held = read_json(OUTPUT) if OUTPUT.exists() else {}
    is_same = all(held.get(key) == value for key, value in made_of.items())
    report = (held if is_same else made_of) | {"provenance": provenance.collect(0)}
    until = time.monotonic() + 60 * given.minutes
    simulate(report, given.parts or list(PARTS), until=until)
    write_json(OUTPUT, report)


if __name__ == "__main__":
    main()
