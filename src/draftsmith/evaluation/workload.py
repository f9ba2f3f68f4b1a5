"""Whether speculation pays for a workload: batch, context, length of answers, temperature.

Prefill, rounds and the growing context are priced with measured forwards, over the course that a
batch takes through the engine; acceptance is the one that was measured. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from draftsmith.decoding import Tree
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts, Survival, grid_shares
from draftsmith.evaluation.course import Reading, RoundLaw, course


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


class Choice(NamedTuple):
    """What rounds propose.

    Attributes:
        draft: Draft positions; with 0 nobody drafts, and copies stand alone.
        copy: Longest copy from the text; with 0 nothing is copied.
        tree: Shape of the drafts, `draft` positions deep; None is a chain.
    """

    draft: int
    copy: int
    tree: Tree | None = None


NOTHING = Choice(0, 0)


def tokens_a_round(survived: Survival, choice: Choice) -> float:
    """Expected tokens of a row's round; a row that could copy drafts where no copies are wanted."""
    return survived.tokens(*choice)[0]


def round_ms(
    survived: Survival,
    choice: Choice,
    costs: ForwardCosts,
    *,
    rows: int,
    position_ms: float = 0.0,
) -> float:
    """Expected time of a batch's round: all rows draft, all copy, or some do either.

    Args:
        survived: Says how many rows copy.
        choice: What is proposed.
        costs: Of a batch of so many rows.
        rows: Requests in flight.
        position_ms: Judging one position of one row.
    """

    def of(draft: int, copy: int, tree: Tree | None = None) -> float:
        is_plain = draft == copy == 0  # nobody drafts in such an engine
        forwards = costs.target_step_ms if is_plain else costs.round_ms(draft, copy, tree=tree)
        nodes = max(draft, copy) if tree is None else tree.num_nodes_with(copy)
        return forwards + position_ms * rows * (nodes + 1)

    draft, copy, tree = choice
    share = survived.copied_share if copy else 0.0
    all_draft, all_copy = (1 - share) ** rows, share**rows
    return (
        all_draft * of(draft, 0, tree)
        + all_copy * of(0, copy)
        + (1 - all_draft - all_copy) * of(draft, copy, tree)
    )


def expected_ms(
    workload: Workload, choice: Choice, costs: DeviceCosts, survived: Survival
) -> float:
    """Time from the prompts to the last token of every row.

    The cost of a round is that of the rows in flight, at the middle of their answers.
    """
    rows, context, new_tokens = workload.batch_size, workload.context, workload.new_tokens
    prefill = costs.prefill_at(rows=rows, context=context)
    joined = Reading.of(rows, context).joining_steps(rows)
    taken = _round_law(survived, choice).rounds(new_tokens, rows)
    total = prefill.target + (prefill.draft if choice.draft else 0.0)
    for stretch in course(joined, taken):
        place = round(context + stretch.progress * new_tokens)
        total += stretch.rounds * round_ms(
            survived,
            choice,
            costs.rounds.at(rows=stretch.rows, context=place),
            rows=stretch.rows,
            position_ms=costs.judging.at(workload.temperature),
        )
    return total


def _round_law(survived: Survival, choice: Choice) -> RoundLaw:
    mean, variance = survived.tokens(*choice)
    most = 1 + max(choice.draft, choice.copy if survived.copied_share else 0)
    return RoundLaw(mean, variance, most, survived.spread)


def expected_speedup(
    workload: Workload, choice: Choice, costs: DeviceCosts, survived: Survival
) -> float:
    """Over decoding without speculation."""
    plain = expected_ms(workload, NOTHING, costs, survived)
    return plain / expected_ms(workload, choice, costs, survived)
