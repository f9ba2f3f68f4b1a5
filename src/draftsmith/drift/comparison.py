"""Two drafts on the same prompts: change of the acceptance rate, pooled and by domain.

Everything is paired by prompt, and the prompt is the unit: pooled tokens raise false alarms in
half of all runs. Small domains are noisy, so their changes are shrunk towards the pooled change
(empirical Bayes after James and Stein, 1961) and their p values are corrected for their number
(Holm, 1979). Pure; knows nothing of records.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftsmith.drift.resampling import Vector, drop_p_value, mean_interval
from draftsmith.drift.settings import DriftConfig
from draftsmith.errors import EvidenceError

# An acceptance rate over some hundred tokens is not known more finely: no spread is smaller.
_MIN_SPREAD = 1e-3


@dataclass(frozen=True)
class Comparison:
    """Proposed against reference over their common prompts.

    Attributes:
        proposed: Mean of the proposed side.
        reference: Mean of the reference.
        change: `proposed - reference`; negative is worse.
        low: Lower bound of the change.
        high: Upper bound of the change.
        effect_size: Cohen's d of the paired differences.
        num_prompts: Number of common prompts.
    """

    proposed: float
    reference: float
    change: float
    low: float
    high: float
    effect_size: float
    num_prompts: int


@dataclass(frozen=True)
class DomainComparison:
    """The comparison within a domain, judged beside all the others.

    Attributes:
        comparison: Over the prompts of this domain alone.
        shrunken_change: The change, drawn towards the pooled one as far as noise explains the
            distance.
        p_adjusted: One-sided p of a drop, corrected for the number of domains.
        flag: The drop is beyond the margin and not explained by chance.
    """

    comparison: Comparison
    shrunken_change: float
    p_adjusted: float
    flag: bool

    def as_record(self) -> dict[str, Any]:
        """Flat, as the reports hold it."""
        judged = {k: v for k, v in asdict(self).items() if k != "comparison"}
        return asdict(self.comparison) | judged


def compare(
    reference: Mapping[str, float],
    proposed: Mapping[str, float],
    *,
    seed: int,
    confidence: float = 0.95,
) -> Comparison:
    """Compare two sides over the prompts that both have; the order of the prompts does not matter.

    Args:
        reference: Prompt id to value.
        proposed: Prompt id to value.
        seed: Seed of the bootstrap.
        confidence: Coverage of the interval of the change.

    Raises:
        EvidenceError: No common prompt, or a value that is not finite.
    """
    before, after = _paired(reference, proposed)
    differences = after - before
    change = float(differences.mean())
    low, high = mean_interval(differences, seed=seed, confidence=confidence)
    return Comparison(
        proposed=float(after.mean()),
        reference=float(before.mean()),
        change=change,
        low=low,
        high=high,
        effect_size=change / max(_spread(differences), _MIN_SPREAD),
        num_prompts=len(differences),
    )


def compare_domains(
    reference: Mapping[str, float],
    proposed: Mapping[str, float],
    *,
    domains: Mapping[str, str],
    seed: int,
    config: DriftConfig,
) -> dict[str, DomainComparison]:
    """Compare within every domain; a flag needs both a real and a relevant drop.

    Args:
        reference: Prompt id to value.
        proposed: Prompt id to value.
        domains: Prompt id to domain; common prompts without one are left out.
        seed: Seed; every domain draws from a stream of its own.
        config: Margin and confidence.

    Returns:
        Domains in alphabetical order; empty when no common prompt has a domain.
    """
    common = sorted(reference.keys() & proposed.keys() & domains.keys())
    groups: dict[str, list[str]] = {}
    for prompt_id in common:
        groups.setdefault(domains[prompt_id], []).append(prompt_id)
    names = sorted(groups)
    differences = {
        name: np.array([proposed[i] - reference[i] for i in groups[name]]) for name in names
    }
    p_values = [drop_p_value(differences[name], seed=_stream(seed, name)) for name in names]
    shrunken = shrink([differences[name] for name in names])
    results: dict[str, DomainComparison] = {}
    for name, p_value, change in zip(names, holm(p_values), shrunken, strict=True):
        comparison = compare(
            {i: reference[i] for i in groups[name]},
            {i: proposed[i] for i in groups[name]},
            seed=_stream(seed, name),
            confidence=config.confidence,
        )
        flag = p_value < 1 - config.confidence and change < -config.margin
        results[name] = DomainComparison(comparison, change, p_value, flag)
    return results


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down adjustment: the chance that ANY of the flags is false stays below the level.

    Example: [0.01, 0.04, 0.03] -> [0.03, 0.06, 0.06].
    """
    count = len(p_values)
    adjusted = [0.0] * count
    running = 0.0
    for rank, index in enumerate(sorted(range(count), key=p_values.__getitem__)):
        running = max(running, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def shrink(differences: list[Vector]) -> list[float]:
    """Changes by domain, drawn towards the pooled change by the share of noise in their spread.

    The variance between domains is DerSimonian and Laird's moment estimate. Where it is zero, the
    domains differ by chance alone and all get the pooled change.

    Args:
        differences: For each domain the paired differences, shape [num_prompts of the domain].
    """
    if not differences:
        return []
    sizes = np.array([len(values) for values in differences], dtype=np.float64)
    means = np.array([values.mean() for values in differences])
    pooled = float(np.concatenate(differences).mean())
    within = sum(float(((values - values.mean()) ** 2).sum()) for values in differences)
    degrees = float(sizes.sum()) - len(differences)
    noise = max(within / degrees if degrees > 0 else 0.0, _MIN_SPREAD**2)
    scaled_spread = float((sizes * (means - pooled) ** 2).sum()) - noise * (len(differences) - 1)
    weight = float(sizes.sum() - (sizes**2).sum() / sizes.sum())
    between = max(0.0, scaled_spread / weight) if weight > 0 else 0.0
    kept = between / (between + noise / sizes)
    return [float(value) for value in pooled + kept * (means - pooled)]


def _paired(reference: Mapping[str, float], proposed: Mapping[str, float]) -> tuple[Vector, Vector]:
    common = sorted(reference.keys() & proposed.keys())
    if not common:
        raise EvidenceError(
            "pairing two measurements by prompt",
            found=f"no common prompt among {len(reference)} and {len(proposed)}",
            expected="measurements over the same frozen eval prompts",
            remedy="keep the eval prompts of the reference in the corpus, then rerun `dvc repro`",
        )
    before = np.array([reference[prompt_id] for prompt_id in common], dtype=np.float64)
    after = np.array([proposed[prompt_id] for prompt_id in common], dtype=np.float64)
    _require_finite(before - after)
    return before, after


def _require_finite(differences: Vector) -> None:
    if not np.isfinite(differences).all():
        raise EvidenceError(
            "comparing two measurements by prompt",
            found=f"{int((~np.isfinite(differences)).sum())} prompts without a finite value",
            expected="one finite value for every prompt",
            remedy="look for prompts whose response is empty, then measure again",
        )


def _spread(differences: Vector) -> float:
    return float(differences.std(ddof=1)) if len(differences) > 1 else 0.0


def _stream(seed: int, name: str) -> int:
    return (seed << 32) ^ zlib.crc32(name.encode())
