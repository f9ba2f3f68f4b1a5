"""Drafts of one round as they come: a token of every row a step, drawn from a draft's logits.

Shared by all proposers that draft with a model. Knows nothing of the model or of its cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.decoding.acceptance import Proposal
from draftsmith.decoding.batch import Batch, to_device
from draftsmith.decoding.distribution import Dense, OneHot, distribution, sample
from draftsmith.decoding.randomness import uniform
from draftsmith.decoding.tree import Tree
from draftsmith.decoding.tree_choice import NO_TREES, Trees


class Drafts:
    """What was drafted so far in a round.

    Args:
        batch: The rows.
        token_ids: int64 `[entries]`: the target's id of each of the draft's output rows; None is
            the identity.
        counts: Drafts that each row wants.
        trees: Of a tree a position's guesses are its most probable tokens, or are drawn where the
            row's temperature is above 0 and the trees are sampled; drafting goes on behind the
            first. Of a chain a position's token is drawn.

    Attributes:
        tree: Shape of the drafts; None is a chain.
        counts: Drafts that each row gets.
    """

    def __init__(
        self,
        batch: Batch,
        token_ids: Tensor | None,
        counts: list[int],
        trees: Trees = NO_TREES,
    ) -> None:
        self._batch, self._token_ids = batch, token_ids
        tree = trees.choose(len(batch), max(counts))
        # First guesses go as deep as the tree: then they tell what a chain would have, and rows
        # that copy add no node at a position that others draft.
        self.tree = None if tree is None else tree.with_spine(tree.depth)
        self._is_sampled = trees.is_sampled and not batch.sampling.is_greedy
        greedy = [row.request.params.temperature == 0 for row in batch.rows]
        self._certain: Tensor | None = None
        if self._is_sampled and any(greedy):
            self._certain = to_device(greedy, batch.device, torch.bool)
        self.counts = counts
        if self.tree is not None:
            self.counts = [min(count, self.tree.depth) for count in counts]
        self._guesses: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._entries: list[Tensor] = []
        self._dists: list[OneHot | Dense] = []

    def draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Draw the next token of every row.

        Args:
            logits: float32 `[rows, 1, entries]`.
            positions: int64 `[rows, 1]`: where the tokens will stand in the texts.

        Returns:
            int64 `[rows, 1]`, ids of the target's vocabulary.
        """
        batch = self._batch
        so_far = torch.cat(self._tokens, 1) if self._tokens else positions[:, :0]
        logits = batch.adjust(logits, so_far, self._token_ids)
        if self.tree is not None:
            wanted = min(self.tree.guesses[len(self._guesses)], logits.shape[-1])
            if not self._is_sampled:
                return self._guess(_most_probable(logits, wanted))
            entries = self._siblings(logits, positions, wanted)
            if self._certain is not None:
                certain = _most_probable(logits, wanted)
                entries = torch.where(self._certain[:, None], certain, entries)
            return self._guess(entries)
        dist = distribution(logits, batch.sampling, self._token_ids)
        entry, tokens = _draw(dist, uniform(batch.keys[:, None], positions, batch.draft_purpose))
        self._tokens.append(tokens)
        self._entries.append(entry)
        self._dists.append(dist)
        return tokens

    def _guess(self, entries: Tensor) -> Tensor:
        """Keep a position's guesses `[rows, guesses]`; drafting goes on behind the first."""
        self._guesses.append(entries)
        first = entries[:, :1]
        self._tokens.append(first if self._token_ids is None else self._token_ids[first])
        return self._tokens[-1]

    def _siblings(self, logits: Tensor, positions: Tensor, wanted: int) -> Tensor:
        """Entries of a position drawn without replacement, int64 `[rows, wanted]`."""
        batch = self._batch
        dist = distribution(logits, batch.sampling, self._token_ids)
        assert isinstance(dist, Dense), "a greedy batch has certain guesses"
        self._dists.append(dist)
        left, drawn = dist.probs.clone(), []
        for rank in range(wanted):
            numbers = uniform(batch.keys[:, None], positions, batch.draft_purpose, rank)
            drawn.append(sample(left, numbers))
            left.scatter_(-1, drawn[-1][..., None], 0.0)
        return torch.cat(drawn, 1)

    @property
    def num_steps(self) -> int:
        """Positions to draft."""
        return max(self.counts)

    def proposal(self) -> Proposal:
        """All of them."""
        counted = to_device(self.counts, self._batch.device)
        if self.tree is not None:
            return self._tree_proposal(self.tree, counted)
        drawn_from = _concatenate(self._dists)
        return Proposal(
            torch.cat(self._tokens, 1), drawn_from, counted, torch.cat(self._entries, 1)
        )

    def _tree_proposal(self, tree: Tree, counts: Tensor) -> Proposal:
        nodes = zip(tree.depths[1:], tree.ranks, strict=True)
        guesses = [(self._guesses[depth - 1], rank) for depth, rank in nodes]
        # A vocabulary smaller than the number of guesses gives its last one again.
        entries = torch.stack([best[:, min(rank, best.shape[1] - 1)] for best, rank in guesses], 1)
        tokens = entries if self._token_ids is None else self._token_ids[entries]
        if not self._is_sampled:
            return Proposal(tokens, OneHot(tokens), counts, entries, tree=tree)
        laws = _concatenate(self._dists)
        return Proposal(tokens, laws, counts, entries, tree=tree, certain=self._certain)


def _most_probable(logits: Tensor, wanted: int) -> Tensor:
    """Entries of a position, int64 `[rows, wanted]`, the best first."""
    return logits[:, -1].topk(wanted).indices


def _draw(dist: OneHot | Dense, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Entry in the draft's vocabulary and id in the target's, int64 `[rows, 1]` each."""
    if isinstance(dist, OneHot):
        return dist.ids, dist.ids
    entry = sample(dist.probs, uniforms)
    return entry, entry if dist.token_ids is None else dist.token_ids[entry]


def _concatenate(dists: list[OneHot | Dense]) -> OneHot | Dense:
    """Join single positions; all are of one kind: greedy or not is a property of the batch."""
    first = dists[0]
    if isinstance(first, OneHot):
        return OneHot(torch.cat([d.ids for d in dists if isinstance(d, OneHot)], 1))
    probs = torch.cat([d.probs for d in dists if isinstance(d, Dense)], 1)
    return Dense(probs, first.token_ids)
