"""How far the newest requests lie from the registered rate, with an honest error.

The estimate is a ratio of sums (accepted over drafted rounds), as the registered one is, and the
request is the unit of its error. The error of the reference counts too: it was measured on some
dozen prompts. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from draftsmith.drift.live_reference import Level
from draftsmith.drift.telemetry import ServedRequest

Vector = NDArray[np.float64]

_REACH = math.log(1.25)  # prompts are alike up to a quarter in length,
_SHORT_PROMPT = 16  # and a few tokens more or less do not matter
_FEWEST_ALIKE = 3
_SHARE_MET = 0.8
_FEWEST_COMPARABLE = 20


@dataclass(frozen=True)
class Change:
    """Live against registered first-position survival.

    Attributes:
        survival: Of the judged requests.
        registered: What their domains had when the pair was registered.
        change: `survival - registered`; negative is worse.
        low: Lower bound of the change.
        high: Upper bound of the change.
        p_value: One-sided, of a drop.
        error: Standard error of the change, of both sides.
        degrees: Degrees of freedom of that error (Welch and Satterthwaite).
        num_requests: Requests judged.
    """

    survival: float
    registered: float
    change: float
    low: float
    high: float
    p_value: float
    error: float
    degrees: float
    num_requests: int


def first_position(requests: Sequence[ServedRequest]) -> tuple[Vector, Vector]:
    """Rounds that accepted, and that drafted, the first position; each shape [num_requests]."""
    accepted = np.array([request.accepted[0] for request in requests], dtype=np.float64)
    drafted = np.array([request.drafted[0] for request in requests], dtype=np.float64)
    return accepted, drafted


def change_of(
    requests: Sequence[ServedRequest],
    levels: Sequence[Level],
    weights: Vector,
    *,
    confidence: float,
) -> Change:
    """Compare requests, each with the level of its domain.

    Args:
        requests: At least two; all drafted.
        levels: One a request; equal ones are the same measurement.
        weights: How much each request counts, shape [num_requests].
        confidence: Coverage of the interval.
    """
    accepted, drafted = first_position(requests)
    rates = np.array([level.survival for level in levels])
    rounds = float((weights * drafted).sum())
    registered = float((weights * drafted * rates).sum()) / rounds
    survival = float((weights * accepted).sum()) / rounds
    change = survival - registered
    residuals = weights * (accepted - (rates + change) * drafted)
    count = len(requests)
    parts = [(count / (count - 1) * float((residuals**2).sum()) / rounds**2, count - 1)]
    for level in set(levels):
        mask = np.array([other == level for other in levels])
        share = float((weights * drafted)[mask].sum()) / rounds
        parts.append(((share * level.error) ** 2, level.num_prompts - 1))
    variance = sum(part for part, _ in parts)
    degrees = variance**2 / sum(part**2 / free for part, free in parts)
    error = math.sqrt(variance)
    reach = float(stats.t.isf((1 - confidence) / 2, degrees)) * error
    return Change(
        survival=survival,
        registered=registered,
        change=change,
        low=change - reach,
        high=change + reach,
        p_value=float(stats.t.cdf(change / error, degrees)),
        error=error,
        degrees=degrees,
        num_requests=count,
    )


def detectable_drop(change: Change, *, margin: float, level: float) -> float:
    """The smallest drop that would be flagged with this error at a one-sided `level`."""
    return max(margin, float(stats.t.isf(level, change.degrees)) * change.error)


def comparable(
    newest: Sequence[ServedRequest], oldest: Sequence[ServedRequest]
) -> tuple[list[ServedRequest], Vector] | None:
    """The newest requests, weighted so that they are like the oldest ones.

    Every old request spreads one unit of weight over the new ones that have about its prompt
    length, so longer prompts do not look like a worse draft. Draft lengths need not agree: the
    first position is drafted and judged before the later ones, whatever their number.

    Returns:
        The new requests that any old one is like, and their weights; None where too few are.
    """
    is_alike = np.abs(np.subtract.outer(_log_length(oldest), _log_length(newest))) <= _REACH
    num_alike = is_alike.sum(axis=1)
    is_met = num_alike >= _FEWEST_ALIKE
    if is_met.mean() < _SHARE_MET:
        return None
    weights = (is_alike[is_met] / num_alike[is_met, None]).sum(axis=0)
    kept = weights.nonzero()[0]
    if len(kept) < _FEWEST_COMPARABLE:
        return None
    return [newest[place] for place in kept.tolist()], weights[kept]


def _log_length(requests: Sequence[ServedRequest]) -> Vector:
    return np.log([request.prompt_tokens + _SHORT_PROMPT for request in requests])


def levels_of(
    requests: Sequence[ServedRequest], levels: Mapping[str, Level], *, otherwise: str
) -> list[Level]:
    """The level of each request's domain; that of domain `otherwise` where it has none."""
    return [levels.get(request.domain or "", levels[otherwise]) for request in requests]
