"""How often each guess of a draft position is right, and the tree that promises most from that.

Measured by decoding with a comb: a chain of the draft with its next best guesses beside it. A tree
is grown node by node, the most probable one next, and each size is priced by the measured costs.

Source: Cai et al. 2024 (arXiv 2401.10774), section 2.3.4; Chen et al. 2024 (arXiv 2402.12374).
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.decoding import NO_TREES, Trace, Tree, TreesByRows
from draftsmith.decoding.trace import of_lossless
from draftsmith.evaluation.choice import entry_of
from draftsmith.evaluation.cost_model import (
    LEAST_GAIN,
    ForwardCosts,
    Rounds,
    Survival,
    conditional_acceptance,
    expected_tokens,
    predicted_speedup,
    speedup_of,
    with_copies,
)


@dataclass(frozen=True)
class Guesses:
    """Shares of rounds, by draft position and rank.

    Attributes:
        shares: Of the rounds whose first guesses before a position were right, those in which its
            guess of each rank is the target's token; ranks of a position sum to at most 1.
        reached: How many rounds these are, by position.
    """

    shares: Sequence[Sequence[float]]
    reached: Sequence[int]

    @classmethod
    def counted(cls, traces: Sequence[Trace], comb: Tree) -> Guesses:
        """Of rounds that drafted this comb; others are left out.

        A round that was trimmed says nothing of the positions behind its last committed token.
        """
        accepted = [[0] * number for number in comb.guesses]
        reached = [0] * comb.depth
        for trace in of_lossless(traces):
            for index, drafted in enumerate(trace.drafted):
                ranks, committed = trace.ranks[index], trace.committed[index]
                visible = drafted if committed > len(ranks) else min(drafted, committed)
                is_of_tree = len(ranks) == trace.accepted[index] and not trace.from_text[index]
                if not is_of_tree or not visible:
                    continue
                for place in range(min(visible, comb.depth, len(ranks) + 1)):
                    if any(ranks[:place]):
                        break  # beside the chain nothing was guessed
                    reached[place] += 1
                    if place < len(ranks):
                        accepted[place][ranks[place]] += 1
        shares = [
            [count / max(total, 1) for count in counts]
            for counts, total in zip(accepted, reached, strict=True)
        ]
        return cls(shares, reached)

    @classmethod
    def recorded(cls, entry: Mapping[str, Any] | None) -> Guesses:
        """As `asdict` and JSON made it; None is nothing."""
        return NO_GUESSES if entry is None else cls(entry["shares"], entry["reached"])

    def covers(self, tree: Tree) -> bool:
        """Whether all guesses of a tree were counted."""
        counted = [len(shares) for shares in self.shares]
        return tree.depth <= len(counted) and all(map(operator.le, tree.guesses, counted))

    def grown(self, max_nodes: int, *, is_comb: bool) -> Iterator[Tree]:
        """Trees of 1, 2, ... nodes, each with the node added that is most probably accepted.

        Args:
            max_nodes: Of the last tree.
            is_comb: Only first guesses have guesses behind them; else every node has those of its
                position, as if what is right at one position said nothing of the next.
        """
        parents: list[int] = []
        # (-probability, age, parent's place, parent's probability, depth, rank)
        open_nodes: list[tuple[float, int, int, float, int, int]] = []
        age = 0

        def offer(parent: int, reach: float, depth: int, rank: int) -> None:
            nonlocal age
            if depth < len(self.shares) and rank < len(self.shares[depth]):
                age += 1
                share = reach * self.shares[depth][rank]
                heapq.heappush(open_nodes, (-share, age, parent, reach, depth, rank))

        offer(0, 1.0, 0, 0)
        while open_nodes and len(parents) < max_nodes:
            negative, _, parent, reach, depth, rank = heapq.heappop(open_nodes)
            if negative == 0.0:
                return
            parents.append(parent)
            offer(parent, reach, depth, rank + 1)
            if rank == 0 or not is_comb:
                offer(len(parents), -negative, depth + 1, 0)
            yield Tree(tuple(parents))

    def expected_tokens(self, tree: Tree) -> float:
        """Tokens of a round that drafts a tree (tau): 1 + what its nodes are accepted with."""
        reach = [1.0]
        for node, parent in enumerate(tree.parents):
            depth, rank = tree.depths[node + 1] - 1, tree.ranks[node]
            reach.append(reach[parent] * self.shares[depth][rank])
        return sum(reach)

    def survival(self, tree: Tree, firsts: Sequence[float]) -> list[float]:
        """Share of a tree's rounds in which 1, 2, ... of its nodes are accepted.

        A guess beside the first is right as often as it was counted where the first is wrong.

        Args:
            tree: One that these cover, no deeper than `firsts`.
            firsts: Acceptance of first guesses by position, given that those before were right.

        Example: of two guesses, one right in half of the rounds and the other in half of the rest,
        one is accepted in three rounds of four.
        """
        reach, found = [1.0], [0.0] * tree.depth
        for parent, depth, rank in zip(tree.parents, tree.depths[1:], tree.ranks, strict=True):
            counted, share = self.shares[depth - 1], firsts[depth - 1]
            if rank:
                wrong = 1 - counted[0]
                share = (1 - share) * counted[rank] / wrong if wrong > 0 else 0.0
            reach.append(reach[parent] * share)
            found[depth - 1] += reach[-1]
        return found


NO_GUESSES = Guesses((), ())


def with_trees(survived: Survival, guesses: Guesses, trees: Sequence[Tree]) -> Survival:
    """The same with the trees whose guesses were counted, as far as survival was measured."""
    firsts = conditional_acceptance(survived.draft)
    known = [tree for tree in trees if guesses.covers(tree) and tree.depth <= len(firsts)]
    return replace(survived, trees={tree: guesses.survival(tree, firsts) for tree in known})


@dataclass(frozen=True)
class TreeLimits:
    """Which trees are tried.

    Attributes:
        max_nodes: Of the largest; 0 is none.
        is_comb: As in `Guesses.grown`.
    """

    max_nodes: int
    is_comb: bool = True


def best_tree(
    guesses: Guesses,
    survived: Survival,
    costs: ForwardCosts,
    limits: TreeLimits,
    *,
    rows: int,
    beat: float,
) -> tuple[Tree | None, float]:
    """The tree that promises most, and its predicted speedup; None where none beats `beat`.

    Args:
        guesses: Measured.
        survived: What is copied from the text.
        costs: Of a batch of so many rows, wide enough for the largest tree beside copies.
        limits: Which trees are tried.
        rows: Requests that are decoded together.
        beat: Predicted speedup of the best chain, which a tree must beat clearly.
    """
    best, best_speedup = None, beat * LEAST_GAIN
    for tree in guesses.grown(limits.max_nodes, is_comb=limits.is_comb):
        if max(tree.guesses) == 1:
            continue  # a chain: its lengths were measured
        rounds = Rounds(guesses.expected_tokens(tree), tree.depth, tree)
        promised = speedup_of(rounds, survived, costs, rows)
        if promised > best_speedup:
            best, best_speedup = tree, promised
    return best, best_speedup if best is not None else beat


@dataclass(frozen=True)
class Drafting:
    """What a batch size drafts.

    Attributes:
        length: Draft positions; 0 is nothing.
        tree: Its shape; None is a chain.
        tau: Expected tokens of a round.
        predicted_speedup: By the measured acceptance and costs.
        copies: Longest copy from the text.
    """

    length: int
    tree: Tree | None
    tau: float
    predicted_speedup: float
    copies: int = 0

    @classmethod
    def chain(
        cls, length: int, survival: Survival, costs: ForwardCosts, *, rows: int = 1
    ) -> Drafting:
        """So many tokens in a row."""
        speedup = predicted_speedup(survival, length, costs, rows)
        tau = expected_tokens(survival, length)
        return cls(length, None, tau, speedup, len(survival.copied))

    @property
    def kind(self) -> str:
        """Chain or tree."""
        return "chain" if self.tree is None else "tree"

    @property
    def parents(self) -> list[int]:
        """The tree as records hold it; empty is a chain."""
        return [] if self.tree is None else list(self.tree.parents)

    def record(self) -> dict[str, Any]:
        """As records hold it."""
        return {
            "draft_length": self.length,
            "tree": self.parents,
            "lookup_length": self.copies,
            "expected_tau": self.tau,
            "predicted_speedup": self.predicted_speedup,
        }


# Not a chain of length 0, in whose rounds a draft still reads what is verified.
NOTHING = Drafting(0, None, 1.0, 1.0)


def tree_beside(
    chain: Drafting,
    survivals: Iterable[Survival],
    *,
    guesses: Guesses,
    costs: ForwardCosts,
    limits: TreeLimits,
    rows: int,
) -> Drafting | None:
    """The tree that promises most, if that is clearly more than a chain does.

    Args:
        chain: What it stands beside; `NOTHING` where no chain pays.
        survivals: What is copied from the text, for each length of copies that is tried.
        guesses: As in `best_tree`.
        costs: Likewise.
        limits: Likewise.
        rows: Likewise.
    """
    beat = chain.predicted_speedup
    found: list[Drafting] = []
    for survived in survivals:
        tree, promised = best_tree(guesses, survived, costs, limits, rows=rows, beat=beat)
        if tree is not None:
            tau = with_copies(guesses.expected_tokens(tree), survived)
            found.append(Drafting(tree.depth, tree, tau, promised, len(survived.copied)))
    return max(found, key=lambda drafting: drafting.predicted_speedup, default=None)


def served_tree(measured: Mapping[str, Any], *, rows: int) -> Tree | None:
    """The tree that a pair drafts at a batch size; None is a chain.

    Args:
        measured: A recipe's entry of reports/benchmark.json; empty where nothing was measured.
        rows: Requests that are decoded together.
    """
    parents = entry_of(measured, rows).get("tree")
    return Tree(tuple(int(parent) for parent in parents)) if parents else None


def measured_trees(measured: Mapping[str, Any], *, rows: int) -> list[Tree]:
    """The trees that were measured best for batches of up to so many rows; arguments as above."""
    sizes = {int(entry["batch_size"]) for entry in measured.get("batch", ())}
    trees = [served_tree(measured, rows=size) for size in sorted({1, *sizes, rows}) if size <= rows]
    return list(dict.fromkeys(tree for tree in trees if tree is not None))


def served_trees(tree: Tree | None, rows: int) -> TreesByRows:
    """A tree as it is served to batches of up to so many rows.

    Where the temperature is above 0 its guesses are drawn: then the first of them is the token that
    a chain would have drafted, and what is counted of a service compares with what was evaluated.
    """
    return NO_TREES if tree is None else TreesByRows({rows: tree}, is_sampled=True)
