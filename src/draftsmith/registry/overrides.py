"""Signed-off overrides: a failing check that somebody answers for, until a day.

An override changes what a failure leads to, never what was measured: the check keeps its numbers,
its remedy and its failure, and says who signed. Pure: it is told what day it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

from draftsmith.registry.checks import Check
from draftsmith.registry.gate_settings import Override


def applied(check: Check, overrides: Sequence[Override], *, today: date) -> Check:
    """The check with the override that concerns it; the one that holds longest, where several do.

    Returns:
        A failing check becomes `overridden` through the last day of its override; after that it
        fails again and says that the override expired. Every other check comes back as it is.
    """
    concerned = [override for override in overrides if override.check == check.name]
    if check.verdict != "fail" or not concerned:
        return check
    override = max(concerned, key=lambda item: item.last_day)
    signed = {name: " ".join(getattr(override, name).split()) for name in ("who", "why", "until")}
    why = signed["why"].rstrip(".")
    in_force = today <= override.last_day
    clause = (
        f"overridden until {override.until} by {signed['who']}: {why}"
        if in_force
        else f"the override by {signed['who']} ({why}) expired on {override.until}"
    )
    return replace(
        check,
        verdict="overridden" if in_force else "fail",
        detail=f"{check.detail.removesuffix('.')}; {clause}.",
        override=signed,
    )


def valid_until(checks: Sequence[Check]) -> str | None:
    """The last day of the first override to end among those that keep a check from blocking."""
    ends = [
        check.override["until"]
        for check in checks
        if check.verdict == "overridden" and check.severity == "block" and check.override
    ]
    return min(ends, default=None)


def overridden_checks(decision: Mapping[str, Any]) -> list[str]:
    """Names of the checks of a decision that failed and that somebody answers for."""
    return [c["name"] for c in decision.get("checks", ()) if c["verdict"] == "overridden"]


def as_of(decision: Mapping[str, Any], today: date) -> dict[str, Any]:
    """A recorded decision as it stands today: one to promote ends with its first override."""
    until = decision.get("valid_until")
    if decision.get("verdict") != "promote" or until is None or str(today) <= until:
        return dict(decision)
    reason = (
        f"The decision rests on an override that expired on {until}: run `dvc repro`, which "
        "decides again."
    )
    return {**decision, "verdict": "block", "reasons": [reason]}
