"""The promotion decision: every check, one verdict, reasons that say by how much.

The checks of drift are here because they depend on one another (a reused draft is judged by its
own record, a new one against the champion); all others are in `promotion_rule.py`. Pure: reads
reports, writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from draftsmith.registry import promotion_rule as rule
from draftsmith.registry.promotion_rule import Check, GateConfig, GateEvidence, Severity

__all__ = ["Check", "GateConfig", "GateEvidence", "decide"]

_DRIFT_REMEDY = (
    "distil a new draft for this target (start.action: retrain), with prompts like those of the "
    "domains that fell"
)


def decide(
    evidence: GateEvidence, *, config: GateConfig, critical_domains: Sequence[str] = ()
) -> dict[str, Any]:
    """The content of `reports/decision.json`.

    Args:
        evidence: The reports.
        config: The `gate` section.
        critical_domains: Domains whose flag blocks (from the `drift` section).

    Returns:
        The verdict is `block` when any check of severity `block` fails. The reasons of a block
        are the details of those checks.

    Raises:
        EvidenceError: A report lacks the registered recipe or the judged temperature.
    """
    checks = [
        rule.losslessness(evidence, config),
        rule.identity(evidence),
        rule.quarantine(evidence),
        rule.alpha(evidence, config),
        rule.speedup(evidence, config),
        rule.device(evidence, config),
        incumbent_test(evidence),
        drift(evidence, config),
        non_inferiority(evidence, config),
        domains(evidence, critical_domains),
        *_comparisons_of_speed(evidence, config),
    ]
    failed = [check for check in checks if check.severity == "block" and check.verdict == "fail"]
    num_blocking = sum(check.severity == "block" and check.verdict == "pass" for check in checks)
    promoted = f"All {num_blocking} blocking checks that apply passed."
    return {
        "schema": 1,
        "verdict": "block" if failed else "promote",
        "name": evidence.registration["name"],
        "version": evidence.registration["version"],
        "pair_digest": evidence.registration["pair_digest"],
        "checks": [asdict(check) for check in checks],
        "reasons": [check.detail for check in failed] or [promoted],
    }


def incumbent_test(evidence: GateEvidence) -> Check:
    """How the old draft fares on the new target.

    Blocks only when that draft is proposed for it; a pair that returns is judged by its own record.
    """
    name, requirement = "incumbent_test", "the incumbent's draft still matches the new target"
    report = evidence.incumbent
    pair = None if report is None else report["incumbent"]
    if report is None or pair is None:
        return rule.skipped(
            name, severity="warn", requirement=requirement, why="there is no incumbent"
        )
    returns = evidence.drift["reference"]["pair_digest"] == evidence.registration["pair_digest"]
    is_proposed = pair["draft_digest"] == evidence.evaluated["draft_digest"] and not returns
    severity: Severity = "block" if is_proposed else "warn"
    if report["verdict"] == "unknown":
        return rule.skipped(
            name,
            severity=severity,
            requirement=requirement,
            why="; ".join(_clauses(report["reasons"])),
        )
    failure = "; ".join(_clauses(report["reasons"])) if report["verdict"] == "drifted" else ""
    return rule.check(
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
        why = "the draft is new, so it has no record of its own"
        return rule.skipped(name, severity="block", requirement=requirement, why=why)
    failure = _comparison_failure(report, config) if is_own else ""
    if report["live_drift"]:
        failure = "; ".join(_clauses(report["reasons"]))
    return rule.check(
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
        return rule.skipped(
            name, severity="block", requirement="no worse than the champion", why=why
        )
    return rule.check(
        name,
        severity="block",
        requirement=f"lower bound of the change against the {kind} above {-report['margin']:.3f}",
        measured=_change(report["pooled"]) or report["verdict"],
        failure=_comparison_failure(report, config),
        remedy="distil for more steps or on more prompts like those of the domains that fell, or "
        "keep the champion; drift.margin says how much loss is tolerated",
    )


def domains(evidence: GateEvidence, critical_domains: Sequence[str]) -> Check:
    """No domain fell by more than the margin beyond chance; a critical one blocks."""
    by_domain: Mapping[str, Mapping[str, Any]] = evidence.drift["by_domain"]
    name, requirement = "domains", "no domain fell by more than the margin beyond chance"
    if not by_domain:
        why = "there is nothing to compare with"
        return rule.skipped(name, severity="warn", requirement=requirement, why=why)
    flagged = sorted(domain for domain, entry in by_domain.items() if entry["flag"])
    critical = sorted(set(flagged) & set(critical_domains))
    falls = [
        f"{domain}{' (critical)' if domain in critical else ''} changed by "
        f"{by_domain[domain]['change']:+.3f} against a margin of {-evidence.drift['margin']:.3f}"
        for domain in flagged
    ]
    return rule.check(
        name,
        severity="block" if critical else "warn",
        requirement=requirement,
        measured=f"{len(flagged)} of {len(by_domain)} domains flagged",
        failure="; ".join(falls),
        remedy="add training prompts of these domains to the corpus and distil again",
    )


def _comparisons_of_speed(evidence: GateEvidence, config: GateConfig) -> list[Check]:
    return [
        rule.ratio(
            evidence,
            "speculative_vs_generate",
            name="better_than_generate",
            least=1.0,
            on_low=True,
            remedy="services that call Transformers generate gain nothing yet; raise alpha",
        ),
        rule.ratio(
            evidence,
            "speculative_vs_prompt_lookup",
            name="better_than_prompt_lookup",
            least=1.0,
            on_low=True,
            remedy="prompt lookup needs no draft and may be as fast here; raise alpha by more "
            "prompts or steps, or serve without a draft",
        ),
        rule.ratio(
            evidence,
            "engine_vs_generate",
            name="engine_ratio",
            least=config.min_engine_ratio,
            on_low=False,
            remedy="the baseline of the speedup is slow; check threads and device, measure again",
        ),
    ]


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
