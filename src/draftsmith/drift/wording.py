"""The sentences of the verdicts: every one carries the numbers that it rests on."""

from __future__ import annotations

from collections.abc import Mapping

from draftsmith.drift.comparison import Comparison, DomainComparison
from draftsmith.drift.settings import DriftConfig


def change_clause(comparison: Comparison, config: DriftConfig, *, subject: str) -> str:
    """`subject` and how it changed, with interval and number of prompts; no full stop."""
    return (
        f"{subject} at temperature {config.temperature_key} is {comparison.proposed:.3f} "
        f"against {comparison.reference:.3f}, a change of {comparison.change:+.3f} "
        f"({config.confidence:.0%} interval {comparison.low:+.3f} to {comparison.high:+.3f}, "
        f"{comparison.num_prompts} prompts)"
    )


def domain_reasons(domains: Mapping[str, DomainComparison]) -> list[str]:
    """One sentence for every flagged domain."""
    return [
        f"Domain {name} fell by {-domain.comparison.change:.3f} to "
        f"{domain.comparison.proposed:.3f} ({domain.comparison.num_prompts} prompts, "
        f"adjusted p {domain.p_adjusted:.3f})."
        for name, domain in domains.items()
        if domain.flag
    ]
