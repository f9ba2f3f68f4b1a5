"""Requests whose sampling nothing was registered for: which they are, and whether they are most.

A rate holds for the temperature that it was measured at, and for no other parameter that shapes the
distribution. Clients choose both, so a service can be watched by nobody while its telemetry grows.
Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from draftsmith.drift.settings import MonitorConfig, temperature_key
from draftsmith.drift.telemetry import ServedRequest

_NAMED = 5  # clients may sample in any number of ways


def has_reference(request: ServedRequest, registered: Collection[str]) -> bool:
    """Whether its temperature is a registered one and nothing else shaped its distribution."""
    return not request.shaped_by and temperature_key(request.temperature) in registered


def unregistered(
    requests: Sequence[ServedRequest], registered: Collection[str]
) -> list[dict[str, Any]]:
    """How often each way of sampling came that has no reference, the most frequent first.

    Returns:
        For each `temperature`, a report key, `shaped_by` and `num_requests`.
    """
    counts = Counter(
        (temperature_key(request.temperature), request.shaped_by)
        for request in requests
        if not has_reference(request, registered)
    )
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [
        {"temperature": temperature, "shaped_by": list(shape), "num_requests": count}
        for (temperature, shape), count in ordered
    ]


def blind_reasons(
    requests: Sequence[ServedRequest], registered: Collection[str], config: MonitorConfig
) -> list[str]:
    """Sentences where most of the newest requests have no reference; none for a few requests.

    Args:
        requests: Of the monitored pair, in order of time.
        registered: The registered temperatures, report keys.
        config: Two windows of requests are looked at, and as many are needed as are judged.
    """
    newest = requests[-2 * config.window :]
    ways = unregistered(newest, registered)
    missing = sum(way["num_requests"] for way in ways)
    if len(newest) < 2 * config.min_requests or 2 * missing <= len(newest):
        return []
    named = [f"{way['num_requests']} at {_sampling(way)}" for way in ways[:_NAMED]]
    if rest := ways[_NAMED:]:
        named.append(f"{sum(way['num_requests'] for way in rest)} in {len(rest)} other ways")
    temperatures = " and ".join(sorted(registered, key=float))
    return [
        f"{missing} of the newest {len(newest)} requests have no registered rate to be held "
        f"against, so nobody would notice if their draft decayed: {', '.join(named)}. Registered "
        f"is temperature {temperatures}, with no other parameter that shapes the distribution.",
        *_remedies(ways[:_NAMED], registered),
    ]


def _sampling(way: Mapping[str, Any]) -> str:
    shape = f" with {' and '.join(way['shaped_by'])}" if way["shaped_by"] else ""
    return f"temperature {way['temperature']}{shape}"


def _remedies(ways: Sequence[Mapping[str, Any]], registered: Collection[str]) -> list[str]:
    new = {way["temperature"] for way in ways if not way["shaped_by"]} - set(registered)
    shapes = {name for way in ways for name in way["shaped_by"]}
    remedies = []
    if new:
        remedies.append(
            f"To have a rate for them, add {' and '.join(sorted(new, key=float))} to "
            "corpus.eval_temperatures and evaluation.temperatures and run `dvc repro`."
        )
    if shapes:
        remedies.append(
            f"Nothing can be registered for requests that {' or '.join(sorted(shapes))} shaped: "
            "send some at a registered temperature alone."
        )
    return remedies
