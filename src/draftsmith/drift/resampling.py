"""Interval and p value of a mean of paired differences; numpy only.

The p value is that of a sign-flip test (Fisher, 1935): it needs no normality and stays valid with
a handful of prompts, where a bootstrap p is too small. Apart from `evaluation.intervals` because
drift and evaluation do not import one another.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_NUM_RESAMPLES = 2000
_NUM_FLIPS = 4000
_CHUNK_CELLS = 1 << 22

Vector = NDArray[np.float64]


def mean_interval(differences: Vector, *, seed: int, confidence: float) -> tuple[float, float]:
    """Percentile bootstrap bounds of the mean.

    Args:
        differences: Shape [num_prompts].
        seed: Seed of the resampling.
        confidence: Coverage, in (0, 1).
    """
    rng = np.random.default_rng(seed)
    count = len(differences)
    means = [
        differences[rng.integers(0, count, size=(size, count))].mean(axis=1)
        for size in _chunk_sizes(_NUM_RESAMPLES, count)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def drop_p_value(differences: Vector, *, seed: int) -> float:
    """Chance of a mean at least this low when every difference is as likely to have the other sign.

    Args:
        differences: Shape [num_prompts].
        seed: Seed of the flips.

    Returns:
        One-sided p in (0, 1]; not below 1 / 4001, which leaves room to correct for many domains.
    """
    rng = np.random.default_rng(seed)
    observed = differences.sum() + 1e-12 * np.abs(differences).sum()
    hits = 0
    for size in _chunk_sizes(_NUM_FLIPS, len(differences)):
        signs = rng.integers(0, 2, size=(size, len(differences))) * 2.0 - 1.0
        hits += int((signs @ differences <= observed).sum())
    return (1 + hits) / (1 + _NUM_FLIPS)


def _chunk_sizes(num_rows: int, num_columns: int) -> Iterator[int]:
    """Row counts that add up to `num_rows`, each small enough to hold [rows, columns] in memory."""
    size = max(1, _CHUNK_CELLS // num_columns)
    for start in range(0, num_rows, size):
        yield min(size, num_rows - start)
