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


class Drafts:
    """What was drafted so far in a round.

    Args:
        batch: The rows.
        token_ids: int64 `[entries]`: the target's id of each of the draft's output rows; None is
            the identity.
    """

    def __init__(self, batch: Batch, token_ids: Tensor | None) -> None:
        self._batch, self._token_ids = batch, token_ids
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
        dist = distribution(logits, batch.sampling, self._token_ids)
        entry, tokens = _draw(dist, uniform(batch.keys[:, None], positions, batch.draft_purpose))
        self._tokens.append(tokens)
        self._entries.append(entry)
        self._dists.append(dist)
        return tokens

    def proposal(self, counts: list[int]) -> Proposal:
        """All of them, of which `counts[row]` count."""
        counted = to_device(counts, self._batch.device)
        drawn_from = _concatenate(self._dists)
        return Proposal(
            torch.cat(self._tokens, 1), drawn_from, counted, torch.cat(self._entries, 1)
        )


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
