"""A check of the promotion gate as a value: one measured fact against one requirement. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.registry.gate_settings import Severity

Verdict = Literal["pass", "fail", "overridden", "skip"]


@dataclass(frozen=True)
class Check:
    """One line of the decision; the fields are those of `reports/decision.json`.

    Attributes:
        severity: What a failure leads to: it blocks, it warns, or the check is off.
        measured: The measured value; a word where the fact is none.
        low: Lower bound, where there is an interval.
        high: Upper bound, where there is an interval.
        requirement: What had to hold.
        remedy: What to do about a failure; empty when there is none.
        detail: One sentence with the measured value, the requirement and the shortfall.
        override: Who signed off on a failure, why and until when, in force or expired.
    """

    name: str
    severity: Severity
    measured: float | str | None
    low: float | None
    high: float | None
    requirement: str
    verdict: Verdict
    remedy: str
    detail: str
    override: Mapping[str, str] | None = None


def check(
    name: str,
    *,
    severity: Severity,
    requirement: str,
    measured: Mapping[str, Any] | float | str,
    failure: str,
    remedy: str,
) -> Check:
    """Assemble a check; it fails exactly when `failure` says something."""
    low = high = None
    value: float | str
    if isinstance(measured, Mapping):
        value, low, high = measured["mean"], measured["low"], measured["high"]
        shown = f"{value:.3f} ({low:.3f} to {high:.3f}, {measured['num_prompts']} prompts)"
    else:
        value = measured
        shown = measured if isinstance(measured, str) else f"{measured:.3f}"
    ending = f"; {failure}" if failure else ""
    return Check(
        name=name,
        severity=severity,
        measured=value,
        low=low,
        high=high,
        requirement=requirement,
        verdict="fail" if failure else "pass",
        remedy=remedy if failure else "",
        detail=f"{_title(name)}: measured {shown}, required {requirement}{ending}.",
    )


def skipped(name: str, *, severity: Severity, requirement: str, why: str) -> Check:
    """A check that does not apply, and why."""
    return Check(
        name, severity, None, None, None, requirement, "skip", "", f"{_title(name)}: {why}."
    )


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()
