"""Sequential detectors of a drop in a stream of per-request values.

Page-Hinkley (Page, 1954) in units of the stream's own noise, with the threshold that makes false
signals as rare as asked (Siegmund, 1985, equation 2.57, without overshoot), and ADWIN (Bifet and
Gavalda, 2007). Both are river's. Knows nothing of requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from river.drift import ADWIN, PageHinkley

_MIN_INSTANCES = 30
_ADWIN_DELTA = 0.002
_MIN_NOISE = 0.01
_ITERATIONS = 30


@dataclass(frozen=True)
class Signal:
    """Where a drop was signalled first: index into the stream from 0; None for not at all."""

    page_hinkley: int | None
    adwin: int | None

    @property
    def is_given(self) -> bool:
        """Whether any detector signalled."""
        return self.page_hinkley is not None or self.adwin is not None


def signal_of_drop(
    values: ArrayLike, baseline: Sequence[float], *, margin: float, requests_per_false_signal: int
) -> Signal:
    """Run both detectors over `baseline` and then `values`.

    Args:
        values: One a request, in order of time, shape [num_requests].
        baseline: What such values were when the reference was measured; signals in it do not count.
        margin: A drop of this size is to be found; half of it is what Page-Hinkley allows for.
        requests_per_false_signal: Mean number of requests between two false signals.
    """
    stream = np.asarray(values, dtype=np.float64)
    if not len(stream):
        return Signal(None, None)
    return Signal(
        page_hinkley=_page_hinkley(stream, baseline, margin, requests_per_false_signal),
        adwin=_adwin(stream, baseline),
    )


def threshold(allowance: float, requests_per_false_signal: int) -> float:
    """The height that a cumulative sum of unit noise, lowered by `allowance` a step, rarely passes.

    Solves (exp(2 a h) - 1 - 2 a h) / (2 a^2) = N for h, with a the allowance and N the requests.
    """
    height = 0.0
    for _ in range(_ITERATIONS):
        rate = 2 * allowance * allowance * requests_per_false_signal
        height = math.log1p(rate + 2 * allowance * height) / (2 * allowance)
    return height


def noise(stream: NDArray[np.float64]) -> float:
    """Standard deviation around a mean that may move: from differences of neighbours."""
    steps = np.diff(stream)
    spread = math.sqrt(float((steps**2).mean()) / 2) if len(steps) else 0.0
    return max(spread, _MIN_NOISE)


def _page_hinkley(
    stream: NDArray[np.float64],
    baseline: Sequence[float],
    margin: float,
    requests_per_false_signal: int,
) -> int | None:
    unit = noise(stream)
    allowance = margin / (2 * unit)
    detector = PageHinkley(
        min_instances=_MIN_INSTANCES,
        delta=allowance,
        threshold=threshold(allowance, requests_per_false_signal),
        alpha=1.0,  # forgetting would turn any long stream into a signal
        mode="up",
    )
    for value in baseline:
        detector.update(-value / unit)
    for index, value in enumerate(stream.tolist()):
        detector.update(-value / unit)
        if detector.drift_detected:
            return index
    return None


def _adwin(stream: NDArray[np.float64], baseline: Sequence[float]) -> int | None:
    detector = ADWIN(delta=_ADWIN_DELTA)
    for value in baseline:
        detector.update(value)
    for index, value in enumerate(stream.tolist()):
        before = detector.estimation
        detector.update(value)
        if detector.drift_detected and detector.estimation < before:
            return index
    return None
