"""Predictions of speedups held against workloads that are really decoded.

No figure is fitted to them, so their errors are the error bar of all the others; how many tokens a
round commits is compared beside the speedup, which tells whether acceptance or costs were off.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.artifacts import digest_json, read_json, write_json
from draftsmith.decoding.trace import block_efficiency
from draftsmith.evaluation.arms import Contestants, EngineArm
from draftsmith.evaluation.deadline import Deadline
from draftsmith.evaluation.sweep import OnDone
from draftsmith.evaluation.timing import interleave, speed_ratio
from draftsmith.evaluation.trial_plan import Planned, num_groups
from draftsmith.evaluation.workload import Choice

_LOG = logging.getLogger(__name__)
_CLEAR = 0.1  # a speedup this far from 1 is a gain or a loss
_WIDE_ERROR = 0.9  # share of the trials whose error is below the error bar
_FEWEST_TRIALS = 10  # fewer say nothing of nine errors in ten
_SHARES = (0.25, 1.0)  # of the time left, that a trial may take: at first, and of what then is left


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
    def iid_error(self) -> float | None:
        """The same of the textbook's formula; None where it predicted nothing."""
        promised = self.planned.iid_speedup
        return None if promised is None else promised / self.seen.speedup - 1

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
            **choice_record(self.planned.choice),
            "predicted": self.planned.speedup,
            "measured": self.seen.speedup,
            "interval": [self.seen.low, self.seen.high],
            "error": self.error,
            "sign_error": self.has_sign_error,
            "iid_predicted": self.planned.iid_speedup,
            "iid_error": self.iid_error,
            "predicted_tokens_a_round": self.planned.tokens,
            "measured_tokens_a_round": self.seen.tokens,
        }


def choice_record(choice: Choice) -> dict[str, Any]:
    """A choice as reports hold it; a tree by the parent's place of each node, a chain by none."""
    return {
        "draft_length": choice.draft,
        "copy_length": choice.copy,
        "tree": [] if choice.tree is None else list(choice.tree.parents),
    }


def arm_of(pair: Contestants, choice: Choice, *, max_new_tokens: int, batch_size: int) -> EngineArm:
    """An engine whose rounds propose that."""
    sizes = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    if choice.draft == 0 and choice.copy:
        return pair.copies(choice.copy, **sizes)
    return pair.with_copies(choice.copy).engine(choice.draft, tree=choice.tree, **sizes)


@dataclass(frozen=True)
class TrialRun:
    """Decodes workloads.

    Attributes:
        contestants: The pair at a temperature. Nothing may stop its answers, so that they are as
            long as asked.
        prompts: Called with a number of tokens and of a first text: real texts of that length, in a
            circle.
        folder: Where finished trials are kept.
    """

    contestants: Callable[[float], Contestants]
    prompts: Callable[[int, int], Iterator[list[int]]]
    folder: Path

    def is_kept(self, planned: Planned) -> bool:
        """Whether it was decoded before."""
        return self._path(planned).exists()

    def _path(self, planned: Planned) -> Path:
        choice = choice_record(planned.choice)
        shape = digest_json(choice["tree"])[:8] if choice["tree"] else "chain"
        parts = (*asdict(planned.workload).values(), *planned.choice[:2], shape)
        return self.folder / f"trial-{'-'.join(map(str, parts))}.json"

    def run(self, planned: Planned) -> Trial:
        """Decode it, unless it was decoded before."""
        path = self._path(planned)
        if not path.exists():
            write_json(path, asdict(self._decode(planned)))
        return Trial(planned, Seen(**read_json(path)))

    def _decode(self, planned: Planned) -> Seen:
        workload = planned.workload
        pair, size = self.contestants(workload.temperature), workload.batch_size
        plain = pair.engine(0, max_new_tokens=workload.new_tokens, batch_size=size)
        speculative = arm_of(
            pair, planned.choice, max_new_tokens=workload.new_tokens, batch_size=size
        )
        circle = self.prompts(workload.context, planned.first_text)
        groups = [list(itertools.islice(circle, size)) for _ in range(num_groups(workload))]
        timings = interleave({"plain": plain, "speculative": speculative}, groups)
        ratio = speed_ratio(timings["speculative"], timings["plain"], seed=0)
        accepted = block_efficiency(speculative.traces)
        return Seen(ratio.mean, ratio.low, ratio.high, accepted)


def check(
    trials: TrialRun,
    planned: Sequence[Planned],
    deadline: Deadline,
    *,
    on_done: OnDone = lambda _done: None,
) -> list[Trial]:
    """Decode workloads as long as there is time for them.

    Args:
        trials: Decodes them.
        planned: Most telling first. Those that are expected to take a great share of the time left
            wait until all others had their turn; those that would not end in time are left out.
        deadline: When all has to be done.
        on_done: Called with 1 after each, and with the number of those left out.
    """
    done: dict[int, Trial] = {}
    for share in _SHARES:
        for place, item in enumerate(planned):
            is_in_time = deadline.part(share).allows(item.seconds)
            if place not in done and (is_in_time or trials.is_kept(item)):
                done[place] = trials.run(item)
                on_done(1)
    if len(done) < len(planned):
        on_done(len(planned) - len(done))
    _LOG.info("event=trials_done trials=%d planned=%d", len(done), len(planned))
    return [done[place] for place in sorted(done)]


def error_bar(trials: Sequence[Trial]) -> float:
    """Relative error that nine of ten trials stayed below; infinite where they are too few."""
    if len(trials) < _FEWEST_TRIALS:
        return math.inf
    return float(np.quantile([abs(trial.error) for trial in trials], _WIDE_ERROR))


def summary(trials: Sequence[Trial]) -> dict[str, Any]:
    """How far predictions were off, over all trials; None where too little was decoded.

    Of the median errors one is of absolute errors, one says in which direction predictions lean,
    one is of the tokens of a round alone, and one of the textbook's formula.
    """

    def median(errors: list[float]) -> float | None:
        return float(np.median(errors)) if errors else None

    bar = error_bar(trials)
    textbook = [abs(trial.iid_error) for trial in trials if trial.iid_error is not None]
    return {
        "num_trials": len(trials),
        "median_error": median([abs(trial.error) for trial in trials]),
        "median_signed_error": median([trial.error for trial in trials]),
        "median_tokens_error": median([abs(trial.tokens_error) for trial in trials]),
        "median_iid_error": median(textbook),
        "error_bar": bar if math.isfinite(bar) else None,
        "sign_errors": sum(trial.has_sign_error for trial in trials),
    }
