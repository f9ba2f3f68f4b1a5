"""Predictions of speedups held against workloads that are really decoded.

Workloads are spread over the measured grid, most of them between its points. No figure is fitted to
them, so their errors are the error bar of all the others; how many tokens a round commits is
compared beside the speedup, which tells whether acceptance or costs were off.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.artifacts import read_json, write_json
from draftsmith.corpus.rollouts import Rollout
from draftsmith.decoding import Lengths
from draftsmith.decoding.trace import block_efficiency
from draftsmith.evaluation.acceptance import in_turn
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.cost_model import Survival
from draftsmith.evaluation.sweep import OnDone
from draftsmith.evaluation.timing import interleave, speed_ratio
from draftsmith.evaluation.workload import (
    DeviceCosts,
    Workload,
    advise,
    expected_ms,
    tokens_a_round,
)

_LOG = logging.getLogger(__name__)
_CLEAR = 0.1  # a speedup this far from 1 is a gain or a loss
_WIDE_ERROR = 0.9  # share of the trials whose error is below the error bar
_PLACES = (0.0, 0.3, 0.55, 0.8)  # between the smallest and the largest, on a logarithmic scale
_ANSWERS = (1, 3)  # times the shortest answer
_FEWEST_TEXTS = 6  # of a trial: two texts alone may differ by a third in what is accepted


@dataclass(frozen=True)
class Planned:
    """A workload that is to be decoded.

    Attributes:
        workload: Which.
        lengths: Draft and copy lengths.
        speedup: Expected.
        tokens: Expected of a row's round.
        first_text: Which of the real texts its prompts begin with, so that trials rest on many.
        seconds: Expected of decoding it, with and without speculation and an untimed time.
    """

    workload: Workload
    lengths: Lengths
    speedup: float
    tokens: float
    first_text: int
    seconds: float


@dataclass(frozen=True)
class Seen:
    """What decoding a workload with and without speculation showed.

    Attributes:
        speedup: Measured.
        low: Lower bound, over groups of prompts.
        high: Upper bound.
        tokens: Of a row's round.
    """

    speedup: float
    low: float
    high: float
    tokens: float


@dataclass(frozen=True)
class Trial:
    """A prediction and what was seen."""

    planned: Planned
    seen: Seen

    @property
    def error(self) -> float:
        """Of the speedup; relative, signed."""
        return self.planned.speedup / self.seen.speedup - 1

    @property
    def tokens_error(self) -> float:
        """Of the tokens of a round; relative, signed."""
        return self.planned.tokens / self.seen.tokens - 1

    @property
    def has_sign_error(self) -> bool:
        """Whether a clear gain was taken for a loss, or a clear loss for a gain."""
        gain = self.seen.speedup - 1
        return abs(gain) > _CLEAR and (self.planned.speedup - 1) * gain < 0

    def record(self) -> dict[str, Any]:
        """As a report holds it."""
        return {
            **asdict(self.planned.workload),
            "draft_length": self.planned.lengths.draft,
            "copy_length": self.planned.lengths.copy,
            "predicted": self.planned.speedup,
            "measured": self.seen.speedup,
            "interval": [self.seen.low, self.seen.high],
            "error": self.error,
            "sign_error": self.has_sign_error,
            "predicted_tokens_a_round": self.planned.tokens,
            "measured_tokens_a_round": self.seen.tokens,
        }


@dataclass(frozen=True)
class TrialRun:
    """Decodes workloads.

    Attributes:
        contestants: The pair at a temperature and copy length. Nothing may stop its answers, so
            that they are as long as asked.
        prompts: Called with a number of tokens and of a first text: real texts of that length, in a
            circle.
        folder: Where finished trials are kept.
    """

    contestants: Callable[[float, int], Contestants]
    prompts: Callable[[int, int], Iterator[list[int]]]
    folder: Path

    def is_kept(self, planned: Planned) -> bool:
        """Whether it was decoded before."""
        return self._path(planned).exists()

    def _path(self, planned: Planned) -> Path:
        parts = (*asdict(planned.workload).values(), *planned.lengths)
        return self.folder / f"trial-{'-'.join(map(str, parts))}.json"

    def run(self, planned: Planned) -> Trial:
        """Decode it, unless it was decoded before."""
        path = self._path(planned)
        if not path.exists():
            write_json(path, asdict(self._decode(planned)))
        return Trial(planned, Seen(**read_json(path)))

    def _decode(self, planned: Planned) -> Seen:
        workload, lengths = planned.workload, planned.lengths
        contestants = self.contestants(workload.temperature, lengths.copy)
        size, tokens = workload.batch_size, workload.new_tokens
        arms = {
            name: contestants.engine(draft, max_new_tokens=tokens, batch_size=size)
            for name, draft in (("plain", 0), ("speculative", lengths.draft))
        }
        circle = self.prompts(workload.context, planned.first_text)
        groups = [list(itertools.islice(circle, size)) for _ in range(_num_groups(size))]
        timings = interleave(arms, groups)
        ratio = speed_ratio(timings["speculative"], timings["plain"], seed=0)
        accepted = block_efficiency(arms["speculative"].traces)
        return Seen(ratio.mean, ratio.low, ratio.high, accepted)


def _num_groups(batch_size: int) -> int:
    return max(2, math.ceil(_FEWEST_TEXTS / batch_size))


def conversations(
    rollouts: Sequence[Rollout], num_tokens: int, first: int = 0
) -> Iterator[list[int]]:
    """Prompts of `num_tokens` tokens in a circle: earlier conversations, then a question.

    Args:
        rollouts: Prompts with their answers.
        num_tokens: Of each prompt; the newest are kept.
        first: Which question comes first; the domains come in turn.
    """
    by_prompt = {rollout.prompt_id: rollout for rollout in rollouts}
    turns = in_turn([(name, rollout.domain, rollout) for name, rollout in by_prompt.items()])
    for last in itertools.count(first):
        text: list[int] = list(turns[last % len(turns)].prompt_ids)
        for back in itertools.count(1):
            if len(text) >= num_tokens:
                break
            earlier = turns[(last - back) % len(turns)]
            text = [*earlier.prompt_ids, *earlier.response_ids, *text]
        yield text[-num_tokens:]


def plan_trials(
    costs: DeviceCosts,
    survivals: Mapping[float, Survival],
    *,
    new_tokens: int,
    longest: Lengths,
) -> list[Planned]:
    """Workloads within the measured range in a mixed order, so that the first are spread too.

    Their lengths are in turn those that pay best and others, so that losses are predicted too.

    Args:
        costs: What was measured.
        survivals: Acceptance by temperature.
        new_tokens: The shortest answer.
        longest: Longest draft and copy.
    """
    cells = itertools.product(
        _between(costs.rounds.rows),
        _between(costs.rounds.contexts),
        (times * new_tokens for times in _ANSWERS),
        sorted(survivals),
    )
    mixed = [Workload(*cell) for cell in cells]
    random.Random(0).shuffle(mixed)
    planned = []
    for index, workload in enumerate(mixed):
        survived = survivals[workload.temperature]
        most = min(longest.draft, len(survived.draft))
        best = advise(workload, costs, survived, longest=longest).lengths
        lengths = best if best.draft and index % 2 else Lengths(1 + index % most, best.copy)
        plain, speculative = (
            expected_ms(workload, at, costs, survived) for at in (Lengths(0, 0), lengths)
        )
        seconds = (1 + _num_groups(workload.batch_size)) * (plain + speculative) / 1000
        tokens = tokens_a_round(survived, lengths)
        planned.append(
            Planned(workload, lengths, plain / speculative, tokens, index * _FEWEST_TEXTS, seconds)
        )
    return planned


def _between(points: Sequence[int]) -> list[int]:
    """Places within a measured range; most of them were not measured.

    Example: 1 to 16 gives 1, 2, 5 and 9.
    """
    first, last = points[0], points[-1]
    return sorted({round(first * (last / first) ** place) for place in _PLACES})


def check(
    trials: TrialRun,
    planned: Sequence[Planned],
    *,
    seconds: float,
    on_done: OnDone = lambda _done: None,
) -> list[Trial]:
    """Decode workloads as long as there is time for them; the first is always decoded.

    Args:
        trials: Decodes them.
        planned: Most telling first; those that are expected to last longer than what is left are
            passed over.
        seconds: Budget.
        on_done: Called with 1 after each.
    """
    end = time.monotonic() + seconds
    done: list[Trial] = []
    for item in planned:
        if not done or time.monotonic() + item.seconds <= end or trials.is_kept(item):
            done.append(trials.run(item))
            on_done(1)
    _LOG.info("event=trials_done trials=%d planned=%d", len(done), len(planned))
    return done


def error_bar(trials: Sequence[Trial]) -> float:
    """Relative error that nine of ten trials stayed below; infinite without a trial."""
    if not trials:
        return math.inf
    return float(np.quantile([abs(trial.error) for trial in trials], _WIDE_ERROR))


def summary(trials: Sequence[Trial]) -> dict[str, Any]:
    """How far predictions were off, over all trials; None where nothing was decoded.

    Of the median errors one is of absolute errors, one says in which direction predictions lean,
    and one is of the tokens of a round alone.
    """

    def median(errors: list[float]) -> float | None:
        return float(np.median(errors)) if errors else None

    return {
        "num_trials": len(trials),
        "median_error": median([abs(trial.error) for trial in trials]),
        "median_signed_error": median([trial.error for trial in trials]),
        "median_tokens_error": median([abs(trial.tokens_error) for trial in trials]),
        "error_bar": error_bar(trials) if trials else None,
        "sign_errors": sum(trial.has_sign_error for trial in trials),
    }
