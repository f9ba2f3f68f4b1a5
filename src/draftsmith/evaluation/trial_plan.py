"""Which workloads are decoded, so that predictions can be held against them, and on which texts.

Most lie between the measured points and are short, so that many fit a budget; a few lie at the ends
of everything that advice speaks of: the largest batch, the longest prompts, long answers. Pure.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from draftsmith.corpus.rollouts import Rollout
from draftsmith.decoding import Lengths
from draftsmith.evaluation.acceptance import in_turn
from draftsmith.evaluation.best_choice import best_choice, choices
from draftsmith.evaluation.cost_model import Survival, iid_speedup
from draftsmith.evaluation.workload import (
    NOTHING,
    Choice,
    DeviceCosts,
    Workload,
    expected_ms,
    tokens_a_round,
)

_PLACES = (0.0, 0.3, 0.55, 0.8)  # between the smallest and the largest, on a logarithmic scale
_ANSWERS = (1, 3)  # times the shortest answer
LONGEST_TRIAL = max(_ANSWERS)
_FEWEST_TEXTS = 6  # of a trial: two texts alone may differ by a third in what is accepted
_FEWEST_LONG_TEXTS = 3  # a long answer tells as much as several short ones
_LONG_ANSWER = 64
_BETWEEN_ENDS = 4  # short trials before each one at the ends
_ENOUGH_TEXTS = 48  # texts that predictions do not rest on, so that no others are needed


@dataclass(frozen=True)
class Planned:
    """A workload that is to be decoded.

    Attributes:
        workload: Which.
        choice: What its rounds propose.
        speedup: Expected.
        iid_speedup: By the textbook's formula; None where no acceptance rate is known.
        tokens: Expected of a row's round.
        first_text: Which of the real texts its prompts begin with, so that trials rest on many.
        seconds: Expected of decoding it, with and without speculation and an untimed time.
    """

    workload: Workload
    choice: Choice
    speedup: float
    iid_speedup: float | None
    tokens: float
    first_text: int
    seconds: float


def plan_trials(
    costs: DeviceCosts,
    survivals: Mapping[float, Survival],
    *,
    new_tokens: Sequence[int],
    longest: Lengths,
) -> list[Planned]:
    """Workloads of the measured range in a mixed order, so that the first are spread too.

    They do in turn what pays best and what else could be done, so that losses are predicted too; at
    the ends they do what pays best.

    Args:
        costs: What was measured.
        survivals: Acceptance by temperature.
        new_tokens: Lengths of answers that advice speaks of, ascending.
        longest: Longest draft and copy.
    """
    within = _within(costs, new_tokens[0], sorted(survivals))
    ends = [end for end in _ends(costs, new_tokens, sorted(survivals)) if end not in within]
    others = {temperature: itertools.count() for temperature in survivals}
    planned = []
    for index, workload in enumerate(_mixed(within, ends)):
        survived = survivals[workload.temperature]
        best = best_choice(workload, costs, survived, longest=longest)
        if best == NOTHING or (index % 2 == 0 and workload in within):
            options = _others(survived, longest, best.copy)
            best = options[next(others[workload.temperature]) % len(options)]
        planned.append(_planned(workload, best, costs, survived, index * _FEWEST_TEXTS))
    return planned


def _others(survived: Survival, longest: Lengths, copy: int) -> list[Choice]:
    """What else could be done: drafts with copies as long as the best ones, and copies alone."""
    drafted = [each for each in choices(survived, longest) if each.draft and each.copy == copy]
    alone = min(longest.copy, len(survived.copied))
    return [*drafted, Choice(0, alone)] if alone else drafted


def _planned(
    workload: Workload, choice: Choice, costs: DeviceCosts, survived: Survival, first_text: int
) -> Planned:
    plain_ms, choice_ms = (
        expected_ms(workload, each, costs, survived) for each in (NOTHING, choice)
    )
    times = 1 + num_groups(workload)
    middle = workload.context + workload.new_tokens // 2
    forwards = costs.rounds.at(rows=workload.batch_size, context=middle)
    alpha = survived.alpha
    return Planned(
        workload,
        choice,
        speedup=plain_ms / choice_ms,
        iid_speedup=None if alpha is None else iid_speedup(alpha, choice.draft, forwards),
        tokens=tokens_a_round(survived, choice),
        first_text=first_text,
        seconds=times * (plain_ms + choice_ms) / 1000,
    )


def num_groups(workload: Workload) -> int:
    """Batches that a trial decodes: two at least, for an interval."""
    is_long = workload.new_tokens > _LONG_ANSWER
    texts = _FEWEST_LONG_TEXTS if is_long else _FEWEST_TEXTS
    return max(2, math.ceil(texts / workload.batch_size))


def _within(costs: DeviceCosts, shortest: int, temperatures: Sequence[float]) -> list[Workload]:
    cells = itertools.product(
        _between(costs.rounds.rows),
        _between(costs.rounds.contexts),
        (times * shortest for times in _ANSWERS),
        temperatures,
    )
    mixed = [Workload(*cell) for cell in cells]
    random.Random(0).shuffle(mixed)
    return mixed


def _between(points: Sequence[int]) -> list[int]:
    """Places within a measured range; most of them were not measured.

    Example: 1 to 16 gives 1, 2, 5 and 9.
    """
    first, last = points[0], points[-1]
    return sorted({round(first * (last / first) ** place) for place in _PLACES})


def _ends(
    costs: DeviceCosts, new_tokens: Sequence[int], temperatures: Sequence[float]
) -> list[Workload]:
    """One workload at each corner of what advice speaks of, the least work first."""
    rows, contexts = ((axis[0], axis[-1]) for axis in (costs.rounds.rows, costs.rounds.contexts))
    cells = sorted(
        dict.fromkeys(itertools.product(rows, contexts, new_tokens)),
        key=lambda cell: cell[0] * (cell[1] + cell[2]),
    )
    return [
        Workload(*cell, temperatures[place % len(temperatures)]) for place, cell in enumerate(cells)
    ]


def _mixed(within: Sequence[Workload], ends: Sequence[Workload]) -> Iterator[Workload]:
    """All of them, an end behind every few others."""
    rest = iter(ends)
    for number, workload in enumerate(within, start=1):
        yield workload
        if number % _BETWEEN_ENDS == 0:
            yield from itertools.islice(rest, 1)
    yield from rest


def unseen(rollouts: Sequence[Rollout], measured_on: Collection[str]) -> list[Rollout]:
    """The texts that survival was not measured on, where there are enough of them; else all.

    Args:
        rollouts: Prompts with their answers.
        measured_on: Ids of the prompts that survival was measured on.
    """
    others = [rollout for rollout in rollouts if rollout.prompt_id not in measured_on]
    return others if len(others) >= _ENOUGH_TEXTS else list(rollouts)


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
