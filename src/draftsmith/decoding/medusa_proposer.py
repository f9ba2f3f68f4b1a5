"""Drafts with heads on the target's last hidden state (Medusa-1).

Head k predicts the token k places behind the one that the state's own output head predicts:

    text of 4 tokens    x0 x1 x2 x3     states h0 h1 h2 (x3 begins the next verification)
    h2                  the target drew x3 from it; head 1 -> x4, head 2 -> x5, ...

States come from the target's verification and prefill, and no head reads a draft. So a round needs
no forward of a model, and a position's law does not depend on the drafts before it: the logits of
all positions are one product, and in a tree every node may have the guesses of its position behind
it. Penalties do depend on drafts, so these are drawn in turn.

Source: Cai et al. 2024 (arXiv 2401.10774), section 2.1.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftsmith.decoding.acceptance import Proposal
from draftsmith.decoding.batch import Batch
from draftsmith.decoding.drafting import Drafts
from draftsmith.decoding.features import FeatureStore
from draftsmith.decoding.proposers import empty_proposal
from draftsmith.decoding.tree_choice import NO_TREES, Trees


class Heads(Protocol):
    """What is asked of the heads."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The index that stands for the target's last hidden state."""

    @property
    def num_heads(self) -> int:
        """Positions that they can draft."""

    def run(self, hidden: Tensor, num_heads: int) -> Tensor:
        """States of the first heads, `[rows, heads, hidden]`, from `[rows, hidden]`."""

    def logits(self, states: Tensor) -> Tensor:
        """What they predict, `[rows, heads, entries]`."""


class MedusaProposer:
    """Drafts with heads on the target's state; where a text has one token it drafts nothing.

    Args:
        heads: On the device of the target.
        token_ids: int64 `[entries]`: the target's id of each of the draft's output rows; None is
            the identity.
        trees: What to draft instead of chains.

    Attributes:
        reader: The proposer itself.
    """

    max_positions = 1 << 30

    def __init__(
        self, heads: Heads, token_ids: Tensor | None = None, trees: Trees = NO_TREES
    ) -> None:
        self._heads = heads
        self._token_ids = token_ids
        self._states = FeatureStore()
        self.reader, self.trees = self, trees
        self.feature_layers = heads.feature_layers

    def reserve(self, *, rows: int, slots: int) -> None:
        """Provide the states' slots; larger ones are kept."""
        self._states.reserve(rows=rows, slots=slots)

    def read(self, features: Tensor, positions: Tensor, *, first_row: int) -> None:
        """Keep the last hidden states of a forward of the target."""
        self._states.put(features, positions, first_row=first_row)

    def move_slots(self, rows: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Move the states of an accepted path of a tree to its positions."""
        self._states.move_slots(rows, sources, destinations)

    def admit(self, prompts: list[list[int]], *, first_row: int, start: int = 0) -> None:
        """Nothing to do: the target's prefill has left its states."""

    def propose(self, batch: Batch, counts: list[int]) -> Proposal:
        """Draft with as many heads as are asked for, at most all of them."""
        counts = [
            min(count, self._heads.num_heads) if len(row.token_ids) > 1 else 0
            for row, count in zip(batch.rows, counts, strict=True)
        ]
        if not any(counts):
            return empty_proposal(batch)
        ends = batch.lengths()[:, None]  # where the first drafts will stand
        hidden = self._states.get((ends - 2).clamp(min=0))[:, 0]
        drafts = Drafts(batch, self._token_ids, counts, self.trees)
        logits = self._heads.logits(self._heads.run(hidden, drafts.num_steps)).float()
        for step in range(drafts.num_steps):
            drafts.draw(logits[:, step : step + 1], ends + step)
        return drafts.proposal()

    def observe(self, batch: Batch) -> None:
        """Nothing to forget: a text's length says which of its states is the last."""

    def move_row(self, source: int, destination: int) -> None:
        """Move the row's states."""
        self._states.move_row(source, destination)
