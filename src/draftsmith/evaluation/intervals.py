"""Bootstrap intervals over prompts: how far a measured mean or ratio may be off.

The unit is the prompt, never the token: tokens of one response depend on each other, so
resampling them gives intervals that are far too narrow. Percentile bootstrap (Efron and
Tibshirani, 1993, chapter 13). With fewer than about 15 prompts it is a little too narrow; with
one prompt it has no width at all, so whoever decides on an interval also asks for a minimum
number of prompts. Knows numpy and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftsmith.errors import EvidenceError

NUM_RESAMPLES = 2000
_CHUNK_CELLS = 1 << 22

Seed = int | Sequence[int] | np.random.Generator


@dataclass(frozen=True)
class Estimate:
    """A mean or a ratio with the bounds of its interval.

    Attributes:
        mean: The value over all prompts (a ratio of sums where the quantity is a ratio).
        low: Lower bound.
        high: Upper bound.
        num_prompts: How many prompts were measured.
    """

    mean: float
    low: float
    high: float
    num_prompts: int


def bootstrap_mean(
    values: ArrayLike,
    *,
    seed: Seed,
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
) -> Estimate:
    """Mean of one value a prompt.

    Args:
        values: Shape [num_prompts].
        seed: A seed, or a generator that is advanced.
        confidence: Coverage of the interval, in (0, 1).
        num_resamples: How often the prompts are drawn again.

    Raises:
        EvidenceError: No values, or one that is not finite.
    """
    column = _column(values, "values")
    sums = _resampled_sums(column[:, None], seed=seed, num_resamples=num_resamples)[:, 0]
    return _estimate(
        float(column.mean()), sums / len(column), confidence=confidence, num_prompts=len(column)
    )


def bootstrap_ratio_of_sums(
    numerators: ArrayLike,
    denominators: ArrayLike,
    *,
    seed: Seed,
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
) -> Estimate:
    """sum(numerators) / sum(denominators), both drawn again by prompt and together.

    Fits tokens per forward, tokens per second, and the speedup of two arms that ran the same
    prompts. An average of ratios would let a prompt of five tokens weigh as much as one of five
    hundred.

    Args:
        numerators: Shape [num_prompts].
        denominators: Shape [num_prompts], not negative.
        seed: A seed, or a generator that is advanced.
        confidence: Coverage of the interval, in (0, 1).
        num_resamples: How often the prompts are drawn again.

    Raises:
        EvidenceError: No values, unequal lengths, a value that is not finite, or a denominator
            that is negative or sums to zero.
    """
    upper, lower = _column(numerators, "numerators"), _column(denominators, "denominators")
    if len(upper) != len(lower):
        raise _unusable(
            "pairing numerators with denominators", f"{len(upper)} and {len(lower)} values"
        )
    if (lower < 0).any() or lower.sum() == 0:
        raise _unusable("dividing by the denominators", "a negative one, or a sum of zero")
    sums = _resampled_sums(np.stack([upper, lower], axis=1), seed=seed, num_resamples=num_resamples)
    sums = sums[sums[:, 1] > 0]
    mean = float(upper.sum() / lower.sum())
    ratios = sums[:, 0] / sums[:, 1] if len(sums) else np.array([mean])
    return _estimate(mean, ratios, confidence=confidence, num_prompts=len(upper))


def _chunk_sizes(num_rows: int, num_columns: int) -> Iterator[int]:
    """Row counts that add up to `num_rows`, each small enough to hold [rows, columns] in memory."""
    size = max(1, _CHUNK_CELLS // max(1, num_columns))
    for start in range(0, num_rows, size):
        yield min(size, num_rows - start)


def _column(values: ArrayLike, name: str) -> NDArray[np.float64]:
    column = np.asarray(values, dtype=np.float64)
    if column.ndim != 1 or column.size == 0:
        raise _unusable(f"averaging {name} over prompts", f"an array of shape {list(column.shape)}")
    if not np.isfinite(column).all():
        count = int((~np.isfinite(column)).sum())
        raise _unusable(f"averaging {name} over prompts", f"{count} that are not finite")
    return column


def _resampled_sums(
    columns: NDArray[np.float64], *, seed: Seed, num_resamples: int
) -> NDArray[np.float64]:
    """Sums [num_resamples, k] over n rows of `columns` [n, k], drawn with replacement each time."""
    rng = np.random.default_rng(seed)
    num_rows = len(columns)
    chunks = [
        columns[rng.integers(0, num_rows, size=(size, num_rows))].sum(axis=1)
        for size in _chunk_sizes(num_resamples, columns.size)
    ]
    return np.concatenate(chunks)


def _estimate(
    mean: float, resampled: NDArray[np.float64], *, confidence: float, num_prompts: int
) -> Estimate:
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(mean=mean, low=float(low), high=float(high), num_prompts=num_prompts)


def _unusable(what: str, found: str) -> EvidenceError:
    return EvidenceError(
        what,
        found=found,
        expected="one finite value for every prompt, and at least one prompt",
        remedy="look for prompts whose response is empty, then measure again",
    )
