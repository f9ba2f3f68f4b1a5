"""Clocks: arms timed on the same prompts in turn, and isolated forwards.

The only module of the package that measures durations of models.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from draftsmith.evaluation.intervals import Estimate, bootstrap_ratio_of_sums

Arm = Callable[[list[list[int]]], int]


@dataclass
class Timings:
    """One entry a group of prompts: seconds and committed tokens."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """From sums."""
        return sum(self.tokens) / sum(self.seconds)


def synchronise() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(action: Callable[[], int]) -> tuple[float, int]:
    """Seconds of an action and what it returned, synchronised at both ends."""
    synchronise()
    start = time.perf_counter()
    tokens = action()
    synchronise()
    return time.perf_counter() - start, tokens


def interleave(
    arms: Mapping[str, Arm],
    groups: Sequence[list[list[int]]],
    on_group: Callable[[int], None] = lambda _done: None,
) -> dict[str, Timings]:
    """Time every arm on every group of prompts, in alternating order (A B C, C B A, ...).

    Args:
        arms: Name -> what decodes a group and returns the number of committed tokens. Each runs
            once untimed on the first group.
        groups: Prompts decoded together.
        on_group: Called with 1 when a group is done.
    """
    timings = {name: Timings() for name in arms}
    for arm in arms.values():
        arm(groups[0])
    for index, group in enumerate(groups):
        names = list(arms)
        for name in names if index % 2 == 0 else reversed(names):
            seconds, tokens = timed(partial(arms[name], group))
            timings[name].seconds.append(seconds)
            timings[name].tokens.append(tokens)
        on_group(1)
    return timings


def speed_ratio(fast: Timings, slow: Timings, *, seed: int) -> Estimate:
    """Tokens/s of one arm over another's, bootstrap over prompts.

    Each group's times are taken per token of its own arm, so that outputs of unequal length
    (near-ties in bf16) do not count as speed; groups weigh by the slow arm's tokens.
    """
    weights = [float(tokens) for tokens in slow.tokens]
    baseline = slow.seconds
    scaled = [
        seconds / tokens * weight
        for seconds, tokens, weight in zip(fast.seconds, fast.tokens, weights, strict=True)
    ]
    return bootstrap_ratio_of_sums(baseline, scaled, seed=seed)


def median_ms(actions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each action, run in turn `repeats` times after one untimed round."""
    samples: dict[str, list[float]] = {name: [] for name in actions}
    for action in actions.values():
        action()
    for _ in range(repeats):
        for name, action in actions.items():
            synchronise()
            start = time.perf_counter()
            action()
            synchronise()
            samples[name].append((time.perf_counter() - start) * 1000)
    return {name: statistics.median(values) for name, values in samples.items()}
