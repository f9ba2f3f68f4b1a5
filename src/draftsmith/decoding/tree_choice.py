"""Which tree a round drafts: the seam for who decides, as `draft_length` is for lengths.

Whoever decides does so before anything of the round is sampled, so the output keeps the target's
law.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from draftsmith.decoding.tree import Tree


class Trees(Protocol):
    """Who decides."""

    @property
    def is_sampled(self) -> bool:
        """Whether guesses are drawn without replacement where the temperature is above 0.

        Else they are the most probable ones.
        """

    @property
    def max_nodes(self) -> int:
        """Of the largest tree that is ever chosen; 0 is chains alone."""

    def choose(self, rows: int, depth: int) -> Tree | None:
        """The tree of so many rows, cut to so many draft positions; None is a chain."""


@dataclass(frozen=True)
class TreesByRows:
    """The same trees in every round: verifying a node costs more, the more rows there are.

    Attributes:
        by_rows: Rows -> tree; a batch takes that of the next number that is not below its own, and
            drafts a chain where there is none.
        is_sampled: As in `Trees`.
    """

    by_rows: Mapping[int, Tree]
    is_sampled: bool = False

    def choose(self, rows: int, depth: int) -> Tree | None:
        """The tree of so many rows."""
        tree = self.by_rows.get(min((n for n in self.by_rows if n >= rows), default=0))
        return None if tree is None else tree.up_to(depth)

    @property
    def max_nodes(self) -> int:
        """Of the largest tree."""
        return max((tree.num_nodes for tree in self.by_rows.values()), default=0)


NO_TREES = TreesByRows({})


@dataclass
class ChosenTree:
    """Another tree in every round: a policy of lengths names it when it chooses those of the round.

    Attributes:
        max_nodes: Of the largest that is ever named.
        tree: That of the round which begins; None is a chain.
        is_sampled: As in `Trees`.
    """

    max_nodes: int
    tree: Tree | None = None
    is_sampled: bool = True

    def choose(self, rows: int, depth: int) -> Tree | None:  # noqa: ARG002  the protocol's
        """The tree that was named."""
        return None if self.tree is None else self.tree.up_to(depth)
