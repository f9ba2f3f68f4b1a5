"""Who guesses: a draft model, an n-gram lookup in the text so far, or nobody.

A proposer keeps whatever state it needs by cache row and learns of commits through `observe`. It
never decides what is accepted.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decoding.acceptance import Proposal
from draftsmith.decoding.batch import Batch, pad_prompts
from draftsmith.decoding.distribution import Dense, OneHot, distribution, sample
from draftsmith.decoding.randomness import Purpose, uniform
from draftsmith.decoding.slot_model import SlotModel


class Proposer(Protocol):
    """What the engine asks of a proposer."""

    max_positions: int

    def reserve(self, *, rows: int, slots: int) -> None:
        """Provide state for so many sequences and tokens."""

    def admit(self, prompts: list[list[int]], *, first_row: int) -> None:
        """Take in prompts at consecutive rows from `first_row`."""

    def propose(self, batch: Batch, counts: list[int]) -> Proposal:
        """Draft `counts[row]` tokens for every row (at least one row drafts)."""

    def observe(self, batch: Batch) -> None:
        """A round was committed: the rows' tokens are final."""

    def move_row(self, source: int, destination: int) -> None:
        """A row took the place of a retired one."""


class NoProposer:
    """Proposes nothing: with it the engine decodes autoregressively."""

    max_positions = 1 << 30

    def reserve(self, *, rows: int, slots: int) -> None:
        """Nothing to keep."""

    def admit(self, prompts: list[list[int]], *, first_row: int) -> None:
        """Nothing to keep."""

    def propose(self, batch: Batch, counts: list[int]) -> Proposal:  # noqa: ARG002  the protocol's
        """Empty drafts."""
        return empty_proposal(batch)

    def observe(self, batch: Batch) -> None:
        """Nothing to keep."""

    def move_row(self, source: int, destination: int) -> None:
        """Nothing to keep."""


def empty_proposal(batch: Batch) -> Proposal:
    """A proposal of no drafts."""
    none = torch.empty(len(batch), 0, dtype=torch.long, device=batch.device)
    return Proposal(none, OneHot(none), none.sum(1))


class DraftModelProposer:
    """Drafts with a causal LM over the target's vocabulary or a part of it.

    Args:
        model: The draft.
        token_ids: int64 `[entries]`: the target's id of each of the draft's output rows; None is
            the identity.
    """

    def __init__(self, model: PreTrainedModel, token_ids: Tensor | None = None) -> None:
        self._slots = SlotModel(model)
        self._token_ids = None if token_ids is None else token_ids.to(self._slots.device)
        self._num_cached: list[int] = []
        self.max_positions = self._slots.max_positions

    def reserve(self, *, rows: int, slots: int) -> None:
        """Provide the draft's cache."""
        self._slots.reserve(rows=rows, slots=slots)
        self._num_cached = [0] * rows

    def admit(self, prompts: list[list[int]], *, first_row: int) -> None:
        """Prefill all but the last token of every prompt."""
        heads = [prompt[:-1] for prompt in prompts]
        for index, head in enumerate(heads):
            self._num_cached[first_row + index] = len(head)
        if any(heads):
            tokens, positions = pad_prompts(heads, self._slots.device)
            span = tokens.shape[1]
            self._slots.forward(tokens, positions, span=span, first_row=first_row, keep=0)

    def propose(self, batch: Batch, counts: list[int]) -> Proposal:
        """Draft token by token, all rows together.

        The first step is at least two wide: after a full accept the last draft's key and value are
        not in the cache yet. It is wider when rounds without drafts left more tokens behind.
        """
        num_drafts = max(counts)
        missing = (len(r.token_ids) - c for r, c in zip(batch.rows, self._num_cached, strict=False))
        tokens, positions = batch.tail(max(2, *missing))
        drafts: list[Tensor] = []
        entries: list[Tensor] = []
        dists: list[OneHot | Dense] = []
        for step in range(num_drafts):
            span = batch.span + step
            logits = self._slots.forward(tokens, positions, span=span, keep=1).float()
            dist = distribution(logits, batch.sampling, self._token_ids)
            positions = positions[:, -1:] + 1
            entry, tokens = self._draw(dist, uniform(batch.keys[:, None], positions, Purpose.DRAFT))
            drafts.append(tokens)
            entries.append(entry)
            dists.append(dist)
        for index, row in enumerate(batch.rows):
            self._num_cached[index] = len(row.token_ids) + num_drafts - 1
        counted = torch.tensor(counts, device=batch.device)
        return Proposal(torch.cat(drafts, 1), _concatenate(dists), counted, torch.cat(entries, 1))

    def _draw(self, dist: OneHot | Dense, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Entry in the draft's vocabulary and id in the target's, int64 `[rows, 1]` each."""
        if isinstance(dist, OneHot):
            return dist.ids, dist.ids
        entry = sample(dist.probs, uniforms)
        return entry, entry if dist.token_ids is None else dist.token_ids[entry]

    def observe(self, batch: Batch) -> None:
        """Forget the drafts behind the committed tokens, whose last one is never cached."""
        for index, row in enumerate(batch.rows):
            self._num_cached[index] = min(self._num_cached[index], len(row.token_ids) - 1)

    def move_row(self, source: int, destination: int) -> None:
        """Move the cache row and its length."""
        self._slots.move_row(source, destination)
        self._num_cached[destination] = self._num_cached[source]


def _concatenate(dists: list[OneHot | Dense]) -> OneHot | Dense:
    """Join single positions; all are of one kind: greedy or not is a property of the batch."""
    first = dists[0]
    if isinstance(first, OneHot):
        return OneHot(torch.cat([d.ids for d in dists if isinstance(d, OneHot)], 1))
    probs = torch.cat([d.probs for d in dists if isinstance(d, Dense)], 1)
    return Dense(probs, first.token_ids)


class PromptLookupProposer:
    """Drafts what followed the last occurrence of the current n-gram: the free baseline.

    Source: Saxena 2023, prompt lookup decoding.

    Args:
        max_ngram: Longest suffix that is looked up; shorter ones follow down to `min_ngram`.
        min_ngram: Shortest suffix.
    """

    max_positions = 1 << 30

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)

    def reserve(self, *, rows: int, slots: int) -> None:
        """Nothing to keep: the text so far is in the batch."""

    def admit(self, prompts: list[list[int]], *, first_row: int) -> None:
        """Nothing to keep."""

    def propose(self, batch: Batch, counts: list[int]) -> Proposal:
        """Up to `counts[row]` tokens; fewer, or none, where nothing matches."""
        found = [
            self._lookup(row.token_ids, count) if count else []
            for row, count in zip(batch.rows, counts, strict=True)
        ]
        width = max(len(drafts) for drafts in found)
        if width == 0:
            return empty_proposal(batch)
        tokens = torch.tensor([f + [0] * (width - len(f)) for f in found], device=batch.device)
        lengths = torch.tensor([len(f) for f in found], device=batch.device)
        return Proposal(tokens, OneHot(tokens), lengths)

    def _lookup(self, token_ids: list[int], count: int) -> list[int]:
        for size in self._sizes:
            suffix = token_ids[-size:]
            for start in range(len(token_ids) - size - 1, -1, -1):
                if token_ids[start : start + size] == suffix:
                    return token_ids[start + size : start + size + count]
        return []

    def observe(self, batch: Batch) -> None:
        """Nothing to keep."""

    def move_row(self, source: int, destination: int) -> None:
        """Nothing to keep."""
