"""How many tokens a round drafts: always the same, or what pays for this batch and context now.

A choice is made before anything of the round is sampled, from costs that were measured elsewhere
and from the acceptance of earlier rounds, so the output keeps the target's law. Knows no clock.

Source: Leviathan et al. 2023, theorem 3.8, with acceptance by position and costs by batch and
context in place of constants.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_MEMORY = 200.0  # draws that an estimate remembers: about 8 rounds of a batch of 24
_PRIOR_WEIGHT = 8.0
_LEAST_GAIN = 1.02  # another length must promise so much more, or the choice would flutter
_PROBE_ROUNDS = 64  # rounds without drafts teach nothing; one in so many drafts a token


class DraftLength(Protocol):
    """What the engine asks before and tells after each round."""

    max_length: int

    def choose(self, *, rows: int, context: int) -> int:
        """Tokens to draft, 0 to `max_length`, for so many rows, the longest of `context` tokens."""

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """The round is over: what each row drafted and how many of these were accepted."""


@dataclass(frozen=True)
class FixedLength:
    """The same length in every round."""

    max_length: int

    def choose(self, *, rows: int, context: int) -> int:  # noqa: ARG002  the protocol's
        """That length."""
        return self.max_length

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class RoundCosts:
    """Measured times of isolated forwards by batch and context; any unit, one for all.

    Attributes:
        rows: Measured batch sizes, ascending.
        contexts: Measured contexts in tokens, ascending.
        verify: By (rows, context): the target over 1, 2, ... positions.
        draft: By (rows, context): the draft over one position.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    verify: Mapping[tuple[int, int], Sequence[float]]
    draft: Mapping[tuple[int, int], float]

    def round_cost(self, draft_length: int, *, rows: int, context: int) -> float:
        """Time of a round, interpolated between the measured cells; constant beyond them."""
        total = 0.0
        for row, row_share in _bracket(self.rows, rows):
            for column, column_share in _bracket(self.contexts, context):
                cell = (row, column)
                cost = self.verify[cell][draft_length] + draft_length * self.draft[cell]
                total += row_share * column_share * cost
        return total


def _bracket(points: Sequence[int], value: int) -> list[tuple[int, float]]:
    """The measured points around a value and their shares; one where it lies outside or on one."""
    place = bisect.bisect_left(points, value)
    if place == len(points):
        return [(points[-1], 1.0)]
    above = points[place]
    if place == 0 or above == value:
        return [(above, 1.0)]
    below = points[place - 1]
    share = (value - below) / (above - below)
    return [(below, 1.0 - share), (above, share)]


class AdaptiveLength:
    """The length with the most expected tokens over the cost of the round.

    Args:
        costs: Measured up to `max_length + 1` positions.
        max_length: Longest length.
        prior: Conditional acceptance by position that is believed before the first round; the last
            one stands for those behind it. What is learned of a position moves the belief in those
            behind it, which are drafted more rarely.
    """

    def __init__(self, costs: RoundCosts, max_length: int, prior: Sequence[float]) -> None:
        self.max_length = max_length
        self._costs = costs
        last = len(prior) - 1
        self._prior = [prior[min(place, last)] for place in range(max_length)]
        self._trials = [0.0] * max_length
        self._accepted = [0.0] * max_length
        self._current = 0
        self._idle_rounds = 0

    @property
    def conditional_acceptance(self) -> list[float]:
        """Current estimates by position."""
        estimates: list[float] = []
        shift = 1.0  # of the position before, against its prior
        for prior, accepted, trials in zip(self._prior, self._accepted, self._trials, strict=True):
            believed = min(1.0, prior * shift)
            estimates.append((accepted + _PRIOR_WEIGHT * believed) / (trials + _PRIOR_WEIGHT))
            shift = estimates[-1] / prior if prior > 0 else 1.0
        return estimates

    def choose(self, *, rows: int, context: int) -> int:
        """The best length for this batch and context; the current one unless another gains."""
        rates = self._rates(rows, context)
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] > rates[self._current] * _LEAST_GAIN:
            self._current = best
        self._idle_rounds = 0 if self._current else self._idle_rounds + 1
        if self._idle_rounds >= _PROBE_ROUNDS and self.max_length:
            self._idle_rounds = 0
            return 1
        return self._current

    def _rates(self, rows: int, context: int) -> list[float]:
        """Expected tokens of a row over the cost of the round, by length from 0."""
        expected, survival, rates = 1.0, 1.0, []
        for length, acceptance in enumerate([0.0, *self.conditional_acceptance]):
            if length:
                survival *= acceptance
                expected += survival
            rates.append(expected / self._costs.round_cost(length, rows=rows, context=context))
        return rates

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count acceptances by position; older draws fade."""
        for place in range(self.max_length):
            rounds = zip(drafted, accepted, strict=True)
            reached = [n for d, n in rounds if place < d and place <= n]
            if reached:
                kept = max(0.0, 1.0 - len(reached) / _MEMORY)
                self._trials[place] = self._trials[place] * kept + len(reached)
                self._accepted[place] = self._accepted[place] * kept + sum(
                    n > place for n in reached
                )
