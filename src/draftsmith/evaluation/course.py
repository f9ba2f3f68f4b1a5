"""How a batch goes through the engine: who joins when, and how many rounds each row takes.

Requests that arrive together are neither read together, because the engine reads so many positions
a step and decodes in between, nor done together, because acceptance differs from text to text. So a
batch grows and shrinks, and few rows at its end still pay for whole rounds. Pure arithmetic.

Source: Blom 1958, normal scores; the excess of a renewal process over a level.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from draftsmith.decoding.admission import PREFILL_CHUNK

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples mix slow and fast rows


@dataclass(frozen=True)
class Reading:
    """How the engine reads prompts of one length.

    Attributes:
        together: Prompts that are read in one forward.
        pieces: Steps that a forward's prompts are spread over; more than one for long ones.
    """

    together: int
    pieces: int

    @classmethod
    def of(cls, rows: int, num_tokens: int, chunk: int = PREFILL_CHUNK) -> Reading:
        """Of `rows` prompts of `num_tokens` tokens; the last token of a prompt is not read.

        Example: at a chunk of 512, prompts of 201 tokens go two at a time, one of 601 in two
        pieces.
        """
        num_read = max(num_tokens - 1, 1)
        if num_read > chunk:
            return cls(1, math.ceil(num_read / chunk))
        return cls(min(rows, chunk // num_read), 1)

    def joining_steps(self, rows: int) -> list[int]:
        """The step of the engine, from 0, in which each row decodes its first round.

        Example: two at a time, four rows join at 0, 0, 1, 1; one in two pieces at 1, 3, 5, 7.
        """
        return [(row // self.together + 1) * self.pieces - 1 for row in range(rows)]


@dataclass(frozen=True)
class RoundLaw:
    """The tokens of a row's round.

    Attributes:
        mean: Expected.
        variance: Of them.
        most: Of a round in which everything is accepted.
        spread: How far texts differ: the standard deviation of their accepted tokens a round, as a
            share of the mean.
    """

    mean: float
    variance: float
    most: int
    spread: float

    def rounds(self, new_tokens: int, rows: int) -> list[float]:
        """Rounds that each of a batch's rows takes for so many tokens.

        The last round may find more than is wanted, which is no gain. Rows stand for the
        quantiles of their number, in a mixed order.
        """
        excess = (self.variance + self.mean**2) / (2 * self.mean) - 0.5
        middle = (new_tokens + excess) / self.mean
        between = self.spread * (self.mean - 1) / self.mean
        within = math.sqrt(self.variance / (self.mean * new_tokens))
        width = math.hypot(between, within)
        least = max(1.0, new_tokens / self.most)
        return [
            min(max(middle * (1 + width * score), least), float(new_tokens))
            for score in _scores(rows)
        ]


@functools.cache
def _scores(rows: int) -> tuple[float, ...]:
    """Expected order statistics of so many normal draws, mixed."""
    ordered = [NormalDist().inv_cdf((row + 0.625) / (rows + 0.25)) for row in range(rows)]
    mixed = sorted(range(rows), key=lambda row: row * _GOLDEN % 1)
    return tuple(ordered[row] for row in mixed)


@dataclass(frozen=True)
class Stretch:
    """All rounds of a batch in which so many rows are in flight.

    Attributes:
        rows: How many.
        rounds: Number of rounds.
        progress: Mean share of the answers that stands by then.
    """

    rows: int
    rounds: float
    progress: float


def course(joined: Sequence[int], rounds: Sequence[float]) -> list[Stretch]:
    """A batch's rounds by rows in flight.

    Args:
        joined: Step of each row's first round.
        rounds: Rounds that each row takes.

    Example: rows that join at 0 and 1 and take 2 rounds each are alone in one round at each end.
    """
    lives = [(start, start + count) for start, count in zip(joined, rounds, strict=True)]
    found: dict[int, tuple[float, float]] = {}
    for begin, end in itertools.pairwise(sorted({place for life in lives for place in life})):
        alive = [life for life in lives if life[0] <= begin and end <= life[1]]
        if not alive:
            continue  # nobody is in flight while the next prompt is read
        middle = (begin + end) / 2
        progress = sum((middle - first) / (last - first) for first, last in alive) / len(alive)
        total, weighted = found.get(len(alive), (0.0, 0.0))
        found[len(alive)] = (total + end - begin, weighted + (end - begin) * progress)
    return [Stretch(rows, total, weight / total) for rows, (total, weight) in found.items()]
