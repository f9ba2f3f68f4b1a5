"""What live traffic is held against: the first-position survival that was registered with a pair.

By temperature and domain, out of the evaluation record of the version. Where a record has no
survival by domain (an older one), alpha by domain stands in for it: both are the acceptance of one
position, alpha over all positions of a response, survival over those at which rounds start. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.drift.evidence import alpha_by_prompt, domain_by_prompt
from draftsmith.errors import EvidenceError

_INTERVAL_WIDTH = 2 * 1.96  # standard errors in a recorded 95 % interval
_FEWEST_PROMPTS = 2
# No prompt-level measurement of this size is more certain, whatever its bootstrap says.
_MIN_ERROR = 0.005


@dataclass(frozen=True)
class Level:
    """A registered acceptance rate.

    Attributes:
        survival: Share of rounds that accepted their first draft position.
        error: Its standard error over prompts.
        num_prompts: Prompts behind it.
    """

    survival: float
    error: float
    num_prompts: int


@dataclass(frozen=True)
class Registered:
    """The registered rates at one temperature.

    Attributes:
        levels: By domain.
        pooled: Over all prompts.
        num_rounds: Rounds behind `pooled`; 0 where `pooled` is an alpha.
        deviations: Alphas of the eval prompts, each minus the mean of its domain, by domain: how
            much single prompts differ.
        is_alpha: Whether alpha stands in for survival.
    """

    levels: Mapping[str, Level]
    pooled: Level
    num_rounds: int
    deviations: Mapping[str, tuple[float, ...]]
    is_alpha: bool

    @property
    def lowest(self) -> str:
        """The domain with the lowest rate: no mix of the domains has a lower one."""
        return min(self.levels, key=lambda domain: self.levels[domain].survival)


def registered_rates(record: Mapping[str, Any]) -> dict[str, Registered]:
    """The registered rates by temperature, a report key ("0.0").

    Args:
        record: RecipeEvaluation of the pair, as attached to its version.

    Raises:
        EvidenceError: The record has no rate by domain at any temperature.
    """
    rates = {
        temperature: registered
        for temperature in record.get("alpha", {})
        if (registered := _at(record, temperature)) is not None
    }
    if not rates:
        raise EvidenceError(
            "reading the registered acceptance of the pair",
            found="no survival and no alpha by domain in its evaluation record",
            expected="the record that stage evaluate writes",
            remedy="rerun `dvc repro`, which attaches one to the version",
        )
    return rates


def _at(record: Mapping[str, Any], temperature: str) -> Registered | None:
    positions = record.get("positions", {}).get(temperature)
    alpha = record["alpha"][temperature]
    estimate = positions[0]["survival"] if positions else alpha
    deviations = _deviations(record, temperature)
    levels = {
        domain: _level(part, deviations.get(domain, ()))
        for domain, part in estimate.get("by_domain", {}).items()
        if part["num_prompts"] >= _FEWEST_PROMPTS
    }
    if not levels or estimate["num_prompts"] < _FEWEST_PROMPTS:
        return None
    return Registered(
        levels=levels,
        pooled=_level(estimate),
        num_rounds=int(record["position_counts"][temperature][0]) if positions else 0,
        deviations=deviations,
        is_alpha=not positions,
    )


def _level(estimate: Mapping[str, Any], deviations: Sequence[float] = ()) -> Level:
    """A rate; its error is no smaller than the spread of the eval prompts' alphas lets it be.

    A dozen decoded prompts that happen to be alike would otherwise pass for certainty.
    """
    count = int(estimate["num_prompts"])
    # A bootstrap over n prompts divides by n where the unbiased error divides by n - 1.
    error = (estimate["high"] - estimate["low"]) / _INTERVAL_WIDTH * math.sqrt(count / (count - 1))
    spread = statistics.stdev(deviations) if len(deviations) >= _FEWEST_PROMPTS else 0.0
    least = max(_MIN_ERROR, spread / math.sqrt(count))
    return Level(float(estimate["mean"]), max(error, least), count)


def _deviations(record: Mapping[str, Any], temperature: str) -> dict[str, tuple[float, ...]]:
    domains = domain_by_prompt(record)
    groups: dict[str, list[float]] = {}
    for prompt_id, alpha in alpha_by_prompt(record, temperature).items():
        groups.setdefault(domains[prompt_id], []).append(alpha)
    return {
        domain: tuple(value - sum(values) / len(values) for value in values)
        for domain, values in groups.items()
    }
