"""What the trees of a pair are expected to commit now, for lengths that adapt.

A tree's first guesses are those of a chain, so what chains teach holds for them. How often another
guess is right where the first is wrong was counted by the evaluate stage, and is moved by how often
one was in the rounds since; with every round some of that is forgotten, so that a tree which fell
out of use is tried again. Knows no costs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from draftsmith.decoding import ChosenTree, Tree
from draftsmith.decoding.batch import Batch, Row
from draftsmith.decoding.steps import bucket
from draftsmith.evaluation.guesses import Guesses

_KEPT = 1 - 1 / 500  # of what was counted, a round
_PRIOR_WEIGHT = 8.0  # expected hits until a count weighs as much as what was evaluated


class AdaptiveTrees:
    """Trees that are considered beside chains.

    Args:
        trees: Those that a pair was measured with; each stands for its first nodes, too.
        guesses: How often each guess of a position is right; trees that hold others are left out.
        longest: Most draft positions.

    Attributes:
        chosen: What the draft is given.
    """

    def __init__(self, trees: Sequence[Tree], guesses: Guesses, longest: int) -> None:
        self._trees = [tree.up_to(longest) for tree in trees if guesses.covers(tree)]
        self.chosen = ChosenTree(max((tree.num_nodes for tree in self._trees), default=0))
        self._beside = [
            [0.0, *(share / (1 - first) if first < 1 else 0.0 for share in others)]
            for first, *others in guesses.shares
        ]
        self._expected = self._observed = 0.0

    def expected(
        self, rows: Sequence[Sequence[float]], caps: Sequence[Sequence[int]], *, deepest: int
    ) -> Iterator[tuple[Tree, list[float]]]:
        """Each tree, in several sizes, and the tokens that rows are expected to accept of it.

        Args:
            rows: Acceptance of first guesses by position, given that those before were right.
            caps: Most draft positions of each row, in several cases; tokens are told for each.
            deepest: Positions that any row may draft.
        """
        beside = self._beside_now()
        for tree in dict.fromkeys(tree.up_to(deepest) for tree in self._trees):
            if sizes := _sizes(tree):
                gains = _gains(tree, rows, caps, beside)
                yield from ((size, gains[:, size.num_nodes - 1].tolist()) for size in sizes)

    def _beside_now(self) -> list[list[float]]:
        """By position and rank: how often a guess is right where the first is not."""
        factor = (self._observed + _PRIOR_WEIGHT) / (self._expected + _PRIOR_WEIGHT)
        return [
            [share * min(factor, 1 / total if total else 1.0) for share in shares]
            for shares in self._beside
            for total in [sum(shares)]
        ]

    def observe(self, batch: Batch) -> None:
        """Learn from a round of the chosen tree; of a chain there is nothing to learn."""
        self._expected, self._observed = self._expected * _KEPT, self._observed * _KEPT
        if self.chosen.tree is None:
            return
        for row in batch.rows:
            if not row.trace.from_text[-1]:
                self._observe_row(row, self.chosen.tree)

    def _observe_row(self, row: Row, tree: Tree) -> None:
        ranks, place = row.trace.ranks[-1], first_guesses(row)
        drafted, committed = row.trace.drafted[-1], row.trace.committed[-1]
        visible = drafted if committed > row.trace.accepted[-1] else min(drafted, committed)
        if place < min(visible, len(tree.spine)):
            parent = tree.parents[tree.spine[place]]
            self._expected += sum(self._beside[place][1 : tree.parents.count(parent)])
            self._observed += place < len(ranks)


def first_guesses(row: Row) -> int:
    """How many drafts of its last round a row accepted before one that was no first guess."""
    trace = row.trace
    ranks = trace.ranks[-1]
    return next((place for place, rank in enumerate(ranks) if rank), trace.accepted[-1])


def _gains(
    tree: Tree,
    rows: Sequence[Sequence[float]],
    caps: Sequence[Sequence[int]],
    beside: Sequence[Sequence[float]],
) -> NDArray[np.float64]:
    """Tokens that rows together accept of a tree's first 1, 2, ... nodes, `[cases, nodes]`.

    Beside the first guesses, too, a position's guesses are taken to be right as often as there.
    """
    firsts, allowed = np.array(rows), np.array(caps)
    reach = [np.ones(len(firsts))]  # by place, `[rows]`
    gains = np.empty((len(allowed), tree.num_nodes))
    nodes = zip(tree.parents, tree.depths[1:], tree.ranks, strict=True)
    for node, (parent, depth, rank) in enumerate(nodes):
        first = firsts[:, depth - 1]
        share = (1 - first) * beside[depth - 1][rank] if rank else first
        reach.append(reach[parent] * share)
        gains[:, node] = (allowed >= depth) @ reach[-1]
    return gains.cumsum(1)


@functools.lru_cache(maxsize=256)
def _sizes(tree: Tree) -> tuple[Tree, ...]:
    """Its first nodes, where they are no chain: at most a half more from size to size."""
    numbers = [n for n in range(2, tree.num_nodes + 1) if n in (bucket(n), tree.num_nodes)]
    trees = [Tree(tree.parents[:number]) for number in numbers]
    return tuple(size for size in trees if max(size.guesses) > 1)
