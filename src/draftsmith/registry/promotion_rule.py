"""The checks of the promotion gate: each compares one measured fact with one requirement.

A check never raises because of a bad value, only because of a missing one. Pure; `gate.py` puts
the checks together and decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.drift.settings import temperature_key
from draftsmith.errors import EvidenceError
from draftsmith.registry.advice_table import SPECULATES, is_checked, is_of_device, nearest_entry
from draftsmith.registry.checks import Check, check, skipped
from draftsmith.registry.device_evidence import IMPORTED_FROM, PROGRAM, is_device
from draftsmith.registry.gate_settings import GateConfig, Severity
from draftsmith.registry.pair import pair_digest

_SHORT = 64  # tokens, about those of the benchmark's prompts and answers


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
        champion: The version that held the alias when the pair was compared, where there was one.
        advice: `reports/advice.json`, where `draftsmith advise` was run for this pair.
    """

    registration: Mapping[str, Any]
    target: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    benchmark: Mapping[str, Any]
    drift: Mapping[str, Any]
    incumbent: Mapping[str, Any] | None = None
    champion: str | None = None
    advice: Mapping[str, Any] | None = None

    @property
    def evaluated(self) -> Mapping[str, Any]:
        """RecipeEvaluation of the registered recipe."""
        return _of_recipe(self.evaluation, self.registration["recipe"], name="evaluation")

    @property
    def benchmarked(self) -> Mapping[str, Any]:
        """RecipeBenchmark of the registered recipe."""
        return _of_recipe(self.benchmark, self.registration["recipe"], name="benchmark")


@dataclass(frozen=True)
class RatioRule:
    """What the ratio of two arms of the benchmark must reach.

    Attributes:
        name: Of the check.
        key: Of the ratio in `reports/benchmark.json`.
        least: What it must reach.
        bound: Which of its figures must: the lower bound, or the mean.
        remedy: What to do when it does not.
    """

    name: str
    key: str
    least: float
    bound: Literal["low", "mean"]
    remedy: str


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
        remedy="distil another draft: change the recipe, the corpus or distill.seed. Where it was "
        "barred by mistake, `draftsmith release` takes it out",
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
    measured_on, origin = evidence.benchmark["device"], evidence.benchmark.get(IMPORTED_FROM)
    failed = not is_device(measured_on, config.device)
    return check(
        "device",
        severity="block",
        requirement=f"speed measured on {config.device}",
        measured=f"{measured_on['name']} ({measured_on['kind']})"
        + (f", imported from {origin}" if origin else ""),
        failure=f"the evidence of {config.device} is missing" if failed else "",
        remedy=f"measure it there with `{PROGRAM}` and bring the JSON here by `draftsmith evidence "
        "import`, run the pipeline on that device, or change gate.device",
    )


def ratio(evidence: GateEvidence, rule: RatioRule, *, severity: Severity) -> Check:
    """A ratio of two arms reaches its minimum; a ratio that blocks must have been measured."""
    estimate = (evidence.benchmarked.get("ratios") or {}).get(rule.key)
    what = "lower bound" if rule.bound == "low" else rule.bound
    requirement = f"{what} of {rule.key.replace('_', ' ')} at least {rule.least:.3f}"
    if estimate is None and severity != "block":
        why = f"{rule.key} was not measured"
        return skipped(rule.name, severity=severity, requirement=requirement, why=why)
    if estimate is None:
        failure = "a check that blocks needs evidence"
    else:
        value = estimate[rule.bound]
        failure = "" if value >= rule.least else f"it falls short by {rule.least - value:.3f}"
    return check(
        rule.name,
        severity=severity,
        requirement=requirement,
        measured="nothing" if estimate is None else estimate,
        failure=failure,
        remedy=rule.remedy,
    )


def advice(evidence: GateEvidence) -> Check:
    """What `draftsmith advise` found on this device says nothing against the draft at batch 1."""
    requirement = "advice to speculate for single requests with short prompts and answers"
    found, benchmark = evidence.advice, evidence.benchmark
    at = float(evidence.benchmarked.get("temperature", 0.0))
    told = None
    if found is not None and is_checked(found) and is_of_device(found, benchmark["device"]):
        told = nearest_entry(found, rows=1, temperature=at, context=_SHORT, new_tokens=_SHORT)
    if told is None:
        why = "no checked advice of `draftsmith advise` on this pair where its speed was measured"
        return skipped("advice", severity="warn", requirement=requirement, why=why)
    is_against = told["verdict"] not in SPECULATES
    return check(
        "advice",
        severity="warn",
        requirement=requirement,
        measured=str(told["verdict"]),
        failure="the draft is not what pays best there" if is_against else "",
        remedy="do as the table of `draftsmith advise` says, or raise alpha and advise again",
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
