"""Clocks: arms timed on the same prompts in turn, and isolated forwards.

The only module of the package that measures durations of models.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from draftsmith.evaluation.intervals import Estimate, bootstrap_ratio_of_sums

Arm = Callable[[list[list[int]]], int]


@runtime_checkable
class StagedArm(Protocol):
    """An arm whose prefill and decoding can be timed apart; both return committed tokens."""

    def start(self, prompts: list[list[int]]) -> int:
        """Take the prompts in."""

    def finish(self) -> int:
        """Decode to the end."""


@dataclass
class Timings:
    """One entry a group of prompts.

    Attributes:
        seconds: From prompts to answers.
        tokens: Committed in that time.
        start_seconds: The part before decoding; 0 where an arm is timed as a whole.
        start_tokens: Committed in that part.
        warm_up_s: The first, untimed run: compilation, caches.
    """

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    start_seconds: list[float] = field(default_factory=list)
    start_tokens: list[int] = field(default_factory=list)
    warm_up_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """From sums."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def median_tokens_per_s(self) -> float:
        """Of the groups."""
        return statistics.median(t / s for t, s in zip(self.tokens, self.seconds, strict=True))

    @property
    def start(self) -> Timings:
        """The part before decoding."""
        return Timings(self.start_seconds, self.start_tokens)

    @property
    def decoding(self) -> Timings:
        """The part behind the start."""
        return Timings(
            [a - b for a, b in zip(self.seconds, self.start_seconds, strict=True)],
            [a - b for a, b in zip(self.tokens, self.start_tokens, strict=True)],
        )


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
    groups: Iterable[list[list[int]]],
    on_group: Callable[[int], None] = lambda _done: None,
) -> dict[str, Timings]:
    """Time every arm on every group of prompts, in alternating order (A B C, C B A, ...).

    Args:
        arms: Name -> what decodes a group and returns the number of committed tokens. Each runs
            once before, on the first group.
        groups: Prompts decoded together.
        on_group: Called with 1 when a group is done.
    """
    timings = {name: Timings() for name in arms}
    for index, group in enumerate(groups):
        names = list(arms)
        if index == 0:
            for name in names:
                timings[name].warm_up_s = timed(partial(arms[name], group))[0]
        for name in names if index % 2 == 0 else reversed(names):
            _time(arms[name], group, timings[name])
        on_group(1)
    return timings


def _time(arm: Arm, group: list[list[int]], timings: Timings) -> None:
    start_s, start_tokens, rest = 0.0, 0, partial(arm, group)
    if isinstance(arm, StagedArm):
        start_s, start_tokens = timed(partial(arm.start, group))
        rest = arm.finish
    seconds, tokens = timed(rest)
    timings.seconds.append(start_s + seconds)
    timings.tokens.append(start_tokens + tokens)
    timings.start_seconds.append(start_s)
    timings.start_tokens.append(start_tokens)


@contextmanager
def forward_seconds(models: Sequence[PreTrainedModel]) -> Iterator[list[float]]:
    """Yield a list that gets the seconds of every forward of these models within the block."""
    spent: list[float] = []
    begun: list[float] = []

    def before(*_: object) -> None:
        synchronise()
        begun.append(time.perf_counter())

    def after(*_: object) -> None:
        synchronise()
        spent.append(time.perf_counter() - begun.pop())

    hooks = [model.register_forward_pre_hook(before) for model in models]
    hooks += [model.register_forward_hook(after) for model in models]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def speed_ratio(fast: Timings, slow: Timings, *, seed: int) -> Estimate:
    """Tokens/s of one arm over another's, bootstrap over prompts.

    Each group's times are taken per token of its own arm, so that outputs of unequal length
    (near-ties in bf16) do not count as speed; groups weigh by the slow arm's tokens. A group in
    which an arm committed nothing says nothing of speed.
    """
    measured = zip(fast.seconds, fast.tokens, slow.seconds, slow.tokens, strict=True)
    groups = [group for group in measured if group[1] and group[3]]
    baseline = [slow_s for _, _, slow_s, _ in groups]
    scaled = [fast_s / fast_tokens * tokens for fast_s, fast_tokens, _, tokens in groups]
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
