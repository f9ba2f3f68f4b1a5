"""The sentences of the verdicts: every one carries the numbers that it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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


def target_reasons(changed: Sequence[str]) -> list[str]:
    """What differs between the two targets; nothing where nothing that is compared does."""
    if not changed:
        return []
    names = _listed([name.replace("_", " ") for name in changed])
    ending = "." if "weights" in changed else "; its weights are the same."
    return [f"What changed in the target: {names}{ending}"]


def engine_reasons(changes: Mapping[str, Sequence[str]]) -> list[str]:
    """That another engine measured the record: {package: (old version, new version)}."""
    if not changes:
        return []
    steps = _listed([f"{name} {old} to {new}" for name, (old, new) in changes.items()])
    return [
        f"The engine version changed since the record ({steps}), so a part of the change may be "
        "its doing."
    ]


def traffic_reasons(prompts: Mapping[str, int]) -> list[str]:
    """How far the prompts of the two measurements differ: {common, new, gone}."""
    if not prompts["new"] and not prompts["gone"]:
        return []
    return [
        f"The eval prompts changed: {prompts['new']} of today's are not in the record and "
        f"{prompts['gone']} of the record's are no longer measured; the {prompts['common']} "
        "common ones are compared."
    ]


def predicted_reasons(predicted: Mapping[str, Any] | None) -> list[str]:
    """What the change of alpha should do to tau and to the speedup."""
    if predicted is None:
        return []
    tau, speedup = predicted["tau"], predicted["speedup"]
    sentence = (
        f"Predicted {predicted['method']}, at draft length {predicted['draft_length']}: tau "
        f"{tau['proposed']:.3f} against {tau['reference']:.3f} ({tau['change']:+.3f})"
    )
    if speedup is not None:
        sentence += (
            f", speedup {speedup['proposed']:.2f} against {speedup['reference']:.2f} at the costs "
            f"measured on {predicted['device']}"
        )
    return [f"{sentence}."]


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
