"""What speculation should yield: expected tokens of a round over the measured cost of its forwards.

Pure arithmetic.

Source: Leviathan et al. 2023, theorem 3.8, with measured survival in place of an i.i.d. acceptance
rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftsmith.errors import EvidenceError


@dataclass(frozen=True)
class ForwardCosts:
    """Times of isolated forwards at one batch size and context, milliseconds.

    Attributes:
        target_step_ms: The target over one position.
        draft_step_ms: The draft over one position.
        verify_ms: The target over so many positions (draft length + 1).
    """

    target_step_ms: float
    draft_step_ms: float
    verify_ms: Mapping[int, float]

    @property
    def cost_ratio(self) -> float:
        """c: a draft step over a target step."""
        return self.draft_step_ms / self.target_step_ms


@dataclass(frozen=True)
class Survival:
    """What the evaluate stage measured of the rounds at one temperature.

    Attributes:
        draft: Survival by position of the rounds that the draft guessed.
        copied_share: Share of the rounds that were copied from the text.
        copied: Survival by position of those rounds.
    """

    draft: Sequence[float]
    copied_share: float = 0.0
    copied: Sequence[float] = ()


def expected_tokens(survival: Survival, draft_length: int) -> float:
    """Tokens of a round (tau): 1 + the survival of its positions.

    Example: [0.5, 0.2] at length 2 gives 1.7; when half the rounds are copies with survival [0.8],
    it is the mean of 1.7 and 1.8.

    Raises:
        EvidenceError: Survival was not measured that far.
    """
    if draft_length > len(survival.draft):
        raise EvidenceError(
            f"predicting draft length {draft_length}",
            found=f"survival of {len(survival.draft)} positions",
            expected=f"survival of at least {draft_length} positions",
            remedy="raise evaluation.draft_length to benchmark.max_draft_length",
        )
    share = survival.copied_share
    return 1.0 + (1 - share) * sum(survival.draft[:draft_length]) + share * sum(survival.copied)


def predicted_speedup(survival: Survival, draft_length: int, costs: ForwardCosts) -> float:
    """Speedup over one token a forward; no overhead is fitted."""
    share = survival.copied_share
    drafted_ms = draft_length * costs.draft_step_ms + costs.verify_ms[draft_length + 1]
    copied_ms = costs.verify_ms[len(survival.copied) + 1] if share else 0.0
    round_ms = (1 - share) * drafted_ms + share * copied_ms
    return expected_tokens(survival, draft_length) * costs.target_step_ms / round_ms


def break_even_tokens(draft_length: int, costs: ForwardCosts) -> float:
    """The tau at which a draft length neither gains nor loses."""
    round_ms = draft_length * costs.draft_step_ms + costs.verify_ms[draft_length + 1]
    return round_ms / costs.target_step_ms
