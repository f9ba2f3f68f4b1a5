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


def expected_tokens(survival: Sequence[float], draft_length: int) -> float:
    """Tokens of a round (tau): 1 + the survival of its positions. [0.5, 0.2] at length 2 gives 1.7.

    Raises:
        EvidenceError: Survival was not measured that far.
    """
    if draft_length > len(survival):
        raise EvidenceError(
            f"predicting draft length {draft_length}",
            found=f"survival of {len(survival)} positions",
            expected=f"survival of at least {draft_length} positions",
            remedy="raise evaluation.draft_length to benchmark.max_draft_length",
        )
    return 1.0 + sum(survival[:draft_length])


def predicted_speedup(survival: Sequence[float], draft_length: int, costs: ForwardCosts) -> float:
    """Speedup over one token a forward; no overhead is fitted."""
    round_ms = draft_length * costs.draft_step_ms + costs.verify_ms[draft_length + 1]
    return expected_tokens(survival, draft_length) * costs.target_step_ms / round_ms


def break_even_tokens(draft_length: int, costs: ForwardCosts) -> float:
    """The tau at which a draft length neither gains nor loses."""
    round_ms = draft_length * costs.draft_step_ms + costs.verify_ms[draft_length + 1]
    return round_ms / costs.target_step_ms
