"""What a change of alpha should do to tau and to the speedup, without decoding anything.

Acceptance is taken as independent of the position, so tau = 1 + alpha + ... + alpha^gamma for every
prompt (Leviathan et al. 2023, equation 1). The speedup is that tau over the cost of a round, which
is the recorded one: another target, or another device, has others. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from draftsmith.drift.comparison import Comparison, compare
from draftsmith.drift.settings import temperature_key


def predicted_tau(alpha: float, draft_length: int) -> float:
    """Tokens of a round at a constant acceptance rate: 0.5 at draft length 2 gives 1.75."""
    return sum(alpha**place for place in range(draft_length + 1))


def predicted_changes(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    benchmark: Mapping[str, Any],
    temperature: str,
    seed: int,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """The entry `predicted` of a report: tau and speedup from alpha, before and after.

    Args:
        before: Prompt id to alpha.
        after: Prompt id to alpha.
        benchmark: The benchmark record of the pair: draft length, costs of forwards, device.
        temperature: Temperature of the alphas, as reports spell it.
        seed: Seed of the intervals.
        confidence: Their coverage.

    Returns:
        `speedup` is None at a temperature at which speed was not measured, and for a pair that
        drafts trees: what of them is accepted does not follow from alpha.
    """
    length = int(benchmark["draft_length"])
    old, new = (
        {name: predicted_tau(alpha, length) for name, alpha in side.items()}
        for side in (before, after)
    )
    tau = compare(old, new, seed=seed, confidence=confidence)
    speedup: dict[str, Any] | None = None
    is_measured = temperature == temperature_key(float(benchmark["temperature"]))
    if is_measured and not benchmark.get("tree"):
        speedup = asdict(_scaled(tau, 1 / _round_cost(benchmark["cost"], length)))
    return {
        "method": "from alpha, as if it were the same at every position and nothing copied",
        "draft_length": length,
        "device": benchmark["device"]["name"],
        "tau": asdict(tau),
        "speedup": speedup,
    }


def _round_cost(cost: Mapping[str, Any], draft_length: int) -> float:
    """Time of a round in steps of the target."""
    verify_ms = cost["verify_ms"][str(draft_length + 1)]
    steps = min(draft_length, 1) if cost.get("drafts_at_once") else draft_length
    return float((steps * cost["draft_step_ms"] + verify_ms) / cost["target_step_ms"])


def _scaled(comparison: Comparison, factor: float) -> Comparison:
    scaled = {
        name: getattr(comparison, name) * factor
        for name in ("proposed", "reference", "change", "low", "high")
    }
    return replace(comparison, **scaled)
