"""Drafts and copies that pay now: expected tokens over the measured cost of the round.

Chosen before each round for its rows and context, from the acceptance of earlier rounds: a chain
and its length or a tree and its size, and the length of copies. Drafting nothing is a choice like
any other. Knows no clock; costs are measured by `profiling`.

Source: Leviathan et al. 2023, theorem 3.8, with the terms of `cost_model`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from draftsmith.decoding import ChosenTree, Lengths, Tree
from draftsmith.decoding.batch import Batch
from draftsmith.evaluation.adaptive_trees import AdaptiveTrees, first_guesses
from draftsmith.evaluation.cost_model import (
    LEAST_GAIN,
    ForwardCosts,
    RoundCosts,
    Survival,
    conditional_acceptance,
    expected_accepted,
    survival,
)
from draftsmith.evaluation.guesses import NO_GUESSES, Guesses

_MEMORY = 200.0  # draws that an estimate remembers: about 8 rounds of a batch of 24
_ROW_MEMORY = 50.0
_PRIOR_WEIGHT = 8.0
_ROW_WEIGHT = 4.0  # expected acceptances until a row's own count weighs as much as that of all rows
_UNKNOWN = 0.5  # acceptance where nothing was measured
_LEAST_BELIEF = 0.05  # what was never accepted in a sample is still tried when the rest goes well
_LEAST_LULL = 32  # rounds without drafts teach nothing; after so many at least, one tries again,
_TRY_SHARE = 0.01  # and so rarely that tries cost no more than this share of the time


class _Choice(NamedTuple):
    """Draft positions, tokens copied, and the tree of the drafts; None is a chain."""

    draft: int
    copy: int
    tree: Tree | None


class _Outcome(NamedTuple):
    """A row's round: what it proposed and how much of that was accepted."""

    request_id: str
    proposed: int
    accepted: int


class _Acceptance:
    """Conditional acceptance by position over all rows, and how far each row is from it."""

    def __init__(self, prior: Sequence[float], longest: int) -> None:
        known = [max(_LEAST_BELIEF, share) for share in prior] or [_UNKNOWN]
        self._prior = [known[min(place, len(known) - 1)] for place in range(longest)]
        self._trials = [0.0] * longest
        self._accepted = [0.0] * longest
        self._rows: dict[str, tuple[float, float]] = {}  # expected and observed acceptances

    def conditional(self) -> list[float]:
        """Estimates by position.

        What is learned of a position moves the belief in those behind it, which are tried more
        rarely.
        """
        estimates: list[float] = []
        shift = 1.0  # of the position before, against its prior
        for prior, accepted, trials in zip(self._prior, self._accepted, self._trials, strict=True):
            believed = min(1.0, prior * shift)
            estimates.append((accepted + _PRIOR_WEIGHT * believed) / (trials + _PRIOR_WEIGHT))
            shift = estimates[-1] / prior if prior > 0 else 1.0
        return estimates

    def conditionals(self, request_ids: Sequence[str]) -> list[list[float]]:
        """Estimates by position of each row: those of all rows, moved by the row's own rounds."""
        common = self.conditional()
        rows = []
        for request_id in request_ids:
            expected, observed = self._rows.get(request_id, (0.0, 0.0))
            factor = (observed + _ROW_WEIGHT) / (expected + _ROW_WEIGHT)
            rows.append([min(1.0, share * factor) for share in common])
        return rows

    def survivals(self, request_ids: Sequence[str]) -> list[list[float]]:
        """Survival by position of each row."""
        return [survival(row) for row in self.conditionals(request_ids)]

    def observe(self, outcomes: Sequence[_Outcome]) -> None:
        """Count acceptances by position and by row; older draws fade."""
        common = self.conditional()
        for outcome in outcomes:
            self._observe_row(outcome, common)
        for place in range(len(self._prior)):
            reached = [o.accepted for o in outcomes if place < o.proposed and place <= o.accepted]
            kept = max(0.0, 1.0 - len(reached) / _MEMORY)
            passed = sum(accepted > place for accepted in reached)
            self._trials[place] = self._trials[place] * kept + len(reached)
            self._accepted[place] = self._accepted[place] * kept + passed

    def _observe_row(self, outcome: _Outcome, common: Sequence[float]) -> None:
        expected, observed = self._rows.get(outcome.request_id, (0.0, 0.0))
        reached = min(outcome.accepted + 1, outcome.proposed)
        kept = max(0.0, 1.0 - reached / _ROW_MEMORY)
        self._rows[outcome.request_id] = (
            expected * kept + sum(common[:reached]),
            observed * kept + outcome.accepted,
        )

    def keep_only(self, request_ids: Iterable[str]) -> None:
        """Forget the rows that have left."""
        self._rows = {name: self._rows[name] for name in request_ids if name in self._rows}


class _Lull:
    """Rounds that proposed nothing where they could have; says when to try again."""

    def __init__(self) -> None:
        self._rounds = 0

    def is_over(self, length: int, price: float) -> bool:
        """Whether a round of this length is to be a try; `price` is its cost over none, a share."""
        self._rounds = 0 if length else self._rounds + 1
        if self._rounds < max(_LEAST_LULL, price / _TRY_SHARE):
            return False
        self._rounds = 0
        return True


class AdaptiveLengths:
    """The drafts and copies with the most expected tokens over the cost of the round.

    Args:
        costs: Measured over 1 to as many positions as the widest round verifies.
        limit: Longest draft and copy.
        prior: Survival that is believed before the first round; behind the positions that it holds
            acceptance is taken to stay the same.
        trees: Considered beside chains, cut to the longest draft.
        guesses: What was evaluated of the guesses in them.
    """

    def __init__(
        self,
        costs: RoundCosts,
        limit: Lengths,
        prior: Survival,
        trees: Sequence[Tree] = (),
        guesses: Guesses = NO_GUESSES,
    ) -> None:
        self.limit = limit
        self._costs = costs
        self._trees = AdaptiveTrees(trees, guesses, limit.draft)
        self._drafts = _Acceptance(conditional_acceptance(prior.draft), limit.draft)
        self._copies = _Acceptance(conditional_acceptance(prior.copied), limit.copy)
        self._last: tuple[int, Tree | None] = (0, None)
        self._draft_lull, self._copy_lull = _Lull(), _Lull()

    @property
    def trees(self) -> ChosenTree:
        """What the draft must be given, so that it drafts the tree of the round."""
        return self._trees.chosen

    def choose(self, batch: Batch, copies: Sequence[int], caps: Sequence[int]) -> Lengths:
        """The best for this batch and context; another draft only if it gains."""
        costs = self._costs.at(rows=len(batch), context=batch.span)
        # A request that begins may bear the id of one that has left.
        going = [row.request.request_id for row in batch.rows if row.trace.num_rounds]
        for acceptance in (self._drafts, self._copies):
            acceptance.keep_only(going)
        rates = self._rates(batch, copies, caps, costs)
        best = max(rates, key=rates.__getitem__)
        steady = max(
            (choice for choice in rates if (choice.draft, choice.tree) == self._last),
            key=rates.__getitem__,
            default=best,  # the tree of the last round, which may no longer be whole
        )
        if rates[best] <= rates[steady] * LEAST_GAIN:  # else the choice would flutter
            best = steady
        self._last, self.trees.tree = (best.draft, best.tree), best.tree
        return self._tried(Lengths(best.draft, best.copy), can_copy=any(copies), costs=costs)

    def _tried(self, lengths: Lengths, *, can_copy: bool, costs: ForwardCosts) -> Lengths:
        """The same lengths, or one token where there has been none for long."""
        plain = costs.round_ms(0)
        draft, copy = lengths
        if self.limit.draft and self._draft_lull.is_over(draft, costs.round_ms(1) / plain - 1):
            draft = 1
        if can_copy and self._copy_lull.is_over(copy, costs.round_ms(0, 1) / plain - 1):
            copy = 1
        return Lengths(draft, copy)

    def _rates(
        self, batch: Batch, copies: Sequence[int], caps: Sequence[int], costs: ForwardCosts
    ) -> dict[_Choice, float]:
        """Expected tokens of the batch over the cost of the round, by choice.

        A row that can copy drafts only where the copy length is 0, so it counts apart.
        """
        ids = [row.request.request_id for row in batch.rows]
        rest = [0 if copy else cap for copy, cap in zip(copies, caps, strict=True)]
        copying = expected_accepted(self._copies.survivals(ids), copies, max(copies))
        somebody_drafts = any(rest)
        rates: dict[_Choice, float] = {}
        for draft, tree, accepted, accepted_of_rest in self._drafts_of(ids, caps, rest):
            for copy, copied in enumerate(copying):
                steps, shape = (draft, tree) if not copy or somebody_drafts else (0, None)
                tokens = len(ids) + (accepted_of_rest + copied if copy else accepted)
                cost = costs.round_ms(steps, copy, tree=shape)
                rates[_Choice(draft, copy, tree)] = tokens / cost
        return rates

    def _drafts_of(
        self, ids: Sequence[str], caps: Sequence[int], rest: Sequence[int]
    ) -> Iterator[tuple[int, Tree | None, float, float]]:
        """Every chain and tree, and what is accepted of it: by all rows, and by those in `rest`."""
        rows = self._drafts.conditionals(ids)
        survived, longest = [survival(row) for row in rows], self.limit.draft
        by_all, by_rest = (expected_accepted(survived, each, longest) for each in (caps, rest))
        for length in range(longest + 1):
            yield length, None, by_all[length], by_rest[length]
        of_trees = self._trees.expected(rows, (caps, rest), deepest=min(max(caps), longest))
        for tree, (accepted, accepted_of_rest) in of_trees:
            yield tree.depth, tree, accepted, accepted_of_rest

    def observe(self, batch: Batch) -> None:
        """Learn from the last round of every row."""
        tree = self.trees.tree
        most = self.limit.draft if tree is None else len(tree.spine)
        self._drafts.observe(list(_outcomes(batch, is_copy=False, most=most)))
        self._copies.observe(list(_outcomes(batch, is_copy=True, most=self.limit.copy)))
        self._trees.observe(batch)


def _outcomes(batch: Batch, *, is_copy: bool, most: int) -> Iterable[_Outcome]:
    """What the rows' last rounds proposed, of one kind; positions behind an end do not count.

    Of a tree its first guesses count, `most` of them.
    """
    for row in batch.rows:
        trace = row.trace
        if trace.from_text[-1] != is_copy:
            continue
        proposed, accepted = min(trace.drafted[-1], most), first_guesses(row)
        if trace.committed[-1] <= trace.accepted[-1]:
            proposed = min(proposed, trace.committed[-1])
        yield _Outcome(row.request.request_id, proposed, min(accepted, proposed))
