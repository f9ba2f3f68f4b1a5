"""The checks of the promotion gate: each compares one measured fact with one requirement.

A check never raises because of a bad value, only because of a missing one. Pure; `gate.py` puts
the checks together and decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.drift.settings import temperature_key
from draftsmith.errors import ConfigError, EvidenceError
from draftsmith.registry.pair import pair_digest

Severity = Literal["block", "warn"]
Verdict = Literal["pass", "fail", "skip"]


@dataclass(frozen=True)
class GateConfig:
    """The `gate` section: what a pair must show before services load it.

    Attributes:
        min_alpha: The lower bound of alpha must reach this.
        alpha_temperature: Temperature of that alpha.
        min_speedup: The lower bound of the measured speedup at batch 1 must exceed this.
        device: Where the speed must have been measured: any, cpu, cuda, or a device name.
        require_losslessness: False turns the losslessness check into a warning.
        min_engine_ratio: Engine at draft length 0 against Transformers generate; below it, a
            warning.
        min_prompts: Fewer prompts than this behind an interval are no evidence.
        require_comparison: Block when a reference exists but the comparison could not be made.
    """

    min_alpha: float
    alpha_temperature: float
    min_speedup: float
    device: str
    require_losslessness: bool
    min_engine_ratio: float
    min_prompts: int = 2
    require_comparison: bool = True

    def __post_init__(self) -> None:
        """Refuse bounds that no pair or every pair would meet by accident."""
        _in_range("gate.min_alpha", self.min_alpha, low=0, high=1)
        _in_range("gate.alpha_temperature", self.alpha_temperature, low=0)
        _in_range("gate.min_speedup", self.min_speedup, low=0)
        _in_range("gate.min_engine_ratio", self.min_engine_ratio, low=0)
        _in_range("gate.min_prompts", self.min_prompts, low=2)


@dataclass(frozen=True)
class GateEvidence:
    """The reports that the gate reads.

    Attributes:
        registration: `reports/registration.json`; names the pair to decide on.
        target: `build/target.json`.
        evaluation: `reports/evaluation.json`.
        benchmark: `reports/benchmark.json`.
        drift: `reports/drift.json`.
        incumbent: `reports/incumbent.json`, where there is one.
    """

    registration: Mapping[str, Any]
    target: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    benchmark: Mapping[str, Any]
    drift: Mapping[str, Any]
    incumbent: Mapping[str, Any] | None = None

    @property
    def evaluated(self) -> Mapping[str, Any]:
        """RecipeEvaluation of the registered recipe."""
        return _of_recipe(self.evaluation, self.registration["recipe"], name="evaluation")

    @property
    def benchmarked(self) -> Mapping[str, Any]:
        """RecipeBenchmark of the registered recipe."""
        return _of_recipe(self.benchmark, self.registration["recipe"], name="benchmark")


@dataclass(frozen=True)
class Check:
    """One line of the decision; the fields are those of `reports/decision.json`.

    Attributes:
        severity: Whether a failure blocks the promotion.
        measured: The measured value; a word where the fact is none.
        low: Lower bound, where there is an interval.
        high: Upper bound, where there is an interval.
        requirement: What had to hold.
        remedy: What to do about a failure; empty when there is none.
        detail: One sentence with the measured value, the requirement and the shortfall.
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


def losslessness(evidence: GateEvidence, config: GateConfig) -> Check:
    """Same output as the target alone, and a self-test that notices a corrupted acceptance rule."""
    record = evidence.evaluated["losslessness"]
    exact, near, control = record.get("fp32"), record.get("bf16"), record["control"]
    failures = []
    if not record["holds"]:
        failures.append("the output differs from the target's own")
    failures += [
        f"{name} fails"
        for name, part in (("fp32", exact), ("bf16", near))
        if part and not part["holds"]
    ]
    if not exact or not exact["num_prompts"]:
        failures.append("nothing was compared in fp32")
    if not control["detected"]:
        failures.append("the corrupted control was not noticed, so the test proves nothing")
    counts = ", ".join(
        f"{name} {part['num_identical']}/{part['num_prompts']} identical"
        for name, part in (("fp32", exact), ("bf16", near))
        if part
    )
    return check(
        "losslessness",
        severity="block" if config.require_losslessness else "warn",
        requirement="the self-test holds and its corrupted control is noticed",
        measured=counts or "no counts",
        failure="; ".join(failures),
        remedy="do not serve this pair; run the decoding tests here and report the divergences",
    )


def identity(evidence: GateEvidence) -> Check:
    """All reports speak of the registered pair on the current target."""
    registered, target = evidence.registration["pair_digest"], evidence.target["digest"]
    evaluated = evidence.evaluated
    pairs = {
        "evaluation": evaluated["pair_digest"],
        "benchmark": evidence.benchmarked["pair_digest"],
        "drift": evidence.drift["pair_digest"],
        "target and draft": pair_digest(target, evaluated["draft_digest"]),
    }
    targets = {
        name: getattr(evidence, name)["target_digest"] for name in ("evaluation", "benchmark")
    }
    failures = [
        f"{name} is of pair {digest[:8]} instead of {registered[:8]}"
        for name, digest in pairs.items()
        if digest != registered
    ] + [
        f"{name} is of target {digest[:8]} instead of {target[:8]}"
        for name, digest in targets.items()
        if digest != target
    ]
    return check(
        "identity",
        severity="block",
        requirement="evaluation, benchmark, drift, registration and target agree on the digests",
        measured=registered[:16],
        failure="; ".join(failures),
        remedy="rerun `dvc repro` so that every report is of the current target and draft",
    )


def quarantine(evidence: GateEvidence) -> Check:
    """A version that was rolled back stays out."""
    reason = evidence.registration.get("quarantine")
    return check(
        "quarantine",
        severity="block",
        requirement="a version that is not in quarantine",
        measured="in quarantine" if reason else "not in quarantine",
        failure=f"it was put there because: {reason}" if reason else "",
        remedy="distil another draft: change the recipe, the corpus or distill.seed",
    )


def alpha(evidence: GateEvidence, config: GateConfig) -> Check:
    """The lower bound of alpha reaches the minimum."""
    key = temperature_key(config.alpha_temperature)
    by_temperature = evidence.evaluated["alpha"]
    if key not in by_temperature:
        raise EvidenceError(
            f"reading alpha at temperature {key} of recipe {evidence.registration['recipe']}",
            found=f"alpha at {', '.join(sorted(by_temperature)) or 'no temperature'}",
            expected=f"alpha at {key}",
            remedy="set gate.alpha_temperature to a measured one, or measure it",
        )
    estimate, least = by_temperature[key], config.min_alpha
    return _bounded(
        "alpha",
        estimate,
        requirement=f"lower bound of alpha at temperature {key} at least {least:.3f}",
        shortfall=None if estimate["low"] >= least else least - estimate["low"],
        remedy="distil for more steps or on more prompts like those of the weakest domains, or "
        "lower gate.min_alpha knowingly",
        min_prompts=config.min_prompts,
    )


def speedup(evidence: GateEvidence, config: GateConfig) -> Check:
    """The lower bound of the measured speedup exceeds the minimum."""
    estimate, least = evidence.benchmarked["speedup"], config.min_speedup
    return _bounded(
        "speedup",
        estimate,
        requirement=f"lower bound of the speedup at batch 1 above {least:.3f}",
        shortfall=None if estimate["low"] > least else least - estimate["low"],
        remedy="try a smaller draft or vocabulary, raise alpha, measure on more prompts, or lower "
        "gate.min_speedup knowingly",
        min_prompts=config.min_prompts,
    )


def device(evidence: GateEvidence, config: GateConfig) -> Check:
    """The speed was measured where the configuration asks for it."""
    measured_on = evidence.benchmark["device"]
    accepted = {str(measured_on["kind"]).casefold(), str(measured_on["name"]).casefold(), "any"}
    failed = config.device.casefold() not in accepted
    return check(
        "device",
        severity="block",
        requirement=f"speed measured on {config.device}",
        measured=f"{measured_on['name']} ({measured_on['kind']})",
        failure=f"the evidence of {config.device} is missing" if failed else "",
        remedy="run the pipeline on that device, or change gate.device",
    )


def ratio(
    evidence: GateEvidence, key: str, *, name: str, least: float, on_low: bool, remedy: str
) -> Check:
    """A warning when a ratio of two arms stays under `least`: its lower bound, or its mean."""
    estimate = (evidence.benchmarked.get("ratios") or {}).get(key)
    what = "lower bound" if on_low else "mean"
    requirement = f"{what} of {key.replace('_', ' ')} at least {least:.3f}"
    if estimate is None:
        return skipped(
            name, severity="warn", requirement=requirement, why=f"{key} was not measured"
        )
    value = estimate["low"] if on_low else estimate["mean"]
    return check(
        name,
        severity="warn",
        requirement=requirement,
        measured=estimate,
        failure=f"it falls short by {least - value:.3f}" if value < least else "",
        remedy=remedy,
    )


def skipped(name: str, *, severity: Severity, requirement: str, why: str) -> Check:
    """A check that does not apply, and why."""
    return Check(
        name, severity, None, None, None, requirement, "skip", "", f"{_title(name)}: {why}."
    )


def _bounded(
    name: str,
    estimate: Mapping[str, Any],
    *,
    requirement: str,
    shortfall: float | None,
    remedy: str,
    min_prompts: int,
) -> Check:
    failures = []
    if shortfall is not None:
        failures.append(f"the lower bound falls short by {shortfall:.3f}")
    if estimate["num_prompts"] < min_prompts:
        failures.append(f"{estimate['num_prompts']} prompts are fewer than {min_prompts}")
    return check(
        name,
        severity="block",
        requirement=requirement,
        measured=estimate,
        failure="; ".join(failures),
        remedy=remedy,
    )


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


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _of_recipe(report: Mapping[str, Any], recipe: str, *, name: str) -> Mapping[str, Any]:
    recipes: Mapping[str, Mapping[str, Any]] = report["recipes"]
    if recipe not in recipes:
        raise EvidenceError(
            f"reading reports/{name}.json",
            found=f"recipes {', '.join(sorted(recipes)) or 'none'}",
            expected=f"the registered recipe {recipe}",
            remedy=f"rerun `dvc repro` so that {name} covers the registered recipe",
        )
    return recipes[recipe]


def _in_range(key: str, value: float, *, low: float, high: float = float("inf")) -> None:
    if not low <= value <= high:
        raise ConfigError(
            f"reading {key}",
            found=str(value),
            expected=f"{low} or more" if high == float("inf") else f"a number from {low} to {high}",
            remedy="correct it under conf/gate/",
        )
