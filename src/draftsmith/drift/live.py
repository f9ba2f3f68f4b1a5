"""The live verdict: draft decay, engine change, traffic shift, ok, or not enough requests.

Requests are judged by stratum, that is by temperature and domain, each against the rate that was
registered for it. Decay needs three things: a sequential detector signalled a drop, the newest
requests lie below the registered rate beyond chance, and by more than the margin. Only requests
like the usual ones count: other prompt lengths are weighed out, and a request whose domain nobody
named is held against the lowest registered rate, below which no mix of those domains falls. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from draftsmith.drift import traffic
from draftsmith.drift.comparison import holm
from draftsmith.drift.detectors import Signal, signal_of_drop
from draftsmith.drift.live_change import (
    Change,
    change_of,
    comparable,
    detectable_drop,
    first_position,
    levels_of,
)
from draftsmith.drift.live_reference import Registered
from draftsmith.drift.settings import MonitorConfig, temperature_key
from draftsmith.drift.telemetry import ServedRequest

Verdict = Literal["not enough requests", "ok", "traffic shift", "engine change", "draft decay"]
# From the least to the most urgent.
VERDICTS: tuple[Verdict, ...] = (
    "not enough requests",
    "ok",
    "traffic shift",
    "engine change",
    "draft decay",
)
ALL_DOMAINS = "all domains"
OTHER_PAIR, NO_REFERENCE, NOTHING_DRAFTED = "other pair", "no reference", "nothing drafted"


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
        change: Against the rates of the requests' domains, the lowest one for a domain not known.
        mean_change: Against the rate over all domains, where no domain is known.
    """

    stratum: Stratum
    signal: Signal
    change: Change | None = None
    mean_change: Change | None = None


def judge_live(
    requests: Iterable[ServedRequest],
    rates: Mapping[str, Registered],
    *,
    pair_digest: str,
    config: MonitorConfig,
    margin: float,
) -> dict[str, Any]:
    """The verdict on telemetry, with its evidence.

    Args:
        requests: Any order, of any pair.
        rates: The registered rates of the pair by temperature.
        pair_digest: The pair that is monitored; requests of others are counted and left out.
        config: Windows, levels and sizes.
        margin: Drop of first-position survival that matters, absolute.

    Returns:
        `verdict`, `reasons` and `notes` in words; `num_requests`, `left_out`, `strata` and `shifts`
        as figures. Plain values.
    """
    ordered = sorted(requests, key=lambda request: request.moment)
    kept, left_out = _sorted_out(ordered, rates, pair_digest)
    strata = [s for s in _strata(kept, rates) if _windows(s.requests, config)]
    judged = [_judge(s, rates[s.temperature], config, margin) for s in strata]
    figures, reasons = _verdicts(judged, config, margin)
    shifts = _shifts(kept, config)
    reasons |= {
        "engine change": _shift_reasons(shifts, ["draft length"]),
        "traffic shift": _shift_reasons(shifts, ["domain", "prompt length"])
        + _harder_mixes(judged, config, margin),
    }
    found: list[Verdict] = [name for name in VERDICTS if reasons.get(name)]
    is_judged = any(item.change is not None for item in judged)
    verdict = found[-1] if found else "ok" if is_judged else "not enough requests"
    return {
        "verdict": verdict,
        "reasons": [sentence for name in reversed(found) for sentence in reasons[name]]
        or [_quiet_reason(verdict, len(kept), config)],
        "notes": _notes(left_out, judged, rates) + _strange_domains(kept, rates),
        "pair_digest": pair_digest,
        "num_requests": len(kept),
        "left_out": left_out,
        "strata": figures,
        "shifts": {name: asdict(shift) for name, shift in shifts.items()},
    }


def _windows(
    requests: Sequence[ServedRequest], config: MonitorConfig
) -> list[Sequence[ServedRequest]]:
    """The oldest and the newest requests, none in both; empty when there are too few."""
    span = min(config.window, len(requests) // 2)
    return [requests[:span], requests[-span:]] if span >= config.min_requests else []


def _sorted_out(
    requests: Sequence[ServedRequest], rates: Mapping[str, Registered], pair_digest: str
) -> tuple[list[ServedRequest], dict[str, int]]:
    """Requests that can be judged, and how many cannot, by reason."""
    kept, left_out = [], Counter({OTHER_PAIR: 0, NO_REFERENCE: 0, NOTHING_DRAFTED: 0})
    for request in requests:
        if request.pair_digest != pair_digest:
            left_out[OTHER_PAIR] += 1
        elif request.shaped_by or temperature_key(request.temperature) not in rates:
            left_out[NO_REFERENCE] += 1
        elif not request.drafted or request.drafted[0] == 0:
            left_out[NOTHING_DRAFTED] += 1
        else:
            kept.append(request)
    return kept, dict(left_out)


def _strata(requests: Sequence[ServedRequest], rates: Mapping[str, Registered]) -> list[Stratum]:
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


def _judge(
    stratum: Stratum, registered: Registered, config: MonitorConfig, margin: float
) -> Judged:
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
    oldest, newest = _windows(requests, config)
    chosen = comparable(newest, oldest)
    if chosen is None:
        return Judged(stratum, signal)
    kept, weights = chosen
    known = levels_of(kept, registered.levels, otherwise=registered.lowest)
    change = change_of(kept, known, weights, confidence=config.confidence)
    if is_known:
        return Judged(stratum, signal, change)
    overall = [registered.pooled] * len(kept)
    mean_change = change_of(kept, overall, weights, confidence=config.confidence)
    return Judged(stratum, signal, change, mean_change)


def _baseline(domain: str, registered: Registered) -> list[float]:
    """What deviations from the registered rate were among the eval prompts."""
    if domain in registered.deviations:
        return list(registered.deviations[domain])
    return [value for values in registered.deviations.values() for value in values]


def _verdicts(
    judged: Sequence[Judged], config: MonitorConfig, margin: float
) -> tuple[list[dict[str, Any]], dict[Verdict, list[str]]]:
    """The figures of each stratum, and a sentence for each that decayed."""
    changes = [item.change for item in judged if item.change is not None]
    adjusted = iter(holm([change.p_value for change in changes]))
    level = 1 - config.confidence
    figures, sentences = [], []
    for item in judged:
        entry: dict[str, Any] = {
            "temperature": item.stratum.temperature,
            "domain": item.stratum.domain,
            "num_requests": len(item.stratum.requests),
            "signal": asdict(item.signal),
            "change": None,
            "decayed": False,
        }
        if item.change is not None:
            p_adjusted = next(adjusted)
            drop = detectable_drop(item.change, margin=margin, level=level / len(changes))
            is_low = p_adjusted < level and item.change.change < -margin
            entry |= {
                "change": asdict(item.change),
                "p_adjusted": p_adjusted,
                "detectable_drop": drop,
                "decayed": is_low and item.signal.is_given,
            }
        if entry["decayed"] and item.change is not None:
            sentences.append(_decay_sentence(item.stratum, item.change, item.signal, config))
        figures.append(entry)
    return figures, {"draft decay": sentences}


def _decay_sentence(stratum: Stratum, change: Change, signal: Signal, config: MonitorConfig) -> str:
    signals = [
        f"{name} from request {index + 1}"
        for name, index in (("Page-Hinkley", signal.page_hinkley), ("ADWIN", signal.adwin))
        if index is not None
    ]
    against = "the lowest registered" if stratum.domain == traffic.UNLABELLED else "the registered"
    return (
        f"At {stratum.name}, first-position survival of the newest {change.num_requests} requests "
        f"is {change.survival:.3f} against {against} {change.registered:.3f}, a change of "
        f"{change.change:+.3f} ({config.confidence:.0%} interval {change.low:+.3f} to "
        f"{change.high:+.3f}); signalled by {' and by '.join(signals)} of "
        f"{len(stratum.requests)}."
    )


def _shifts(requests: Sequence[ServedRequest], config: MonitorConfig) -> dict[str, traffic.Shift]:
    """Oldest against newest requests; empty when there are too few for two windows."""
    if not (windows := _windows(requests, config)):
        return {}
    old, new = windows
    level = config.confidence
    return {
        "domain": traffic.mix_shift(
            traffic.domains(old), traffic.domains(new), confidence=level, size=config.traffic_shift
        ),
        "prompt length": traffic.rank_shift(
            traffic.prompt_lengths(old),
            traffic.prompt_lengths(new),
            confidence=level,
            size=config.traffic_shift,
        ),
        "draft length": traffic.mix_shift(
            traffic.draft_lengths(old),
            traffic.draft_lengths(new),
            confidence=level,
            size=config.engine_shift,
        ),
    }


def _shift_reasons(shifts: Mapping[str, traffic.Shift], names: Sequence[str]) -> list[str]:
    return [
        f"The {name}s changed from {shift.before} to {shift.after} between the oldest and the "
        f"newest requests (size {shift.size:.2f}, p {shift.p_value:.2g})."
        for name in names
        if (shift := shifts.get(name)) is not None and shift.found
    ]


def _harder_mixes(judged: Sequence[Judged], config: MonitorConfig, margin: float) -> list[str]:
    """A sentence for requests of no known domain that fell, but not below every domain."""
    return [
        f"At {item.stratum.name}, first-position survival of the newest "
        f"{item.mean_change.num_requests} requests is {item.mean_change.survival:.3f} against "
        f"{item.mean_change.registered:.3f} over all eval prompts: a mix of harder domains than "
        "theirs, or a draft that decayed. Label the requests to tell."
        for item in judged
        if item.mean_change is not None
        and item.signal.is_given
        and item.mean_change.p_value < 1 - config.confidence
        and item.mean_change.change < -margin
    ]


def _quiet_reason(verdict: Verdict, num_requests: int, config: MonitorConfig) -> str:
    if verdict == "ok":
        return f"No stratum of {num_requests} requests lies below its registered rate."
    return (
        f"{num_requests} requests could be judged, but no stratum has {config.min_requests} old "
        f"and {config.min_requests} new ones that are alike."
    )


def _notes(
    left_out: Mapping[str, int],
    judged: Sequence[Judged],
    rates: Mapping[str, Registered],
) -> list[str]:
    """What a reader must know to read the verdict rightly."""
    causes = {
        OTHER_PAIR: "belong to another pair",
        NO_REFERENCE: f"were not sampled at temperature {' or '.join(sorted(rates))} alone",
        NOTHING_DRAFTED: "were answered without drafts",
    }
    notes = [
        f"{left_out[cause]} requests {words} and are left out."
        for cause, words in causes.items()
        if left_out[cause]
    ]
    notes += [
        f"At {item.stratum.name}, too few of the newest requests resemble the oldest in prompt and "
        "draft length, so decay cannot be told from the change of traffic or engine."
        for item in judged
        if item.change is None
    ]
    if any(item.stratum.domain == traffic.UNLABELLED for item in judged):
        notes.append(
            "Requests without a domain are held against the lowest registered rate; label them for "
            "a sharper test."
        )
    if any(registered.is_alpha for registered in rates.values()):
        notes.append("The version's record has no survival by domain; alpha stands in for it.")
    return notes


def _strange_domains(
    requests: Sequence[ServedRequest], rates: Mapping[str, Registered]
) -> list[str]:
    counts = Counter(
        request.domain
        for request in requests
        if request.domain is not None
        and request.domain not in rates[temperature_key(request.temperature)].levels
    )
    if not counts:
        return []
    names = ", ".join(sorted(counts))
    return [
        f"{counts.total()} requests are of domains without a registered rate ({names}): only shifts "
        "of traffic are judged by them. Add such prompts to corpus.sources."
    ]
