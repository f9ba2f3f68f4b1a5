"""What counts as drift: the `drift` and `monitor` sections of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftsmith.errors import ConfigError

_FEWEST_PROMPTS = 2  # one prompt has no spread
_FEWEST_REQUESTS = 20  # a t test on fewer ratios would trust their spread too much
_FEWEST_PER_FALSE_SIGNAL = 1000


@dataclass(frozen=True)
class DriftConfig:
    """Thresholds of the incumbent test and of the drift verdict.

    Attributes:
        margin: Loss of acceptance rate that is tolerated, absolute (0.02 is two points of alpha).
        confidence: Coverage of the intervals; 1 - confidence is the level of the domain flags.
        temperature: Temperature whose alpha is judged; the others are reported.
        min_prompts: Fewer common prompts than this make the verdict unknown.
        on_match: What a matched incumbent leads to: its draft is reused, or a new one is distilled
            from its weights (warm_start) or from the target's layers (retrain).
        critical_domains: Domains whose flag blocks a promotion instead of warning.
    """

    margin: float
    confidence: float
    temperature: float
    min_prompts: int
    on_match: Literal["reuse", "warm_start", "retrain"]
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


@dataclass(frozen=True)
class MonitorConfig:
    """How live telemetry is judged; `drift.margin` is the drop that matters.

    A section of its own: no stage reads it, so a change reruns none.

    Attributes:
        window: Newest requests of a stratum that are judged, and oldest that say what is usual; at
            most half of its requests each.
        min_requests: A stratum with fewer in a window is not judged.
        confidence: One minus the level of all tests; that of decay is shared by all strata.
        requests_per_false_signal: Mean number of requests between false signals of Page-Hinkley.
        traffic_shift: Change of the domain mix (total variation) or of prompt lengths (Cliff's
            delta) that is reported.
        engine_shift: Change of the mix of draft lengths (total variation) that is reported.
    """

    window: int
    min_requests: int
    confidence: float
    requests_per_false_signal: int
    traffic_shift: float
    engine_shift: float

    def __post_init__(self) -> None:
        """Refuse values under which nothing, or everything, is an alarm."""
        for key, least in (
            ("min_requests", _FEWEST_REQUESTS),
            ("window", max(self.min_requests, _FEWEST_REQUESTS)),
            ("requests_per_false_signal", _FEWEST_PER_FALSE_SIGNAL),
        ):
            value = getattr(self, key)
            expected = f"{least} or more"
            _require(value >= least, f"monitor.{key}", found=value, expected=expected)
        for key in ("confidence", "traffic_shift", "engine_shift"):
            value = getattr(self, key)
            expected = "a number between 0 and 1"
            _require(0 < value < 1, f"monitor.{key}", found=value, expected=expected)


def temperature_key(temperature: float) -> str:
    """The key of a temperature in the reports: 0 -> "0.0", 0.7 -> "0.7"."""
    return str(float(temperature))


def _require(holds: bool, key: str, *, found: float, expected: str) -> None:
    if not holds:
        raise ConfigError(
            f"reading {key}",
            found=str(found),
            expected=expected,
            remedy=f"correct it under conf/{key.partition('.')[0]}/",
        )
