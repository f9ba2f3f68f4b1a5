"""Live requests by stratum (temperature and domain), each against what was registered for it.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftsmith.drift import traffic
from draftsmith.drift.detectors import Signal, signal_of_drop
from draftsmith.drift.live_change import (
    Change,
    Vector,
    change_of,
    comparable,
    first_position,
    levels_of,
)
from draftsmith.drift.live_reference import Registered
from draftsmith.drift.settings import MonitorConfig, temperature_key
from draftsmith.drift.telemetry import ServedRequest

ALL_DOMAINS = "all domains"
OTHER_PAIR, NO_REFERENCE = "other pair", "no reference"


@dataclass(frozen=True)
class Stratum:
    """Requests that are judged together.

    Attributes:
        temperature: A report key.
        domain: A registered domain, `ALL_DOMAINS`, or `traffic.UNLABELLED`.
        requests: In order of time.
    """

    temperature: str
    domain: str
    requests: list[ServedRequest]

    @property
    def name(self) -> str:
        """How sentences name it."""
        domain = self.domain
        if domain not in (ALL_DOMAINS, traffic.UNLABELLED):
            domain = f"domain {domain}"
        return f"temperature {self.temperature}, {domain}"


@dataclass(frozen=True)
class Judged:
    """A stratum with what was found; without changes where its requests are not comparable.

    Attributes:
        change: Of the newest requests against the rates of their domains, the lowest one for a
            domain not known.
        earlier: The same of as many requests just before them.
        mean_change: Of the newest against the rate over all domains, where no domain is known.
    """

    stratum: Stratum
    signal: Signal
    change: Change | None = None
    earlier: Change | None = None
    mean_change: Change | None = None

    @property
    def changes(self) -> list[Change]:
        """What must all show a decay; empty where the requests are not comparable."""
        return [change for change in (self.change, self.earlier) if change is not None]


def strata_of(requests: Sequence[ServedRequest], rates: Mapping[str, Registered]) -> list[Stratum]:
    """Requests by temperature and domain; those of a domain that has no rate are in none."""
    groups: dict[tuple[str, str], list[ServedRequest]] = {}
    for request in requests:
        key = temperature_key(request.temperature)
        if request.domain is None:
            groups.setdefault((key, traffic.UNLABELLED), []).append(request)
        elif request.domain in rates[key].levels:
            groups.setdefault((key, request.domain), []).append(request)
            groups.setdefault((key, ALL_DOMAINS), []).append(request)
    sizes = Counter(
        key for key, domain in groups if domain not in (ALL_DOMAINS, traffic.UNLABELLED)
    )
    return [
        Stratum(key, domain, members)
        for (key, domain), members in sorted(groups.items())
        if domain != ALL_DOMAINS or sizes[key] > 1
    ]


def windows(
    requests: Sequence[ServedRequest], config: MonitorConfig
) -> list[Sequence[ServedRequest]]:
    """The oldest requests, and the newest, none in both; empty when there are too few."""
    span = min(config.window, len(requests) // 2)
    return [requests[:span], requests[-span:]] if span >= config.min_requests else []


def judge_stratum(
    stratum: Stratum, registered: Registered, config: MonitorConfig, margin: float
) -> Judged:
    """Run the detectors over a stratum, and compare its newest requests with its rates."""
    requests = stratum.requests
    is_known = stratum.domain != traffic.UNLABELLED
    overall = [registered.pooled] * len(requests)
    known = levels_of(requests, registered.levels, otherwise=registered.lowest)
    accepted, drafted = first_position(requests)
    signal = signal_of_drop(
        accepted / drafted - [level.survival for level in (known if is_known else overall)],
        _baseline(stratum.domain, registered),
        margin=margin,
        requests_per_false_signal=config.requests_per_false_signal,
    )
    oldest, newest = windows(requests, config)
    chosen = comparable(newest, oldest)
    chosen_before = comparable(requests[-2 * len(newest) : -len(newest)], oldest)
    if chosen is None or chosen_before is None:
        return Judged(stratum, signal)
    judged = Judged(
        stratum,
        signal,
        change=_against_domains(*chosen, registered, config.confidence),
        earlier=_against_domains(*chosen_before, registered, config.confidence),
    )
    if is_known:
        return judged
    kept, weights = chosen
    overall = [registered.pooled] * len(kept)
    mean_change = change_of(kept, overall, weights, confidence=config.confidence)
    return dataclasses.replace(judged, mean_change=mean_change)


def _against_domains(
    requests: Sequence[ServedRequest], weights: Vector, registered: Registered, confidence: float
) -> Change:
    known = levels_of(requests, registered.levels, otherwise=registered.lowest)
    return change_of(requests, known, weights, confidence=confidence)


def _baseline(domain: str, registered: Registered) -> list[float]:
    """What deviations from the registered rate were among the eval prompts."""
    if domain in registered.deviations:
        return list(registered.deviations[domain])
    return [value for values in registered.deviations.values() for value in values]
