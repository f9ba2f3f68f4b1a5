"""What a change of alpha should do to tau and to the speedup, without decoding anything.

Acceptance is taken as independent of the position, so tau = 1 + alpha + ... + alpha^gamma for every
prompt (Leviathan et al. 2023, equation 1). The speedup is that tau over the cost of a round, which
is the recorded one: another target, or another device, has others. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from draftsmith.drift.comparison import Comparison, compare
from draftsmith.drift.settings import temperature_key

_BISECTIONS = 20


def predicted_tau(alpha: float, draft_length: int) -> float:
    """Tokens of a round at a constant acceptance rate: 0.5 at draft length 2 gives 1.75."""
    return sum(alpha**place for place in range(draft_length + 1))


def break_even_alpha(benchmark: Mapping[str, Any]) -> float | None:
    """Least alpha, the same at every position, with which the draft length that was chosen pays.

    By isolated forwards at batch 1; what is copied and what sampling costs are left out. Of a pair
    that drafts trees it is that of its best chain.

    Args:
        benchmark: The benchmark record of the pair.

    Returns:
        None where even a draft that is always right would not pay, or verifying so many positions
        was not timed.

    Example: a round of one guess that takes 1.2 steps of the target pays above 0.2.
    """
    length = int(benchmark.get("chain_length", benchmark["draft_length"]))
    cost = benchmark["cost"]
    if str(length + 1) not in cost["verify_ms"]:
        return None
    needed = _round_cost(cost, length)
    if predicted_tau(1.0, length) < needed:
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if predicted_tau(middle, length) >= needed else (middle, high)
    return high


def predicted_changes(  # noqa: PLR0913  both sides, and what they are predicted with
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    benchmark: Mapping[str, Any],
    temperature: str,
    domains: Mapping[str, str],
    seed: int,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """The entry `predicted` of a report: tau and speedup from alpha, before and after.

    Args:
        before: Prompt id to alpha.
        after: Prompt id to alpha.
        benchmark: The benchmark record of the pair: draft length, costs of forwards, device.
        temperature: Temperature of the alphas, as reports spell it.
        domains: Prompt id to domain.
        seed: Seed of the intervals.
        confidence: Their coverage.

    Returns:
        Changes over all prompts, and the same by domain. `speedup` is None at a temperature at
        which speed was not measured. Of a pair that drafts trees they are those of its best chain:
        what of a tree is accepted does not follow from alpha.
    """
    length = int(benchmark.get("chain_length", benchmark["draft_length"]))
    old, new = (
        {name: predicted_tau(alpha, length) for name, alpha in side.items()}
        for side in (before, after)
    )
    is_measured = temperature == temperature_key(float(benchmark["temperature"]))
    factor = 1 / _round_cost(benchmark["cost"], length) if is_measured else None

    def changes(names: Iterable[str]) -> dict[str, Any]:
        sides = ({name: side[name] for name in names} for side in (old, new))
        tau = compare(*sides, seed=seed, confidence=confidence)
        speedup = None if factor is None else asdict(_scaled(tau, factor))
        return {"tau": asdict(tau), "speedup": speedup}

    common = sorted(old.keys() & new.keys())
    by_domain = {domain: [n for n in common if domains[n] == domain] for domain in domains.values()}
    return {
        "method": "from alpha, as if it were the same at every position and nothing copied",
        "draft_length": length,
        "device": benchmark["device"]["name"],
        **changes(common),
        "by_domain": {domain: changes(names) for domain, names in by_domain.items() if names},
    }


def _round_cost(cost: Mapping[str, Any], draft_length: int) -> float:
    """Time of a round in steps of the target; without drafts it is one."""
    if not draft_length:
        return 1.0
    verify_ms = cost["verify_ms"][str(draft_length + 1)]
    steps = min(draft_length, 1) if cost.get("drafts_at_once") else draft_length
    return float((steps * cost["draft_step_ms"] + verify_ms) / cost["target_step_ms"])


def _scaled(comparison: Comparison, factor: float) -> Comparison:
    scaled = {
        name: getattr(comparison, name) * factor
        for name in ("proposed", "reference", "change", "low", "high")
    }
    return replace(comparison, **scaled)
