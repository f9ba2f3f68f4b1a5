"""What speculation should yield: expected tokens of a round over the measured cost of its forwards.

Pure arithmetic.

Source: Leviathan et al. 2023, theorem 3.8, with measured acceptance by position in place of an
i.i.d. rate, and costs by batch and context in place of constants.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.decoding import Tree
from draftsmith.errors import EvidenceError

LEAST_GAIN = 1.02  # what another choice of lengths must promise more; estimates are no better
_FEWEST_TEXTS = 3  # that say how far texts differ


@dataclass(frozen=True)
class ForwardCosts:
    """Times of isolated forwards at one batch size and context, milliseconds.

    Attributes:
        target_step_ms: The target over one position, where nobody drafts.
        draft_step_ms: The draft over one position.
        verify_ms: The target over so many positions (draft length + 1), features for the draft
            included: a head pays for those of a round without drafts, too.
        drafts_at_once: One draft step guesses all positions.
    """

    target_step_ms: float
    draft_step_ms: float
    verify_ms: Mapping[int, float]
    drafts_at_once: bool = False

    @property
    def cost_ratio(self) -> float:
        """c: a draft step over a target step."""
        return self.draft_step_ms / self.target_step_ms

    def round_ms(self, num_steps: int, copy_length: int = 0, *, tree: Tree | None = None) -> float:
        """A round of so many draft steps and copies, or of neither, in an engine that drafts.

        The verification of a chain holds the longer of them. A tree keeps its nodes, and its spine
        grows to the longest copy.
        """
        nodes = max(num_steps, copy_length) if tree is None else tree.num_nodes_with(copy_length)
        paid = min(num_steps, 1) if self.drafts_at_once else num_steps
        return paid * self.draft_step_ms + self.verify_ms[nodes + 1]


@dataclass(frozen=True)
class RoundCosts:
    """Costs by batch size and context.

    Attributes:
        rows: Measured batch sizes, ascending.
        contexts: Measured contexts in tokens, ascending.
        cells: By (rows, context); all of the same widths.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    cells: Mapping[tuple[int, int], ForwardCosts]

    def at(self, *, rows: int, context: int) -> ForwardCosts:
        """Interpolated between the measured cells; constant beyond them."""
        places = grid_shares(self.rows, self.contexts, rows=rows, context=context)
        shares = [(self.cells[cell], share) for cell, share in places]
        return ForwardCosts(
            sum(share * cell.target_step_ms for cell, share in shares),
            sum(share * cell.draft_step_ms for cell, share in shares),
            {w: sum(s * cell.verify_ms[w] for cell, s in shares) for w in shares[0][0].verify_ms},
            shares[0][0].drafts_at_once,
        )


def grid_shares(
    rows_axis: Sequence[int], contexts_axis: Sequence[int], *, rows: int, context: int
) -> list[tuple[tuple[int, int], float]]:
    """The measured (rows, context) around a place and their shares in a bilinear mean."""
    return [
        ((row, column), row_share * column_share)
        for row, row_share in _bracket(rows_axis, rows)
        for column, column_share in _bracket(contexts_axis, context)
    ]


def _bracket(points: Sequence[int], value: int) -> list[tuple[int, float]]:
    """The measured points around a value and their shares; one where it lies outside or on one."""
    place = bisect.bisect_left(points, value)
    if place == len(points):
        return [(points[-1], 1.0)]
    above = points[place]
    if place == 0 or above == value:
        return [(above, 1.0)]
    below = points[place - 1]
    share = (value - below) / (above - below)
    return [(below, 1.0 - share), (above, share)]


@dataclass(frozen=True)
class Survival:
    """What the evaluate stage measured of the rounds at one temperature.

    Attributes:
        draft: Survival by position of the rounds that the draft guessed.
        copied_share: Share of the rounds that were copied from the text.
        copied: Survival by position of those rounds.
        spread: How far texts differ: the standard deviation of their accepted tokens a round, as a
            share of the mean.
        alpha: Acceptance rate, teacher-forced; None where it was not measured.
        trees: By tree: the share of its rounds in which 1, 2, ... of its nodes are accepted.
    """

    draft: Sequence[float]
    copied_share: float = 0.0
    copied: Sequence[float] = ()
    spread: float = 0.0
    alpha: float | None = None
    trees: Mapping[Tree, Sequence[float]] = field(default_factory=dict)

    def copying(self, length: int) -> Survival:
        """The same with copies of at most `length` tokens; with 0 the draft guesses everywhere."""
        share = self.copied_share if length else 0.0
        return replace(self, copied_share=share, copied=self.copied[:length])

    def tokens(self, draft: int, copy: int, tree: Tree | None = None) -> tuple[float, float]:
        """Mean and variance of the tokens of a round at these lengths, or of a tree and copies."""
        share = self.copied_share if copy else 0.0
        guessed = self.draft[:draft] if tree is None else self.trees[tree]
        first = second = 0.0
        for weight, survived in ((1 - share, guessed), (share, self.copied[:copy])):
            first += weight * sum(survived)
            # E[n^2] is the sum of (2k - 1) P(n >= k).
            second += weight * sum((2 * place + 1) * s for place, s in enumerate(survived))
        return 1.0 + first, max(0.0, second - first**2)

    @classmethod
    def recorded(cls, evaluated: Mapping[str, Any], temperature: float) -> Survival:
        """Of a recipe's entry of reports/evaluation.json.

        Raises:
            KeyError: It was not evaluated at that temperature.
        """
        key = str(float(temperature))
        copied = evaluated["copied"][key]
        alpha = evaluated.get("alpha", {}).get(key, {}).get("mean")
        found = cls(evaluated["survival"][key], copied["share"], copied["survival"], alpha=alpha)
        return replace(found, spread=_spread(evaluated.get("prompts", ()), key, found))


def _spread(prompts: Iterable[Mapping[str, Any]], key: str, survived: Survival) -> float:
    """How far texts differ, without the noise of the rounds that each was seen in."""
    seen = [
        (float(prompt["tau"][key]) - 1, prompt["num_rounds"][key])
        for prompt in prompts
        if key in prompt.get("num_rounds", ())
    ]
    mean = sum(accepted for accepted, _ in seen) / len(seen) if seen else 0.0
    if len(seen) < _FEWEST_TEXTS or mean == 0:
        return 0.0
    _, within = survived.tokens(len(survived.draft), len(survived.copied))
    noise = sum(within / rounds for _, rounds in seen) / len(seen)
    between = statistics.variance(accepted for accepted, _ in seen) - noise
    return math.sqrt(max(0.0, between)) / mean


def survival(conditional: Sequence[float]) -> list[float]:
    """Chance that a position and all before it are accepted.

    Args:
        conditional: By position: acceptance given that all before it were accepted.
    """
    return list(itertools.accumulate(conditional, operator.mul))


def conditional_acceptance(survived: Sequence[float]) -> list[float]:
    """The inverse of `survival`; 0 behind a position that was never accepted."""
    before = [1.0, *survived][: len(survived)]
    return [min(1.0, s / b) if b else 0.0 for s, b in zip(survived, before, strict=True)]


def expected_accepted(
    rows: Sequence[Sequence[float]], caps: Sequence[int], longest: int
) -> list[float]:
    """Tokens that rows of a batch are expected to accept together, by length from 0.

    Args:
        rows: Survival by position of each row, at least `longest` positions.
        caps: Most tokens that each row may propose.
        longest: Last length.

    Example: one row with survival [0.5, 0.2] gives [0, 0.5, 0.7] for `longest` 2.
    """
    gains = [0.0] * (longest + 1)
    for survived, cap in zip(rows, caps, strict=True):
        for place in range(min(cap, longest)):
            gains[place + 1] += survived[place]
    return list(itertools.accumulate(gains))


def expected_tokens(survived: Survival, draft_length: int) -> float:
    """Tokens of a round (tau): 1 + the survival of its positions.

    Example: [0.5, 0.2] at length 2 gives 1.7; when half the rounds are copies with survival [0.8],
    it is the mean of 1.7 and 1.8.

    Raises:
        EvidenceError: Survival was not measured that far.
    """
    if draft_length > len(survived.draft):
        raise EvidenceError(
            f"predicting draft length {draft_length}",
            found=f"survival of {len(survived.draft)} positions",
            expected=f"survival of at least {draft_length} positions",
            remedy="raise evaluation.draft_length to benchmark.max_draft_length",
        )
    return with_copies(1.0 + sum(survived.draft[:draft_length]), survived)


def with_copies(tokens: float, survived: Survival) -> float:
    """Tokens of a round (tau) where rounds that the draft guesses have so many."""
    share = survived.copied_share
    return (1 - share) * tokens + share * (1.0 + sum(survived.copied))


@dataclass(frozen=True)
class Rounds:
    """Rounds that the draft guesses.

    Attributes:
        tokens: Expected of one, residual or bonus token included.
        num_steps: Draft steps.
        tree: Shape of the drafts; None is a chain.
    """

    tokens: float
    num_steps: int
    tree: Tree | None = None


def predicted_speedup(
    survived: Survival, draft_length: int, costs: ForwardCosts, rows: int = 1
) -> float:
    """Speedup of a chain over one token a forward.

    Args:
        survived: What is accepted; copies are as long as it says.
        draft_length: Tokens that the draft guesses.
        costs: Of a batch of so many rows.
        rows: Requests that are decoded together.
    """
    guessed = expected_tokens(Survival(survived.draft), draft_length)
    return speedup_of(Rounds(guessed, draft_length), survived, costs, rows)


def iid_speedup(alpha: float, draft_length: int, costs: ForwardCosts) -> float:
    """The textbook's: acceptance alike at every position, verification as long as a step.

    Source: Leviathan et al. 2023, theorem 3.8.

    Example: at alpha 0.5 and a cost ratio of 0.1 two tokens promise 1.75 / 1.2.
    """
    tokens = sum(alpha**place for place in range(draft_length + 1))
    steps = min(draft_length, 1) if costs.drafts_at_once else draft_length
    return tokens / (1 + steps * costs.cost_ratio)


def speedup_of(rounds: Rounds, survived: Survival, costs: ForwardCosts, rows: int) -> float:
    """Speedup over one token a forward; no overhead is fitted.

    A verification is as wide as the rows of the batch together want it, and a draft step is for all
    rows: in a large batch somebody always copies and somebody always drafts.

    Args:
        rounds: What the draft guesses.
        survived: What is copied.
        costs: Of a batch of so many rows.
        rows: Requests that are decoded together.
    """
    share = survived.copied_share
    steps, tree = rounds.num_steps, rounds.tree
    round_ms = costs.round_ms(steps, tree=tree)
    if share:
        copy_length = len(survived.copied)
        nobody, everybody = (1 - share) ** rows, share**rows
        round_ms = (
            nobody * round_ms
            + everybody * costs.round_ms(0, copy_length)
            + (1 - nobody - everybody) * costs.round_ms(steps, copy_length, tree=tree)
        )
    return with_copies(rounds.tokens, survived) * costs.target_step_ms / round_ms


def best_lengths(
    survived: Survival, costs: ForwardCosts, limit: tuple[int, int], *, rows: int
) -> tuple[int, int]:
    """The fixed draft and copy length that promise most; (0, 0) where drafting hardly pays.

    Args:
        survived: What is accepted.
        costs: Of a batch of so many rows.
        limit: Longest draft and copy.
        rows: Requests that are decoded together.
    """

    def promise(lengths: tuple[int, int]) -> float:
        draft, copy = lengths
        return predicted_speedup(survived.copying(copy), draft, costs, rows)

    lengths = itertools.product(range(1, limit[0] + 1), range(limit[1] + 1))
    best = max(lengths, key=promise)
    return best if promise(best) > LEAST_GAIN else (0, 0)


def break_even_tokens(draft_length: int, costs: ForwardCosts) -> float:
    """The tau at which a draft length neither gains nor loses."""
    return costs.round_ms(draft_length) / costs.target_step_ms
