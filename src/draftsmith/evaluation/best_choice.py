"""What to do with a workload: nothing, copies alone, a chain or a tree, and what that promises.

Every choice is priced as `workload` says. Pure arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from draftsmith.decoding import Lengths
from draftsmith.evaluation.cost_model import LEAST_GAIN, ForwardCosts, Survival
from draftsmith.evaluation.workload import (
    NOTHING,
    Choice,
    DeviceCosts,
    Workload,
    expected_ms,
)

_BISECTIONS = 20


@dataclass(frozen=True)
class Advice:
    """What to do with a workload.

    Attributes:
        workload: Which.
        choice: The one with the highest expected speed; `NOTHING` where speculation does not pay.
        speedup: Expected over decoding without it, prefill included.
        tokens_per_s: Expected, of all rows together.
        plain_tokens_per_s: The same without speculation.
        break_even: Least acceptance rate, the same at all positions, with which some draft length
            pays here; None where even a draft that is always right does not.
        free_positions: Positions that a verification takes for at most a quarter more than one:
            many where decoding waits for memory, one where it waits for arithmetic.
    """

    workload: Workload
    choice: Choice
    speedup: float
    tokens_per_s: float
    plain_tokens_per_s: float
    break_even: float | None
    free_positions: int


def choices(survived: Survival, longest: Lengths) -> Iterator[Choice]:
    """All that can be done within measured acceptance: nothing first, then longer and longer.

    Args:
        survived: What is accepted; its trees are among the choices.
        longest: Longest draft and copy.
    """
    draft, copy = min(longest.draft, len(survived.draft)), min(longest.copy, len(survived.copied))
    trees = [tree for tree in survived.trees if tree.depth <= longest.draft]
    for copied in range(copy + 1):
        yield from (Choice(length, copied) for length in range(draft + 1))
        yield from (Choice(tree.depth, copied, tree) for tree in trees)


def best_choice(
    workload: Workload, costs: DeviceCosts, survived: Survival, *, longest: Lengths
) -> Choice:
    """The choice that pays best, no longer than `longest`; `NOTHING` where none clearly pays."""
    times = {
        choice: expected_ms(workload, choice, costs, survived)
        for choice in choices(survived, longest)
    }
    best = min(times, key=times.__getitem__)
    return best if times[NOTHING] >= times[best] * LEAST_GAIN else NOTHING


def advise(
    workload: Workload, costs: DeviceCosts, survived: Survival, *, longest: Lengths
) -> Advice:
    """The choice that pays best for a workload, and what it promises; arguments as above."""
    best = best_choice(workload, costs, survived, longest=longest)
    plain_ms, best_ms = (
        expected_ms(workload, choice, costs, survived) for choice in (NOTHING, best)
    )
    tokens = workload.batch_size * workload.new_tokens
    middle = workload.context + workload.new_tokens // 2
    return Advice(
        workload,
        best,
        speedup=plain_ms / best_ms,
        tokens_per_s=1000 * tokens / best_ms,
        plain_tokens_per_s=1000 * tokens / plain_ms,
        break_even=break_even_alpha(workload, costs, longest=longest.draft),
        free_positions=free_positions(costs.rounds.at(rows=workload.batch_size, context=middle)),
    )


def break_even_alpha(workload: Workload, costs: DeviceCosts, *, longest: int) -> float | None:
    """Least acceptance rate, the same at every position, with which some draft length pays.

    Source: Leviathan et al. 2023, equation 1 and theorem 3.8, solved for alpha by bisection.
    """
    plain = expected_ms(workload, NOTHING, costs, Survival([]))
    rates = [
        rate
        for length in range(1, longest + 1)
        if (rate := _least_rate(workload, costs, length, plain)) is not None
    ]
    return min(rates, default=None)


def _least_rate(
    workload: Workload, costs: DeviceCosts, length: int, plain_ms: float
) -> float | None:
    def pays(alpha: float) -> bool:
        survived = Survival([alpha**place for place in range(1, length + 1)])
        return expected_ms(workload, Choice(length, 0), costs, survived) <= plain_ms

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def free_positions(costs: ForwardCosts, tolerance: float = 1.25) -> int:
    """Positions that a verification takes for at most `tolerance` times the time of one."""
    allowed = tolerance * costs.verify_ms[1]
    return max(
        itertools.takewhile(
            lambda width: costs.verify_ms[width] <= allowed, sorted(costs.verify_ms)
        )
    )
