"""How many tokens a round drafts and how many it copies: the seam for who decides.

A decision rests on committed tokens and on what earlier rounds accepted, never on anything that the
round itself samples, so the output keeps the target's law. Here the same lengths in every round;
lengths that adapt need measured costs, which are none of the decoder's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from draftsmith.decoding.batch import Batch


class Lengths(NamedTuple):
    """Tokens that the draft guesses, and tokens copied from the text, 0 or more."""

    draft: int
    copy: int


class LengthPolicy(Protocol):
    """Who decides; asked before anything of the round is sampled."""

    @property
    def limit(self) -> Lengths:
        """The longest that is ever chosen."""

    def choose(self, batch: Batch, copies: Sequence[int], caps: Sequence[int]) -> Lengths:
        """The lengths of this round.

        Args:
            batch: The rows; each trace holds the row's earlier rounds.
            copies: By row: tokens that could be copied, at most `limit.copy`.
            caps: By row: tokens that it may propose at most.
        """

    def observe(self, batch: Batch) -> None:
        """The round is over: the rows' traces end with it."""


@dataclass(frozen=True)
class FixedLengths:
    """The same lengths in every round."""

    limit: Lengths

    def choose(
        self,
        batch: Batch,  # noqa: ARG002  the protocol's
        copies: Sequence[int],  # noqa: ARG002
        caps: Sequence[int],  # noqa: ARG002
    ) -> Lengths:
        """Those lengths."""
        return self.limit

    def observe(self, batch: Batch) -> None:
        """Nothing to learn."""
