"""What counts as drift: the `drift` section of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftsmith.errors import ConfigError

_FEWEST_PROMPTS = 2  # one prompt has no spread


@dataclass(frozen=True)
class DriftConfig:
    """Thresholds of the incumbent test and of the drift verdict.

    Attributes:
        margin: Loss of acceptance rate that is tolerated, absolute (0.02 is two points of alpha).
        confidence: Coverage of the intervals; 1 - confidence is the level of the domain flags.
        temperature: Temperature whose alpha is judged; the others are reported.
        min_prompts: Fewer common prompts than this make the verdict unknown.
        on_match: What a matched incumbent leads to: its draft is reused, or a new one is distilled.
        critical_domains: Domains whose flag blocks a promotion instead of warning.
    """

    margin: float
    confidence: float
    temperature: float
    min_prompts: int
    on_match: Literal["reuse", "retrain"]
    critical_domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that would make every verdict meaningless."""
        _require(
            0 < self.margin < 1,
            "drift.margin",
            found=self.margin,
            expected="a number between 0 and 1",
        )
        _require(
            0 < self.confidence < 1,
            "drift.confidence",
            found=self.confidence,
            expected="between 0 and 1",
        )
        _require(
            self.temperature >= 0, "drift.temperature", found=self.temperature, expected="0 or more"
        )
        _require(
            self.min_prompts >= _FEWEST_PROMPTS,
            "drift.min_prompts",
            found=self.min_prompts,
            expected="2 or more",
        )

    @property
    def temperature_key(self) -> str:
        """The temperature as the reports spell it."""
        return temperature_key(self.temperature)


def temperature_key(temperature: float) -> str:
    """The key of a temperature in the reports: 0 -> "0.0", 0.7 -> "0.7"."""
    return str(float(temperature))


def _require(holds: bool, key: str, *, found: float, expected: str) -> None:
    if not holds:
        raise ConfigError(
            f"reading {key}",
            found=str(found),
            expected=expected,
            remedy="correct it under conf/drift/",
        )
