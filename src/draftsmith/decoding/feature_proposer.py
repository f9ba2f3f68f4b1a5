"""Drafts with a head that reads the target's features (EAGLE-3), as a chain.

Entry t of the head joins the feature of position t with token t + 1 and predicts token t + 2. So it
needs no feature of the last committed token, which the target has not read yet:

    text of 5 tokens    x0 x1 x2 x3 x4      features f0..f3 (x4 begins the next verification)
    entries             (f0, x1) (f1, x2) (f2, x3) (f3, x4) -> first draft d5, own feature g3
    next draft          (g3, d5) -> d6, own feature g4

Features come from the target's verification and prefill, no forward is run for them. Keys and
values of entries with own features are never counted as known: the next round writes them again
from true features.

Source: Li et al. 2025 (arXiv 2503.01840), section 3.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decoding.acceptance import Proposal
from draftsmith.decoding.batch import Batch, pad_prompts
from draftsmith.decoding.drafting import Drafts
from draftsmith.decoding.features import FeatureStore
from draftsmith.decoding.proposers import empty_proposal
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.decoding.tree_choice import NO_TREES, Trees


class FeatureHead(Protocol):
    """What is asked of the head besides a forward of `input_ids` and `features`."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers that it reads the inputs of."""

    def fuse(self, features: Tensor) -> Tensor:
        """One feature a position, `[..., hidden]`, from those of all layers."""


class FeatureProposer:
    """Drafts with a head on the target's features; where a text has one token it drafts nothing.

    Args:
        model: The head, as a model that `SlotModel` can drive.
        head: The same head.
        token_ids: int64 `[entries]`: the target's id of each of the draft's output rows; None is
            the identity.
        trees: Combs to draft; see `DraftModelProposer`.

    Attributes:
        reader: The proposer itself.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: FeatureHead,
        token_ids: Tensor | None = None,
        trees: Trees = NO_TREES,
    ) -> None:
        self._slots = SlotModel(model)
        self._head = head
        self._token_ids = None if token_ids is None else token_ids.to(self._slots.device)
        self._features = FeatureStore()
        self._num_cached: list[int] = []  # entries with true features, by row
        self.reader, self.trees = self, trees
        self.feature_layers = head.feature_layers
        self.max_positions = self._slots.max_positions

    def reserve(self, *, rows: int, slots: int) -> None:
        """Provide the head's cache and the features' slots; larger ones are kept."""
        self._slots.reserve(rows=rows, slots=slots)
        self._features.reserve(rows=rows, slots=slots)
        self._num_cached = [0] * rows

    def read(self, features: Tensor, positions: Tensor, *, first_row: int) -> None:
        """Keep the fused features of a forward of the target."""
        self._features.put(self._head.fuse(features), positions, first_row=first_row)

    def move_slots(self, rows: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Move the features of an accepted path of a tree to its positions."""
        self._features.move_slots(rows, sources, destinations)

    def admit(self, prompts: list[list[int]], *, first_row: int, start: int = 0) -> None:
        """Prefill the entries whose tokens are known, but for the last one, which begins a round.

        A piece of a prompt begins one entry before its first position: that entry lacked a token.
        """
        begin = max(start - 1, 0)
        heads = [prompt[begin + 1 : -1] for prompt in prompts]
        for index, head in enumerate(heads):
            self._num_cached[first_row + index] = begin + len(head)
        if any(heads):
            tokens, entries = pad_prompts(heads, self._slots.device, start=begin)
            span = begin + tokens.shape[1]
            features = self._features.get(entries, first_row=first_row)
            self._slots.run(
                tokens, entries, span=span, first_row=first_row, keep=0, features=features
            )

    def propose(self, batch: Batch, counts: list[int]) -> Proposal:
        """Draft token by token, all rows together; the first step reads what was committed."""
        counts = [
            count if len(row.token_ids) > 1 else 0
            for row, count in zip(batch.rows, counts, strict=True)
        ]
        if not any(counts):
            return empty_proposal(batch)
        lengths = [len(row.token_ids) for row in batch.rows]
        missing = (n - 1 - known for n, known in zip(lengths, self._num_cached, strict=False))
        tokens, positions = batch.tail(max(1, *missing), least=1)
        entries = (positions - 1).clamp(min=0)
        features = self._features.get(entries)
        drafts = Drafts(batch, self._token_ids, counts, self.trees)
        for step in range(drafts.num_steps):
            span = max(batch.span - 1, 1) + step
            output = self._slots.run(tokens, entries, span=span, keep=1, features=features)
            positions = positions[:, -1:] + 1
            tokens = drafts.draw(output.logits.float(), positions)
            features, entries = output.features, entries[:, -1:] + 1
        self._num_cached[: len(batch)] = [n - 1 for n in lengths]
        return drafts.proposal()

    def observe(self, batch: Batch) -> None:
        """Nothing to forget: entries of drafts were never counted."""

    def move_row(self, source: int, destination: int) -> None:
        """Move the cache row, its features and its length."""
        self._slots.move_row(source, destination)
        self._features.move_row(source, destination)
        self._num_cached[destination] = self._num_cached[source]
