"""Who guesses: a draft model, an n-gram lookup in the text so far, the two together, or nobody.

A proposer keeps whatever state it needs by cache row and learns of commits through `observe`. It
never decides what is accepted.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decoding.acceptance import Proposal
from draftsmith.decoding.batch import Batch, Row, pad_prompts, to_device
from draftsmith.decoding.distribution import Dense, Distribution, OneHot, densify
from draftsmith.decoding.draft_length import FixedLengths, LengthPolicy, Lengths
from draftsmith.decoding.drafting import Drafts
from draftsmith.decoding.features import FeatureReader
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.decoding.tree import Tree, tensors_of
from draftsmith.decoding.tree_choice import NO_TREES, Trees


class Proposer(Protocol):
    """What the engine asks of a proposer.

    One that reads the target's features has an attribute `reader`, too: who gets them. One that
    drafts trees has an attribute `trees`.
    """

    max_positions: int

    def reserve(self, *, rows: int, slots: int) -> None:
        """Provide state for so many sequences and tokens."""

    def admit(self, prompts: list[list[int]], *, first_row: int, start: int = 0) -> None:
        """Take in prompts at consecutive rows from `first_row`.

        A long prompt comes in pieces: each call brings all of it so far, of which the tokens before
        position `start` are known. A last token is never read: it begins the next piece or round.
        """

    def propose(self, batch: Batch, counts: list[int]) -> Proposal:
        """Draft `counts[row]` tokens for every row (at least one row drafts)."""

    def observe(self, batch: Batch) -> None:
        """A round is over: the rows' tokens are final; there may be no new ones."""

    def move_row(self, source: int, destination: int) -> None:
        """A row took the place of a retired one."""


def reader_of(proposer: Proposer) -> FeatureReader | None:
    """Who of a proposer wants the target's features; None where nobody does."""
    reader: FeatureReader | None = getattr(proposer, "reader", None)
    return reader


def most_nodes(proposer: Proposer) -> int:
    """Drafts of the largest tree of a proposer; 0 where it drafts chains."""
    trees: Trees = getattr(proposer, "trees", NO_TREES)
    return trees.max_nodes


class NoProposer:
    """Proposes nothing: with it the engine decodes autoregressively."""

    max_positions = 1 << 30

    def reserve(self, *, rows: int, slots: int) -> None:
        """Nothing to keep."""

    def admit(self, prompts: list[list[int]], *, first_row: int, start: int = 0) -> None:
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
        model: The draft; as a `SlotModel` where its steps are to be compiled or captured.
        token_ids: int64 `[entries]`: the target's id of each of the draft's output rows; None is
            the identity.
        trees: Combs to draft: a chain of this draft with other guesses beside it. Of any other tree
            the nodes beside the chain have guesses that were made behind the chain.
    """

    def __init__(
        self,
        model: PreTrainedModel | SlotModel,
        token_ids: Tensor | None = None,
        trees: Trees = NO_TREES,
    ) -> None:
        self._slots = SlotModel.of(model)
        self.trees = trees
        self._token_ids = None if token_ids is None else token_ids.to(self._slots.device)
        self._num_cached: list[int] = []
        self.max_positions = self._slots.max_positions

    def reserve(self, *, rows: int, slots: int) -> None:
        """Provide the draft's cache."""
        self._slots.reserve(rows=rows, slots=slots)
        self._num_cached = [0] * rows

    def admit(self, prompts: list[list[int]], *, first_row: int, start: int = 0) -> None:
        """Prefill all but the last token of every prompt, from position `start` on."""
        heads = [prompt[start:-1] for prompt in prompts]
        for index, head in enumerate(heads):
            self._num_cached[first_row + index] = start + len(head)
        if any(heads):
            tokens, positions = pad_prompts(heads, self._slots.device, start=start)
            span = start + tokens.shape[1]
            self._slots.forward(tokens, positions, span=span, first_row=first_row, keep=0)

    def propose(self, batch: Batch, counts: list[int]) -> Proposal:
        """Draft token by token, all rows together.

        The first step is at least two wide: after a full accept the last draft's key and value are
        not in the cache yet. It is wider when rounds without drafts left more tokens behind.
        """
        missing = (len(r.token_ids) - c for r, c in zip(batch.rows, self._num_cached, strict=False))
        tokens, positions = batch.tail(max(2, *missing))
        drafts = Drafts(batch, self._token_ids, counts, self.trees)
        for step in range(drafts.num_steps):
            span = batch.span + step
            logits = self._slots.forward(tokens, positions, span=span, keep=1).float()
            positions = positions[:, -1:] + 1
            tokens = drafts.draw(logits, positions)
        for index, (row, count) in enumerate(zip(batch.rows, counts, strict=True)):
            # Which of a tree's guesses is accepted is not known here, so none is counted.
            num_drafts = max(count - 1, 0) if drafts.tree is None else 0
            self._num_cached[index] = len(row.token_ids) + num_drafts
        return drafts.proposal()

    def observe(self, batch: Batch) -> None:
        """Forget the drafts behind the committed tokens, whose last one is never cached."""
        for index, row in enumerate(batch.rows):
            self._num_cached[index] = min(self._num_cached[index], len(row.token_ids) - 1)

    def move_row(self, source: int, destination: int) -> None:
        """Move the cache row and its length."""
        self._slots.move_row(source, destination)
        self._num_cached[destination] = self._num_cached[source]


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

    def admit(self, prompts: list[list[int]], *, first_row: int, start: int = 0) -> None:
        """Nothing to keep."""

    def propose(self, batch: Batch, counts: list[int]) -> Proposal:
        """Up to `counts[row]` tokens; fewer, or none, where nothing matches."""
        found = self.find(batch, counts)
        return _copied(batch, found) if any(found) else empty_proposal(batch)

    def find(self, batch: Batch, counts: list[int]) -> list[list[int]]:
        """What followed in every row's text; empty where nothing matches or nothing is asked."""
        return [
            self._lookup(row, count) if count else []
            for row, count in zip(batch.rows, counts, strict=True)
        ]

    def _lookup(self, row: Row, count: int) -> list[int]:
        for size in self._sizes:
            place = row.ngrams.find(row.token_ids, size)
            if place is not None:
                return row.token_ids[place : place + count]
        return []

    def observe(self, batch: Batch) -> None:
        """Nothing to keep."""

    def move_row(self, source: int, destination: int) -> None:
        """Nothing to keep."""


def _copied(batch: Batch, found: list[list[int]]) -> Proposal:
    """Drafts that were copied from the rows' texts, at least one of them."""
    tokens = _padded(batch, found)
    lengths = to_device([len(drafts) for drafts in found], batch.device)
    rows = frozenset(index for index, drafts in enumerate(found) if drafts)
    return Proposal(tokens, OneHot(tokens), lengths, from_text=rows)


def _padded(batch: Batch, found: list[list[int]]) -> Tensor:
    width = max(map(len, found))
    return to_device([f + [0] * (width - len(f)) for f in found], batch.device)


def _num_rounds(batch: Batch) -> int:
    """Rounds that the rows have behind them."""
    return sum(row.trace.num_rounds for row in batch.rows)


class LookupFirstProposer:
    """Copies from the text where its last words occurred before, and asks the draft elsewhere.

    Copies cost no draft step and are right more often than a small draft, so a longer one is worth
    its place in the verification.

    Args:
        draft: Drafts where nothing matches.
        lengths: Who decides how long drafts and copies are.
        min_ngram: Shortest suffix that is looked up; of one word alone the draft knows more.
    """

    def __init__(self, draft: Proposer, lengths: LengthPolicy, *, min_ngram: int = 2) -> None:
        self._draft = draft
        self.reader = reader_of(draft)
        self._lengths = lengths
        self._lookup = PromptLookupProposer(min_ngram=min_ngram)
        self._num_rounds = 0
        self.max_positions = draft.max_positions

    def reserve(self, *, rows: int, slots: int) -> None:
        """Provide the draft's cache."""
        self._draft.reserve(rows=rows, slots=slots)

    def admit(self, prompts: list[list[int]], *, first_row: int, start: int = 0) -> None:
        """Let the draft read the prompts."""
        self._draft.admit(prompts, first_row=first_row, start=start)

    def propose(self, batch: Batch, counts: list[int]) -> Proposal:
        """Copies where there are any, guesses elsewhere, each as long as the policy says."""
        self._num_rounds = _num_rounds(batch)
        longest = self._lengths.limit.copy
        found = self._lookup.find(batch, [min(count, longest) for count in counts])
        chosen = self._lengths.choose(batch, [len(copy) for copy in found], counts)
        found = [copy[: chosen.copy] for copy in found]
        rest = [
            0 if copy else min(count, chosen.draft)
            for copy, count in zip(found, counts, strict=True)
        ]
        if not any(rest):
            return self._copied(batch, found) if any(found) else empty_proposal(batch)
        drafted = self._draft.propose(batch, rest)
        if not any(found):
            return drafted
        if drafted.tree is None:
            return _merged(batch, found, drafted)
        return _with_copies(batch, found, drafted, drafted.tree)

    @property
    def trees(self) -> Trees:
        """Those of the draft."""
        trees: Trees = getattr(self._draft, "trees", NO_TREES)
        return trees

    def _copied(self, batch: Batch, found: list[list[int]]) -> Proposal:
        """Copies alone; as a tree where it may be one, so that neighbours change no row's rule."""
        copied = _copied(batch, found)
        if self.trees.max_nodes == 0 or self.trees.is_sampled:
            return copied  # a copy is tried by the same rule in a chain and in a sampled tree
        return dataclasses.replace(copied, tree=Tree.chain(copied.tokens.shape[1]))

    def observe(self, batch: Batch) -> None:
        """Tell the draft, and who decides the lengths; not of a round that a fault undid."""
        self._draft.observe(batch)
        if _num_rounds(batch) > self._num_rounds:
            self._lengths.observe(batch)

    def move_row(self, source: int, destination: int) -> None:
        """Move the draft's state."""
        self._draft.move_row(source, destination)


def with_lookup(draft: Proposer, draft_length: int, lookup_length: int) -> tuple[Proposer, int]:
    """The proposer of a served pair, and the draft length that its engine needs.

    Where nothing is drafted, nobody reads the prompts for it either.

    Args:
        draft: The pair's draft.
        draft_length: Longest draft of the model.
        lookup_length: Longest copy from the text; 0 never copies.
    """
    if draft_length == 0:
        return NoProposer(), 0
    if lookup_length == 0:
        return draft, draft_length
    lengths = Lengths(draft_length, lookup_length)
    return LookupFirstProposer(draft, FixedLengths(lengths)), max(lengths)


def _with_copies(batch: Batch, found: list[list[int]], drafted: Proposal, tree: Tree) -> Proposal:
    """A tree along whose spine some rows have copies, which are certain.

    In such a row every node has the copy's token of its position: beside the spine nothing is left
    to be kept, as in a row that copies alone.
    """
    longer = tree.with_spine(max(map(len, found)))
    rows = [index for index, copy in enumerate(found) if copy]
    places = to_device(rows, batch.device)
    copies = _padded(batch, [found[row] + [0] * (longer.depth - len(found[row])) for row in rows])
    depths = tensors_of(longer, batch.device).depths[1:]
    tokens = torch.nn.functional.pad(drafted.tokens, (0, longer.num_nodes - tree.num_nodes))
    tokens = tokens.index_copy(0, places, copies[:, depths - 1])
    lengths = to_device([len(found[row]) for row in rows], batch.device)
    counts = drafted.counts.index_copy(0, places, lengths)
    drawn_from: Distribution = OneHot(tokens)
    if isinstance(drafted.drawn_from, Dense):
        drawn_from = _certain_rows(batch, drafted.drawn_from, places, copies)
    return dataclasses.replace(
        drafted,
        tokens=tokens,
        drawn_from=drawn_from,
        counts=counts,
        entries=None,
        from_text=frozenset(rows),
        tree=longer,
    )


def _merged(batch: Batch, found: list[list[int]], drafted: Proposal) -> Proposal:
    """Copies in the rows that have one, guesses in the others."""
    width = max(drafted.tokens.shape[1], *map(len, found))
    rows = [index for index, copy in enumerate(found) if copy]
    # An index of the host would make the device wait, so it is a tensor there.
    places = to_device(rows, batch.device)
    copies = _padded(batch, [found[row] + [0] * (width - len(found[row])) for row in rows])
    lengths = to_device([len(found[row]) for row in rows], batch.device)
    tokens = torch.nn.functional.pad(drafted.tokens, (0, width - drafted.tokens.shape[1]))
    tokens = tokens.index_copy(0, places, copies)
    counts = drafted.counts.index_copy(0, places, lengths)
    drawn_from: Distribution = OneHot(tokens)
    if isinstance(drafted.drawn_from, Dense):
        drawn_from = _certain_rows(batch, drafted.drawn_from, places, copies)
    return Proposal(tokens, drawn_from, counts, from_text=frozenset(rows))


def _certain_rows(batch: Batch, laws: Dense, places: Tensor, copies: Tensor) -> Dense:
    """Laws of the drafts, by row, in which copies `[copying rows, width]` are certain.

    Copies may lie outside a trimmed vocabulary, so the rows share the whole one.
    """
    probs = densify(laws, batch.vocab_size, laws.probs.dtype)
    width = max(probs.shape[1], copies.shape[1])
    probs = torch.nn.functional.pad(probs, (0, 0, 0, width - probs.shape[1]))
    certain = densify(OneHot(copies), batch.vocab_size, probs.dtype)
    certain = torch.nn.functional.pad(certain, (0, 0, 0, width - certain.shape[1]))
    return Dense(probs.index_copy(0, places, certain))
