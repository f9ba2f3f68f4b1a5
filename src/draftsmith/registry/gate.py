"""The promotion decision: every check, one verdict, reasons that say by how much.

The checks of drift are here because they depend on one another (a reused draft is judged by its
own record where its target has no champion, any other against the champion); all others are in
`promotion_rule.py`. Pure: reads reports, writes nothing, is told what day it is. docs/gate.md is
the schema of what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from typing import Any

from draftsmith.registry import promotion_rule as rule
from draftsmith.registry.checks import Check, check, skipped
from draftsmith.registry.gate_settings import DEFAULT_SEVERITIES, GateConfig, Severity
from draftsmith.registry.overrides import applied, valid_until
from draftsmith.registry.promotion_rule import GateEvidence, RatioRule

__all__ = ["SCHEMA", "Check", "GateConfig", "GateEvidence", "decide"]

SCHEMA = 2

_DRIFT_REMEDY = (
    "distil a new draft for this target (start.action: retrain), with prompts like those of the "
    "domains that fell"
)


def decide(
    evidence: GateEvidence,
    *,
    config: GateConfig,
    today: date,
    critical_domains: Sequence[str] = (),
) -> dict[str, Any]:
    """The content of `reports/decision.json`.

    Args:
        evidence: The reports.
        config: The `gate` section.
        today: The day on which overrides must be in force (UTC).
        critical_domains: Domains whose flag blocks (from the `drift` section).

    Returns:
        The verdict is `block` when any check of severity `block` fails and is not overridden. The
        reasons of a block are the details of those checks.

    Raises:
        EvidenceError: A report lacks the registered recipe or the judged temperature.
    """
    severities = {name: config.severity(name) for name in DEFAULT_SEVERITIES}
    if critical_domains and severities["domains"] == "off":
        severities["domains"] = "warn"  # to name a domain critical is to ask for the check
    rules = _rules(evidence, config, severities=severities, critical_domains=critical_domains)
    checks = [
        applied(_judged(name, judge, severities[name]), config.overrides, today=today)
        for name, judge in rules.items()
    ]
    blocking = [check for check in checks if check.severity == "block"]
    failed = [check.detail for check in blocking if check.verdict == "fail"]
    return {
        "schema": SCHEMA,
        "verdict": "block" if failed else "promote",
        "name": evidence.registration["name"],
        "version": evidence.registration["version"],
        "pair_digest": evidence.registration["pair_digest"],
        "champion": evidence.champion,
        "checks": [asdict(check) for check in checks],
        "reasons": failed or _reasons_to_promote(blocking),
        "valid_until": None if failed else valid_until(checks),
    }


def _rules(
    evidence: GateEvidence,
    config: GateConfig,
    *,
    severities: Mapping[str, Severity],
    critical_domains: Sequence[str],
) -> dict[str, Callable[[], Check]]:
    """How each check is judged, by its name, in the order of the decision."""
    return {
        "losslessness": partial(rule.losslessness, evidence, config),
        "identity": partial(rule.identity, evidence),
        "quarantine": partial(rule.quarantine, evidence),
        "alpha": partial(rule.alpha, evidence, config),
        "speedup": partial(rule.speedup, evidence, config),
        "device": partial(rule.device, evidence, config),
        "incumbent_test": partial(incumbent_test, evidence, severities["incumbent_test"]),
        "drift": partial(drift, evidence, config),
        "non_inferiority": partial(non_inferiority, evidence, config),
        "domains": partial(domains, evidence, severities["domains"], critical_domains),
        **{
            ratio.name: partial(rule.ratio, evidence, ratio, severity=severities[ratio.name])
            for ratio in _ratios(config)
        },
        "advice": partial(rule.advice, evidence),
    }


def _judged(name: str, judge: Callable[[], Check], severity: Severity) -> Check:
    """The check with its configured severity, which two checks refine themselves."""
    if severity == "off":
        return skipped(name, severity="off", requirement="none", why="gate.checks switches it off")
    judged = judge()
    refines = name in ("incumbent_test", "domains")
    return judged if refines else replace(judged, severity=severity)


def _reasons_to_promote(blocking: Sequence[Check]) -> list[str]:
    num_passed = sum(check.verdict == "pass" for check in blocking)
    overridden = [check for check in blocking if check.verdict == "overridden"]
    if not overridden:
        return [f"All {num_passed} blocking checks that apply passed."]
    names = ", ".join(check.name for check in overridden)
    passed = f"{num_passed} blocking checks passed; what failed is overridden: {names}."
    return [passed, *(check.detail for check in overridden)]


def incumbent_test(evidence: GateEvidence, severity: Severity) -> Check:
    """How the old draft fares on the new target.

    Only warns unless that draft is proposed for it; a pair that returns is judged by its own
    record.
    """
    name, requirement = "incumbent_test", "the incumbent's draft still matches the new target"
    report = evidence.incumbent
    pair = None if report is None else report["incumbent"]
    if report is None or pair is None:
        return skipped(name, severity="warn", requirement=requirement, why="there is no incumbent")
    returns = evidence.drift["reference"]["pair_digest"] == evidence.registration["pair_digest"]
    is_proposed = pair["draft_digest"] == evidence.evaluated["draft_digest"] and not returns
    severity = severity if is_proposed else "warn"
    if report["verdict"] == "unknown":
        return skipped(
            name,
            severity=severity,
            requirement=requirement,
            why="; ".join(_clauses(report["reasons"])),
        )
    failure = "; ".join(_clauses(report["reasons"])) if report["verdict"] == "drifted" else ""
    return check(
        name,
        severity=severity,
        requirement=requirement,
        measured=_change(report["pooled"]) or report["verdict"],
        failure=failure,
        remedy=_DRIFT_REMEDY if is_proposed else "none needed: another record counts",
    )


def drift(evidence: GateEvidence, config: GateConfig) -> Check:
    """The proposed draft against its own record and the tags from its traffic."""
    report = evidence.drift
    name, requirement = "drift", "no live-drift tag, and no worse than the draft's own record"
    is_own = report["reference"]["kind"] == "own_record"
    if not is_own and not report["live_drift"]:
        why = "another record than the draft's own is compared with"
        return skipped(name, severity="block", requirement=requirement, why=why)
    failure = _comparison_failure(report, config) if is_own else ""
    if report["live_drift"]:
        failure = "; ".join(_clauses(report["reasons"]))
    return check(
        name,
        severity="block",
        requirement=f"{requirement} by {report['margin']:.3f}",
        measured=_change(report["pooled"]) or report["verdict"],
        failure=failure,
        remedy=_DRIFT_REMEDY,
    )


def non_inferiority(evidence: GateEvidence, config: GateConfig) -> Check:
    """The proposed pair against the champion (or, once promoted, against its predecessor)."""
    report = evidence.drift
    kind = report["reference"]["kind"]
    name = "non_inferiority"
    if kind not in ("champion", "predecessor"):
        why = (
            "there is no champion"
            if kind == "none"
            else "a reused draft is judged by its own record"
        )
        return skipped(name, severity="block", requirement="no worse than the champion", why=why)
    return check(
        name,
        severity="block",
        requirement=f"lower bound of the change against the {kind} above {-report['margin']:.3f}",
        measured=_change(report["pooled"]) or report["verdict"],
        failure=_comparison_failure(report, config),
        remedy="distil for more steps or on more prompts like those of the domains that fell, or "
        "keep the champion; drift.margin says how much loss is tolerated",
    )


def domains(
    evidence: GateEvidence, severity: Severity, critical_domains: Sequence[str] = ()
) -> Check:
    """No domain fell by more than the margin beyond chance; a critical one blocks.

    So does a critical domain without prompts: nothing would guard it.
    """
    by_domain: Mapping[str, Mapping[str, Any]] = evidence.drift["by_domain"]
    name, requirement = "domains", "no domain fell by more than the margin beyond chance"
    judged = set(by_domain) or _measured_domains(evidence)
    unknown = sorted(set(critical_domains) - judged)
    if not by_domain and not unknown:
        why = "there is nothing to compare with"
        return skipped(name, severity=severity, requirement=requirement, why=why)
    flagged = sorted(domain for domain, entry in by_domain.items() if entry["flag"])
    critical = set(flagged) & set(critical_domains)
    failures = [
        f"{domain}{' (critical)' if domain in critical else ''} changed by "
        f"{by_domain[domain]['change']:+.3f} against a margin of {-evidence.drift['margin']:.3f}"
        for domain in flagged
    ] + [
        f"{domain} (critical) has no eval prompt to judge it by; domains that have: "
        f"{', '.join(sorted(judged)) or 'none'}"
        for domain in unknown
    ]
    remedies = ["add training prompts of these domains to the corpus and distil again"]
    if unknown:
        remedies.append("correct drift.critical_domains, or add prompts of these domains")
    return check(
        name,
        severity="block" if critical or unknown else severity,
        requirement=requirement,
        measured=f"{len(flagged)} of {len(by_domain)} domains flagged",
        failure="; ".join(failures),
        remedy="; ".join(remedies if flagged else remedies[1:]),
    )


def _measured_domains(evidence: GateEvidence) -> set[str]:
    return {
        domain
        for estimate in evidence.evaluated["alpha"].values()
        for domain in estimate["by_domain"]
    }


def _ratios(config: GateConfig) -> tuple[RatioRule, ...]:
    return (
        RatioRule(
            "better_than_generate",
            "speculative_vs_generate",
            least=1.0,
            bound="low",
            remedy="services that call Transformers generate gain nothing yet; raise alpha",
        ),
        RatioRule(
            "better_than_prompt_lookup",
            "speculative_vs_prompt_lookup",
            least=1.0,
            bound="low",
            remedy="prompt lookup needs no draft and may be as fast here; raise alpha by more "
            "prompts or steps, or serve without a draft",
        ),
        RatioRule(
            "engine_ratio",
            "engine_vs_generate",
            least=config.min_engine_ratio,
            bound="mean",
            remedy="the baseline of the speedup is slow; check threads and device, measure again",
        ),
    )


def _comparison_failure(report: Mapping[str, Any], config: GateConfig) -> str:
    """What is wrong with the comparison of the drift report; empty when nothing is."""
    pooled, margin = report["pooled"], report["margin"]
    if report["verdict"] == "unknown" or pooled is None:
        clauses = "; ".join(_clauses(report["reasons"]))
        return f"{clauses} (gate.require_comparison)" if config.require_comparison else ""
    if not pooled["low"] > -margin:  # also blocks a bound that is no number
        return f"the lower bound falls short by {-margin - pooled['low']:.3f}"
    return (
        ""
        if report["verdict"] == "pass" or report["live_drift"]
        else f"the verdict is {report['verdict']}"
    )


def _change(pooled: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A comparison's change in the shape of an estimate."""
    if pooled is None:
        return None
    keys = {"mean": "change", "low": "low", "high": "high", "num_prompts": "num_prompts"}
    return {name: pooled[key] for name, key in keys.items()}


def _clauses(reasons: Sequence[str]) -> list[str]:
    """Sentences without their full stops, to be joined into one."""
    return [reason.rstrip(".") for reason in reasons]
