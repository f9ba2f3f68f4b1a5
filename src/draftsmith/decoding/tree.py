"""Trees of drafts: several guesses of one position, verified together along shared prefixes.

Place 0 of a tree is the row's last committed token, which no cache holds yet; the nodes behind it
are places 1, 2, ... with every parent before its children:

    Tree((0, 0, 1, 1))    0 -+- 1 -+- 3        depths  0 1 1 2 2
                             |     +- 4        ranks     0 1 0 1
                             +- 2

A node's rank says which guess of its position it is. Of guesses that are certain the accepted path
is the one that the target's own draws follow: a guess is kept when it is the token that the target
draws at its parent. That is the sequential rule (accept with the target's probability, else set
that to zero and renormalise), done for all siblings with one draw, so the committed tokens follow
the target exactly whatever was guessed.

Source: Miao et al. 2024 (arXiv 2305.09781), Cai et al. 2024 (arXiv 2401.10774).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.errors import DecodingError


@dataclass(frozen=True)
class Tree:
    """Shape of the drafts of a round, the same for all rows.

    Attributes:
        parents: The parent's place of each node, from place 1 on.

    Raises:
        DecodingError: A parent stands behind its child.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the order."""
        for place, parent in enumerate(self.parents, start=1):
            if not 0 <= parent < place:
                raise DecodingError(
                    "building a tree of drafts",
                    found=f"node {place} with parent {parent}",
                    expected=f"a parent from 0 to {place - 1}",
                    remedy="list parents before their children",
                )

    @classmethod
    def chain(cls, length: int) -> Tree:
        """One guess a position."""
        return cls(tuple(range(length)))

    @classmethod
    def comb(cls, teeth: Sequence[int]) -> Tree:
        """A chain with other guesses beside each of its nodes, which nothing follows.

        Args:
            teeth: Guesses by position, the chain's own included; at least 1.
        """
        parents = list(range(len(teeth)))  # the chain comes first
        for depth, guesses in enumerate(teeth):
            parents += [depth] * (guesses - 1)
        return cls(tuple(parents))

    @property
    def num_nodes(self) -> int:
        """Drafts of a row."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of all places, 0 first."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Most drafts that a round can accept."""
        return max(self.depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """By node: how many of its siblings stand before it."""
        return tuple(self.parents[:node].count(parent) for node, parent in enumerate(self.parents))

    def ranks_along(self, places: Sequence[int]) -> tuple[int, ...]:
        """Ranks of the nodes of a path; it begins at place 0."""
        return tuple(self.ranks[place - 1] for place in places[1:])

    @cached_property
    def guesses(self) -> tuple[int, ...]:
        """By draft position: how many different guesses the nodes there need."""
        needed = [0] * self.depth
        for depth, rank in zip(self.depths[1:], self.ranks, strict=True):
            needed[depth - 1] = max(needed[depth - 1], rank + 1)
        return tuple(needed)

    @cached_property
    def prefixes(self) -> tuple[tuple[int, ...], ...]:
        """By place: the nodes on its path, itself included, as indices of the drafts."""
        prefixes: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents):
            prefixes.append((*prefixes[parent], node))
        return tuple(prefixes)

    @cached_property
    def spine(self) -> tuple[int, ...]:
        """The path of first guesses, as indices of the drafts."""
        path: list[int] = []
        place = 0
        while place in self.parents:
            node = self.parents.index(place)
            path.append(node)
            place = node + 1
        return tuple(path)

    def up_to(self, depth: int) -> Tree:
        """Its nodes of the first draft positions."""
        return self if depth >= self.depth else _cut(self, depth)

    def with_spine(self, length: int) -> Tree:
        """The same with a spine of at least so many nodes; the new ones come last."""
        return self if length <= len(self.spine) else _lengthened(self, length)

    def num_nodes_with(self, length: int) -> int:
        """How many nodes it has with such a spine."""
        return self.num_nodes + max(0, length - len(self.spine))

    def child(self, place: int, token: int, drafts: Sequence[int]) -> int | None:
        """The first child of a place that holds a token; None where none does.

        Args:
            place: Any.
            token: Wanted.
            drafts: Tokens of all nodes.
        """
        for node, parent in enumerate(self.parents):
            if parent == place and drafts[node] == token:
                return node + 1
        return None


@functools.lru_cache(maxsize=256)
def _cut(tree: Tree, depth: int) -> Tree:
    kept = [place for place, at in enumerate(tree.depths) if at <= depth]
    return Tree(tuple(kept.index(tree.parents[place - 1]) for place in kept[1:]))


@functools.lru_cache(maxsize=256)
def _lengthened(tree: Tree, length: int) -> Tree:
    missing = length - len(tree.spine)
    last = tree.spine[-1] + 1 if tree.spine else 0
    return Tree((*tree.parents, last, *range(tree.num_nodes + 1, tree.num_nodes + missing)))


class TreeTensors(NamedTuple):
    """A tree on a device.

    Attributes:
        depths: int64 `[places]`.
        parents: int64 `[nodes]`.
        ranks: int64 `[nodes]`.
        sees: bool `[places, places]`: what each place sees, itself included.
        children: int64 `[places, guesses]`: a place's child of each rank; 0 where it has none.
    """

    depths: Tensor
    parents: Tensor
    ranks: Tensor
    sees: Tensor
    children: Tensor


@functools.lru_cache(maxsize=256)
def tensors_of(tree: Tree, device: torch.device) -> TreeTensors:
    """The tree's tensors, made once."""
    sees = torch.eye(tree.num_nodes + 1, dtype=torch.bool)
    for place, prefix in enumerate(tree.prefixes):
        sees[place, [0, *(node + 1 for node in prefix)]] = True
    parents, ranks = (
        torch.tensor(by_node, dtype=torch.long) for by_node in (tree.parents, tree.ranks)
    )
    children = torch.zeros(tree.num_nodes + 1, max(tree.guesses, default=1), dtype=torch.long)
    children[parents, ranks] = torch.arange(1, tree.num_nodes + 1)
    tensors = torch.tensor(tree.depths), parents, ranks, sees, children
    return TreeTensors(*(tensor.to(device) for tensor in tensors))


def visible_slots(sees: Tensor, positions: Tensor, num_slots: int, window: int | None) -> Tensor:
    """What the places of a tree see of a cache that holds their nodes behind each row's text.

    Args:
        sees: bool `[places, places]`: what each of them sees of the others, itself included.
        positions: int64 `[rows, places]`: where they stand in the texts; place i stands in slot
            `positions[:, 0] + i`.
        num_slots: Slots that are read.
        window: Positions seen at most, the own one included; None is all.

    Returns:
        bool `[rows, 1, places, num_slots]`.
    """
    slots = torch.arange(num_slots, device=positions.device)
    behind = slots - positions[:, :1]  # [rows, slots]
    is_node = (behind >= 0) & (behind < len(sees))
    place = behind.clamp(0, len(sees) - 1)
    visible = torch.where(is_node[:, None], sees.T[place].mT, (behind < 0)[:, None])
    if window is not None:
        position = torch.where(is_node, positions.gather(1, place), slots)
        visible &= position[:, None] > positions[:, :, None] - window
    return visible[:, None]


def follow(drawn: Tensor, drafts: Tensor, counts: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """The path of nodes that hold what the target draws.

    Args:
        drawn: int64 `[rows, places]`: the target's draw at every place.
        drafts: int64 `[rows, nodes]`.
        counts: int64 `[rows]`: a row's longest path.
        tree: Of the drafts.

    Returns:
        int64 `[rows]`: how many nodes are accepted; and int64 `[rows, depth]`: their places, and
        behind them the last one again. The draw at the last one is the next token.
    """
    parents = tensors_of(tree, drafts.device).parents
    place = torch.zeros_like(counts)
    num_accepted, path = torch.zeros_like(counts), []
    for depth in range(1, tree.depth + 1):
        token = drawn.gather(1, place[:, None])
        hits = (drafts == token) & (parents == place[:, None]) & (counts >= depth)[:, None]
        is_hit = hits.any(-1)  # a row that has ended finds nothing at the same place again
        place = torch.where(is_hit, hits.long().argmax(-1) + 1, place)
        num_accepted = num_accepted + is_hit
        path.append(place)
    return num_accepted, torch.stack(path, 1)
