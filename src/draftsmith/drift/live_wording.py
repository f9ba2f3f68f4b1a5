"""The sentences of the live verdict: every one carries the numbers that it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from draftsmith.drift import traffic
from draftsmith.drift.live_reference import Registered
from draftsmith.drift.live_strata import (
    NO_REFERENCE,
    OTHER_PAIR,
    Judged,
)
from draftsmith.drift.settings import MonitorConfig, temperature_key
from draftsmith.drift.telemetry import ServedRequest


def decay_sentence(judged: Judged, config: MonitorConfig) -> str:
    """Where and how far a stratum fell, and who signalled it."""
    stratum, signal, (change, earlier) = judged.stratum, judged.signal, judged.changes
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
        f"{change.high:+.3f}), and it was {earlier.survival:.3f} for the {earlier.num_requests} "
        f"before them; signalled by {' and by '.join(signals)} of {len(stratum.requests)}."
    )


def shift_reasons(shifts: Mapping[str, traffic.Shift], names: Sequence[str]) -> list[str]:
    """A sentence for each of the named shifts that was found."""
    return [
        f"The {name}s changed from {shift.before} to {shift.after} between the oldest and the "
        f"newest requests (size {shift.size:.2f}, p {shift.p_value:.2g})."
        for name in names
        if (shift := shifts.get(name)) is not None and shift.found
    ]


def idle_reasons(shifts: Mapping[str, traffic.Shift]) -> list[str]:
    """A sentence where more requests than before were answered without the draft."""
    shift = shifts.get("idle draft")
    if shift is None or not shift.found:
        return []
    return [
        f"More requests are answered without the draft: {shift.before} among the oldest, "
        f"{shift.after} among the newest (size {shift.size:.2f}, p {shift.p_value:.2g}). The "
        "engine stopped drafting, or copies took its place; such requests do not show how good "
        "the draft is."
    ]


def harder_mixes(judged: Sequence[Judged], config: MonitorConfig, margin: float) -> list[str]:
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


def quiet_reason(verdict: str, num_requests: int, config: MonitorConfig) -> str:
    """Why there is nothing to report."""
    if verdict == "ok":
        return f"No stratum of {num_requests} requests lies below its registered rate."
    return (
        f"{num_requests} requests could be judged, but no stratum has {config.min_requests} old "
        f"and {config.min_requests} new ones that are alike."
    )


def notes_of(
    left_out: Mapping[str, int],
    judged: Sequence[Judged],
    rates: Mapping[str, Registered],
) -> list[str]:
    """What a reader must know to read the verdict rightly."""
    causes = {
        OTHER_PAIR: "belong to another pair",
        NO_REFERENCE: f"were not sampled at temperature {' or '.join(sorted(rates))} alone",
        traffic.NOTHING_DRAFTED: "were answered without drafts",
    }
    notes = [
        f"{left_out[cause]} requests {words} and are left out."
        for cause, words in causes.items()
        if left_out[cause]
    ]
    notes += [
        f"At {item.stratum.name}, too few of the newest requests resemble the oldest in prompt "
        "length, so decay cannot be told from the change of traffic."
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


def strange_domains(
    requests: Sequence[ServedRequest], rates: Mapping[str, Registered]
) -> list[str]:
    """A sentence about requests whose domain has no registered rate, if there are any."""
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
        f"{counts.total()} requests are of domains without a registered rate ({names}) and count "
        "for shifts of traffic only. Add such prompts to corpus.sources."
    ]
