"""Has the traffic, or the engine, changed? Oldest requests of a stream against its newest.

A change must be both beyond chance and large: real traffic comes in bursts, so small p values alone
mean little. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from draftsmith.drift.telemetry import ServedRequest

_RARE = 10
_FEWEST_GROUPS = 2
UNLABELLED = "unlabelled"
NOTHING_DRAFTED = "nothing drafted"


@dataclass(frozen=True)
class Shift:
    """A difference between two windows.

    Attributes:
        size: Total variation of two mixes, or Cliff's delta of two samples; 0 to 1.
        p_value: Of no difference.
        before: The earlier window in words.
        after: The later window in words.
        found: Beyond chance and as large as asked.
    """

    size: float
    p_value: float
    before: str
    after: str
    found: bool


def mix_shift(
    before: Sequence[str], after: Sequence[str], *, confidence: float, size: float
) -> Shift:
    """Chi-square test of two mixes, rare categories taken together; size in total variation."""
    total = Counter(before) + Counter(after)
    names = sorted(name for name, count in total.items() if count >= _RARE)
    sides = [Counter(side) for side in (before, after)]
    table = np.array([[side[name] for name in names] for side in sides], dtype=np.float64)
    rest = np.array([[len(before)], [len(after)]]) - table.sum(axis=1, keepdims=True)
    if rest.sum() > 0:
        table = np.concatenate([table, rest], axis=1)
    shares = table / table.sum(axis=1, keepdims=True)
    variation = float(np.abs(shares[0] - shares[1]).sum()) / 2
    p_value = 1.0
    if table.shape[1] >= _FEWEST_GROUPS:
        p_value = float(stats.chi2_contingency(table, correction=False).pvalue)
    words = [
        ", ".join(f"{name} {side[name] / sum(side.values()):.0%}" for name in sorted(total))
        for side in sides
    ]
    found = p_value < 1 - confidence and variation >= size
    return Shift(variation, p_value, words[0], words[1], found)


def rise(
    name: str, before: Sequence[str], after: Sequence[str], *, confidence: float, size: float
) -> Shift:
    """Like `mix_shift`, but found only where the share of category `name` rose."""
    shift = mix_shift(before, after, confidence=confidence, size=size)
    has_risen = after.count(name) / len(after) > before.count(name) / len(before)
    return dataclasses.replace(shift, found=shift.found and has_risen)


def rank_shift(
    before: Sequence[float], after: Sequence[float], *, confidence: float, size: float
) -> Shift:
    """Mann and Whitney's test of two samples; size in Cliff's delta."""
    test = stats.mannwhitneyu(after, before, alternative="two-sided")
    delta = abs(2 * float(test.statistic) / (len(before) * len(after)) - 1)
    p_value = 1.0 if math.isnan(test.pvalue) else float(test.pvalue)  # all values are the same
    words = [f"median {float(np.median(side)):.0f}" for side in (before, after)]
    return Shift(delta, p_value, words[0], words[1], p_value < 1 - confidence and delta >= size)


def domains(requests: Sequence[ServedRequest]) -> list[str]:
    """The domain of each request, as categories."""
    return [request.domain or UNLABELLED for request in requests]


def drafting(requests: Sequence[ServedRequest]) -> list[str]:
    """Whether each request was answered with the draft's help, as categories."""
    return ["drafted" if request.has_drafted else NOTHING_DRAFTED for request in requests]


def draft_lengths(requests: Sequence[ServedRequest]) -> list[str]:
    """The usual draft length of each request, as categories."""
    return [str(request.usual_draft_length) for request in requests]


def prompt_lengths(requests: Sequence[ServedRequest]) -> list[float]:
    """Tokens of each prompt."""
    return [float(request.prompt_tokens) for request in requests]
