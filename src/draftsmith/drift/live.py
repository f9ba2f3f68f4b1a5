"""The live verdict, from not enough requests to draft decay.

Requests are judged by stratum, that is by temperature and domain, each against the rate that was
registered for it. Decay needs three things: a sequential detector signalled a drop, the newest
requests lie below the registered rate beyond chance and by more than the margin, and so do as many
requests just before them. The last makes a verdict that is asked for again and again err seldom.
Only requests like the usual ones count: other prompt lengths are weighed out, and a request whose
domain nobody named is held against the lowest registered rate, below which no mix of those domains
falls. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from draftsmith.drift import traffic
from draftsmith.drift.comparison import holm
from draftsmith.drift.live_change import detectable_drop
from draftsmith.drift.live_reference import Registered
from draftsmith.drift.live_sampling import blind_reasons, has_reference, unregistered
from draftsmith.drift.live_strata import (
    NO_REFERENCE,
    OTHER_PAIR,
    Judged,
    judge_stratum,
    strata_of,
    windows,
)
from draftsmith.drift.live_wording import (
    decay_sentence,
    harder_mixes,
    idle_reasons,
    notes_of,
    quiet_reason,
    shift_reasons,
    strange_domains,
)
from draftsmith.drift.settings import MonitorConfig
from draftsmith.drift.telemetry import ServedRequest

Verdict = Literal[
    "not enough requests",
    "ok",
    "traffic shift",
    "engine change",
    "no reference",
    "draft decay",
]
# From the least to the most urgent.
VERDICTS: tuple[Verdict, ...] = (
    "not enough requests",
    "ok",
    "traffic shift",
    "engine change",
    "no reference",
    "draft decay",
)


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
        `verdict`, `reasons` and `notes` in words, and the figures behind them. Plain values.
    """
    ordered = sorted(requests, key=lambda request: request.moment)
    own = [request for request in ordered if request.pair_digest == pair_digest]
    known = [request for request in own if has_reference(request, rates)]
    kept = [request for request in known if request.has_drafted]
    left_out = {
        OTHER_PAIR: len(ordered) - len(own),
        NO_REFERENCE: len(own) - len(known),
        traffic.NOTHING_DRAFTED: len(known) - len(kept),
    }
    strata = [s for s in strata_of(kept, rates) if windows(s.requests, config)]
    judged = [judge_stratum(s, rates[s.temperature], config, margin) for s in strata]
    figures, reasons = _verdicts(judged, config, margin)
    shifts = _shifts(known, kept, config)
    reasons |= _softer_findings(judged, shifts, config, margin)
    reasons["no reference"] = blind_reasons(own, rates, config)
    found: list[Verdict] = [name for name in VERDICTS if reasons.get(name)]
    is_judged = any(item.change is not None for item in judged)
    verdict = found[-1] if found else "ok" if is_judged else "not enough requests"
    return {
        "verdict": verdict,
        "reasons": [sentence for name in reversed(found) for sentence in reasons[name]]
        or [quiet_reason(verdict, len(kept), config)],
        "notes": [*notes_of(left_out, judged, rates), *strange_domains(kept, rates)],
        "pair_digest": pair_digest,
        "num_requests": len(kept),
        "left_out": left_out,
        "without_reference": unregistered(own, rates),
        "strata": figures,
        "shifts": {name: asdict(shift) for name, shift in shifts.items()},
    }


def _verdicts(
    judged: Sequence[Judged], config: MonitorConfig, margin: float
) -> tuple[list[dict[str, Any]], dict[Verdict, list[str]]]:
    """The figures of each stratum, and a sentence for each that decayed."""
    # Both windows must show it, so the larger p value counts.
    p_values = [max(c.p_value for c in item.changes) for item in judged if item.changes]
    adjusted = iter(holm(p_values))
    level = 1 - config.confidence
    figures, sentences = [], []
    for item in judged:
        entry: dict[str, Any] = {
            "temperature": item.stratum.temperature,
            "domain": item.stratum.domain,
            "num_requests": len(item.stratum.requests),
            "signal": asdict(item.signal),
            "change": None,
            "earlier": None,
            "decayed": False,
        }
        if item.change is not None and item.earlier is not None:
            p_adjusted = next(adjusted)
            drop = detectable_drop(item.change, margin=margin, level=level / len(p_values))
            is_low = p_adjusted < level and all(c.change < -margin for c in item.changes)
            entry |= {
                "change": asdict(item.change),
                "earlier": asdict(item.earlier),
                "p_adjusted": p_adjusted,
                "detectable_drop": drop,
                "decayed": is_low and item.signal.is_given,
            }
        if entry["decayed"]:
            sentences.append(decay_sentence(item, config))
        figures.append(entry)
    return figures, {"draft decay": sentences}


def _softer_findings(
    judged: Sequence[Judged],
    shifts: Mapping[str, traffic.Shift],
    config: MonitorConfig,
    margin: float,
) -> dict[Verdict, list[str]]:
    """A sentence for each change that is not the draft's, by verdict."""
    return {
        "engine change": shift_reasons(shifts, ["draft length"]) + idle_reasons(shifts),
        "traffic shift": shift_reasons(shifts, ["domain", "prompt length"])
        + harder_mixes(judged, config, margin),
    }


def _shifts(
    known: Sequence[ServedRequest], kept: Sequence[ServedRequest], config: MonitorConfig
) -> dict[str, traffic.Shift]:
    """Oldest against newest of all requests, and of those that drafted; none where too few."""
    level, shifts = config.confidence, {}
    if sides := windows(known, config):
        old, new = sides
        size = config.traffic_shift
        shifts["domain"] = traffic.mix_shift(
            traffic.domains(old), traffic.domains(new), confidence=level, size=size
        )
        shifts["prompt length"] = traffic.rank_shift(
            traffic.prompt_lengths(old), traffic.prompt_lengths(new), confidence=level, size=size
        )
        shifts["idle draft"] = traffic.rise(
            traffic.NOTHING_DRAFTED,
            traffic.drafting(old),
            traffic.drafting(new),
            confidence=level,
            size=config.engine_shift,
        )
    if sides := windows(kept, config):
        shifts["draft length"] = traffic.mix_shift(
            *map(traffic.draft_lengths, sides), confidence=level, size=config.engine_shift
        )
    return shifts
