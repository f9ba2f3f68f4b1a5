"""Whether speculation pays for a workload: batch, context, length of answers, temperature.

Prefill, rounds and the growing context are priced with measured forwards, over the course that a
batch takes through the engine; acceptance is the one that was measured. Pure arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from draftsmith.decoding import Lengths
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts, Survival, grid_shares
from draftsmith.evaluation.course import Reading, RoundLaw, course

_BISECTIONS = 20
_LEAST_GAIN = 1.02  # less is within the noise of any service
_NONE = Lengths(0, 0)


@dataclass(frozen=True)
class Workload:
    """Requests that arrive and are decoded together.

    Attributes:
        batch_size: Rows in flight.
        context: Tokens of each prompt.
        new_tokens: Tokens of each answer.
        temperature: Of sampling.
    """

    batch_size: int
    context: int
    new_tokens: int
    temperature: float


@dataclass(frozen=True)
class PrefillMs:
    """Reading the prompts of a batch, milliseconds."""

    target: float
    draft: float


@dataclass(frozen=True)
class JudgingMs:
    """What follows the target's forward, milliseconds a position: greedy, and at a temperature."""

    greedy: float = 0.0
    sampled: float = 0.0

    def at(self, temperature: float) -> float:
        """Of a position at a temperature."""
        return self.sampled if temperature > 0 else self.greedy


@dataclass(frozen=True)
class DeviceCosts:
    """What was measured of a pair on a device.

    Attributes:
        rounds: Forwards of rounds.
        prefill: By the same (rows, context).
        judging: Of the positions of a round.
    """

    rounds: RoundCosts
    prefill: Mapping[tuple[int, int], PrefillMs]
    judging: JudgingMs = JudgingMs()

    def prefill_at(self, *, rows: int, context: int) -> PrefillMs:
        """Interpolated between the measured cells; in proportion to the tokens beyond them."""
        shares = grid_shares(self.rounds.rows, self.rounds.contexts, rows=rows, context=context)
        target, draft = (
            sum(share * getattr(self.prefill[cell], side) for cell, share in shares)
            for side in ("target", "draft")
        )
        tokens = sum(share * row * column for (row, column), share in shares)
        scale = rows * context / tokens if _lies_outside(self.rounds, rows, context) else 1.0
        return PrefillMs(target * scale, draft * scale)


def _lies_outside(rounds: RoundCosts, rows: int, context: int) -> bool:
    return not (
        rounds.rows[0] <= rows <= rounds.rows[-1]
        and rounds.contexts[0] <= context <= rounds.contexts[-1]
    )


@dataclass(frozen=True)
class Advice:
    """What to do with a workload.

    Attributes:
        workload: Which.
        lengths: Draft and copy lengths with the highest expected speed; (0, 0) where speculation
            does not pay.
        speedup: Expected over decoding without it, prefill included.
        tokens_per_s: Expected, of all rows together.
        plain_tokens_per_s: The same without speculation.
        break_even: Least acceptance rate, the same at all positions, with which some draft length
            pays here; None where even a draft that is always right does not.
        free_positions: Positions that a verification takes for at most a quarter more than one:
            many where decoding waits for memory, one where it waits for arithmetic.
    """

    workload: Workload
    lengths: Lengths
    speedup: float
    tokens_per_s: float
    plain_tokens_per_s: float
    break_even: float | None
    free_positions: int


def tokens_a_round(survived: Survival, lengths: Lengths) -> float:
    """Expected tokens of a row's round; a row that could copy drafts where no copies are wanted."""
    return survived.tokens(*lengths)[0]


def round_ms(
    survived: Survival,
    lengths: Lengths,
    costs: ForwardCosts,
    *,
    rows: int,
    position_ms: float = 0.0,
) -> float:
    """Expected time of a batch's round: all rows draft, all copy, or some do either.

    Args:
        survived: Says how many rows copy.
        lengths: Draft and copy lengths.
        costs: Of a batch of so many rows.
        rows: Requests in flight.
        position_ms: Judging one position of one row.
    """

    def of(draft: int, copy: int) -> float:
        is_plain = draft == copy == 0  # nobody drafts in such an engine
        forwards = costs.target_step_ms if is_plain else costs.round_ms(draft, copy)
        return forwards + position_ms * rows * (max(draft, copy) + 1)

    share = survived.copied_share if lengths.copy else 0.0
    all_draft, all_copy = (1 - share) ** rows, share**rows
    return (
        all_draft * of(lengths.draft, 0)
        + all_copy * of(0, lengths.copy)
        + (1 - all_draft - all_copy) * of(lengths.draft, lengths.copy)
    )


def expected_ms(
    workload: Workload, lengths: Lengths, costs: DeviceCosts, survived: Survival
) -> float:
    """Time from the prompts to the last token of every row.

    The cost of a round is that of the rows in flight, at the middle of their answers.
    """
    rows, context, new_tokens = workload.batch_size, workload.context, workload.new_tokens
    prefill = costs.prefill_at(rows=rows, context=context)
    joined = Reading.of(rows, context).joining_steps(rows)
    taken = _round_law(survived, lengths).rounds(new_tokens, rows)
    total = prefill.target + (prefill.draft if lengths.draft else 0.0)
    for stretch in course(joined, taken):
        place = round(context + stretch.progress * new_tokens)
        total += stretch.rounds * round_ms(
            survived,
            lengths,
            costs.rounds.at(rows=stretch.rows, context=place),
            rows=stretch.rows,
            position_ms=costs.judging.at(workload.temperature),
        )
    return total


def _round_law(survived: Survival, lengths: Lengths) -> RoundLaw:
    mean, variance = survived.tokens(*lengths)
    most = 1 + max(lengths.draft, lengths.copy if survived.copied_share else 0)
    return RoundLaw(mean, variance, most, survived.spread)


def expected_speedup(
    workload: Workload, lengths: Lengths, costs: DeviceCosts, survived: Survival
) -> float:
    """Over decoding without speculation."""
    plain = expected_ms(workload, _NONE, costs, survived)
    return plain / expected_ms(workload, lengths, costs, survived)


def advise(
    workload: Workload, costs: DeviceCosts, survived: Survival, *, longest: Lengths
) -> Advice:
    """The lengths that pay best for a workload, no longer than `longest`."""
    limit = Lengths(
        min(longest.draft, len(survived.draft)), min(longest.copy, len(survived.copied))
    )
    choices = itertools.product(range(1, limit.draft + 1), range(limit.copy + 1))
    times = {
        lengths: expected_ms(workload, lengths, costs, survived)
        for lengths in (_NONE, *itertools.starmap(Lengths, choices))
    }
    plain = times[_NONE]
    best = min(times, key=times.__getitem__)
    if plain < times[best] * _LEAST_GAIN:
        best = _NONE
    tokens = workload.batch_size * workload.new_tokens
    middle = workload.context + workload.new_tokens // 2
    return Advice(
        workload,
        best,
        speedup=plain / times[best],
        tokens_per_s=1000 * tokens / times[best],
        plain_tokens_per_s=1000 * tokens / plain,
        break_even=break_even_alpha(workload, costs, longest=longest.draft),
        free_positions=free_positions(costs.rounds.at(rows=workload.batch_size, context=middle)),
    )


def break_even_alpha(workload: Workload, costs: DeviceCosts, *, longest: int) -> float | None:
    """Least acceptance rate, the same at every position, with which some draft length pays.

    Source: Leviathan et al. 2023, equation 1 and theorem 3.8, solved for alpha by bisection.
    """
    plain = expected_ms(workload, _NONE, costs, Survival([]))
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
        return expected_ms(workload, Lengths(length, 0), costs, survived) <= plain_ms

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
