"""The `gate` section: what a pair must show before services load it, and who signed off on less.

Knows no reports and no clock: whether an override is still in force is asked with a date.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from types import MappingProxyType
from typing import Literal

from draftsmith.errors import ConfigError
from draftsmith.strict import ill_typed, join, unknown

Severity = Literal["block", "warn", "off"]

_LOSSLESSNESS = "losslessness"
DEFAULT_SEVERITIES: Mapping[str, Severity] = MappingProxyType(
    {
        _LOSSLESSNESS: "block",
        "identity": "block",
        "quarantine": "block",
        "alpha": "block",
        "speedup": "block",
        "device": "block",
        "incumbent_test": "block",
        "drift": "block",
        "non_inferiority": "block",
        "domains": "warn",
        "better_than_generate": "warn",
        "better_than_prompt_lookup": "warn",
        "engine_ratio": "warn",
        "advice": "warn",
    }
)
# Without these no other check means anything, so nobody can sign them away.
ALWAYS_BLOCK = {
    "identity": "it proves that all evidence is of this pair",
    "quarantine": "it keeps out what was rolled back; distil another draft instead",
}
NOT_OVERRIDABLE = {
    **ALWAYS_BLOCK,
    _LOSSLESSNESS: "a pair that changes the target's output is never promoted on a signature; "
    "gate.require_losslessness makes it a warning in so many words",
}
_SEVERITIES: Mapping[object, Severity] = MappingProxyType(
    {"block": "block", "warn": "warn", "off": "off", False: "off"}  # YAML reads a bare off as false
)
_WHERE = "under `gate` in params.yaml or in conf/gate/"


@dataclass(frozen=True)
class Override:
    """A failure of one check that somebody answers for, for a time.

    Attributes:
        check: Name of the check.
        who: Who signs.
        why: The reason, for those who read the report.
        until: Last day on which it holds, as YYYY-MM-DD (UTC).
    """

    check: str
    who: str
    why: str
    until: str

    def __post_init__(self) -> None:
        """Refuse a signature without name, reason or end."""
        for name in ("who", "why"):
            if not getattr(self, name).strip():
                raise ValueError(f"`{name}` is empty: an override says who signs and why")
        try:
            is_date = str(date.fromisoformat(self.until)) == self.until
        except ValueError:
            is_date = False
        if not is_date:
            raise ValueError(f"`until` is {self.until!r}, not a day such as 2026-12-31")

    @property
    def last_day(self) -> date:
        """The last day on which it holds."""
        return date.fromisoformat(self.until)


@dataclass(frozen=True)
class GateConfig:
    """The `gate` section.

    Attributes:
        min_alpha: The lower bound of alpha must reach this.
        alpha_temperature: Temperature of that alpha.
        min_speedup: The lower bound of the measured speedup at batch 1 must exceed this.
        device: Where the speed must have been measured: any, cpu, cuda, or a device name.
        require_losslessness: False turns the losslessness check into a warning.
        min_engine_ratio: Engine at draft length 0 against Transformers generate must reach this.
        min_prompts: Fewer prompts than this behind an interval are no evidence.
        require_comparison: Fail when a reference exists but the comparison could not be made.
        checks: Severity by name of check; what is left out has its default.
        overrides: Failures that somebody answers for.
    """

    min_alpha: float
    alpha_temperature: float
    min_speedup: float
    device: str
    require_losslessness: bool
    min_engine_ratio: float
    min_prompts: int = 2
    require_comparison: bool = True
    checks: Mapping[str, str | bool] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        """Refuse bounds that no pair or every pair would meet by accident, and unknown checks."""
        _in_range("gate.min_alpha", self.min_alpha, low=0, high=1)
        _in_range("gate.alpha_temperature", self.alpha_temperature, low=0)
        _in_range("gate.min_speedup", self.min_speedup, low=0)
        _in_range("gate.min_engine_ratio", self.min_engine_ratio, low=0)
        _in_range("gate.min_prompts", self.min_prompts, low=2)
        for name, value in self.checks.items():
            _check_severity(join("gate.checks", name), name, value)
        for index, override in enumerate(self.overrides):
            _check_overridable(f"gate.overrides[{index}].check", override.check)

    def severity(self, name: str) -> Severity:
        """What a failure of a check leads to."""
        if name == _LOSSLESSNESS:
            return "block" if self.require_losslessness else "warn"
        return _SEVERITIES[self.checks.get(name, DEFAULT_SEVERITIES[name])]


def _check_severity(path: str, name: str, value: str | bool) -> None:
    if name not in DEFAULT_SEVERITIES:
        raise unknown(path, name, DEFAULT_SEVERITIES, kind="check", where=_WHERE)
    if value not in _SEVERITIES:
        raise ill_typed(path, value, expected="one of `block`, `warn`, `off`")
    severity = _SEVERITIES[value]
    if name == _LOSSLESSNESS:
        raise ConfigError(
            f"reading `{path}`",
            found=f"`{severity}`",
            expected="no entry: gate.require_losslessness alone decides it",
            remedy=f"remove `{path}`",
        )
    if name in ALWAYS_BLOCK and severity != "block":
        raise ConfigError(
            f"reading `{path}`",
            found=f"`{severity}`",
            expected=f"`block`: this check cannot be switched off, for {ALWAYS_BLOCK[name]}",
            remedy=f"remove `{path}`",
        )


def _check_overridable(path: str, name: str) -> None:
    overridable = DEFAULT_SEVERITIES.keys() - NOT_OVERRIDABLE.keys()
    if name in NOT_OVERRIDABLE:
        raise ConfigError(
            f"reading `{path}`",
            found=f"an override of `{name}`",
            expected=f"another check: this one cannot be overridden, for {NOT_OVERRIDABLE[name]}",
            remedy="remove this override and mend what the check found",
        )
    if name not in overridable:
        raise unknown(path, name, overridable, kind="check", where=_WHERE)


def _in_range(key: str, value: float, *, low: float, high: float = float("inf")) -> None:
    if not low <= value <= high:
        raise ConfigError(
            f"reading {key}",
            found=str(value),
            expected=f"{low} or more" if high == float("inf") else f"a number from {low} to {high}",
            remedy="correct it under conf/gate/",
        )
