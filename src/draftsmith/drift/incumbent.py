"""The incumbent test: has the newest promoted draft of another target drifted from the new one?

Its own record (old draft, old target) is compared with a new measurement (old draft, new target)
on the same frozen prompts, and what changed is named: parts of the target, the engine, the
prompts. Pure; the measurement is made elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from draftsmith.drift.comparison import Comparison, DomainComparison, compare, compare_domains
from draftsmith.drift.evidence import Recorded, alpha_by_prompt, domain_by_prompt, temperatures
from draftsmith.drift.prediction import predicted_changes
from draftsmith.drift.settings import DriftConfig
from draftsmith.drift.wording import (
    change_clause,
    domain_reasons,
    engine_reasons,
    predicted_reasons,
    target_reasons,
    traffic_reasons,
)

Verdict = Literal["matched", "drifted", "unknown", "none"]

_COMPONENTS = {
    "weights": "weights_digest",
    "config": "config_digest",
    "tokenizer": "tokenizer_digest",
    "chat_template": "chat_template_digest",
    "generation_config": "generation_config_digest",
    "dtype": "dtype",
    "vocabulary": "vocab_size",
}
# A draft has the token ids and the width of its own target; under others it cannot run at all.
SHAPE = "shape"
_RULE_OUT_REUSE = ("tokenizer", "vocabulary", SHAPE)
_NOTHING_COMPARED: Mapping[str, Any] = {
    "engine": {},
    "prompts": {"common": 0, "new": 0, "gone": 0},
    "num_prompts": 0,
    "pooled": None,
    "predicted": None,
    "by_temperature": {},
    "by_domain": {},
    "record": None,
}


def identity_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Names of the components in which two target identities (`target.json`) differ."""
    return [name for name, key in _COMPONENTS.items() if old.get(key) != new.get(key)]


def rules_out_reuse(changed: Sequence[str]) -> bool:
    """Whether these changes rule out that the old draft can run on the new target at all."""
    return any(name in changed for name in _RULE_OUT_REUSE)


def engine_changes(old: Mapping[str, str], new: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Packages of the engine whose version is known on both sides and differs."""
    return {
        name: [version, now]
        for name, version in old.items()
        if (now := new.get(name)) and now != version
    }


def incumbent_report(
    incumbent: Recorded | None,
    measured: Mapping[str, Any] | None,
    *,
    changed: Sequence[str],
    config: DriftConfig,
    seed: int,
) -> dict[str, Any]:
    """The content of `reports/incumbent.json`.

    Args:
        incumbent: The newest promoted pair of another target, if there is one.
        measured: RecipeEvaluation of its draft on the new target, with today's `packages`; None
            where it could not be measured.
        changed: Components in which the two targets differ; `SHAPE` where the draft did not fit.
        config: Margin, confidence, temperature and minimum number of prompts.
        seed: Seed of the intervals.

    Raises:
        EvidenceError: The draft was not measured at the judged temperature on the new target.
    """
    report: dict[str, Any] = {
        "schema": 1,
        "changed": list(changed),
        "incumbent": None if incumbent is None else dict(incumbent.pair),
        "temperature": config.temperature_key,
        "margin": config.margin,
        **_NOTHING_COMPARED,
    }
    if incumbent is None:
        reason = "There is no promoted pair of another target to test."
        return report | {"verdict": "none", "reasons": [reason]}
    if rules_out_reuse(changed):
        return report | {
            "verdict": "drifted",
            "reasons": [
                f"The target's {' and '.join(changed)} changed, so the draft of {incumbent.label} "
                "cannot run on it: it has drifted by definition and was not measured."
            ],
        }
    if measured is None:
        reason = f"The draft of {incumbent.label} was not measured on the new target."
        return report | {"verdict": "unknown", "reasons": [reason]}
    judged = _compared(incumbent, measured, config=config, seed=seed)
    judged["reasons"] += target_reasons(changed)
    if incumbent.pair.get("live_drift"):
        tagged = f"{incumbent.label.capitalize()} carries a live-drift tag from its traffic."
        judged["reasons"].append(tagged)
    return report | judged


def judge(pooled: Comparison, config: DriftConfig) -> Verdict:
    """The rule of the incumbent test.

    - unknown: fewer than `min_prompts` common prompts;
    - matched: the lower bound of the change is above -margin;
    - drifted: the change itself is below -margin, or the interval excludes zero and reaches
      -margin;
    - unknown: otherwise, that is, the interval is too wide to tell.
    """
    if pooled.num_prompts < config.min_prompts:
        return "unknown"
    if pooled.low > -config.margin:
        return "matched"
    if pooled.change < -config.margin or pooled.high < 0:
        return "drifted"
    return "unknown"


def _compared(
    incumbent: Recorded, measured: Mapping[str, Any], *, config: DriftConfig, seed: int
) -> dict[str, Any]:
    key = config.temperature_key
    after = alpha_by_prompt(measured, key)
    engine = engine_changes(incumbent.engine_versions, measured.get("packages", {}))
    if reason := incumbent.lacks(key):
        unknown = {"verdict": "unknown", "reasons": [reason]}
        return unknown | {"record": dict(measured), "engine": engine}
    before = alpha_by_prompt(incumbent.record, key)
    prompts = {
        "common": len(before.keys() & after.keys()),
        "new": len(after.keys() - before.keys()),
        "gone": len(before.keys() - after.keys()),
    }
    base = {"record": dict(measured), "prompts": prompts, "engine": engine}
    if not prompts["common"]:
        reason = f"{incumbent.label.capitalize()} was evaluated on none of today's eval prompts."
        return base | {"verdict": "unknown", "reasons": [reason]}
    pooled = compare(before, after, seed=seed, confidence=config.confidence)
    domains = compare_domains(
        before, after, domains=domain_by_prompt(measured), seed=seed, config=config
    )
    by_temperature = _by_temperature(incumbent, measured, config=config, seed=seed)
    predicted = by_temperature[key]["predicted"]
    verdict = judge(pooled, config)
    return base | {
        "verdict": verdict,
        "reasons": [
            _pooled_reason(verdict, incumbent, pooled=pooled, config=config),
            *domain_reasons(domains),
            *predicted_reasons(predicted),
            *traffic_reasons(prompts),
            *engine_reasons(engine),
        ],
        "num_prompts": pooled.num_prompts,
        "pooled": asdict(pooled),
        "predicted": predicted,
        "by_temperature": by_temperature,
        "by_domain": _records(domains),
    }


def _by_temperature(
    incumbent: Recorded, new: Mapping[str, Any], *, config: DriftConfig, seed: int
) -> dict[str, Any]:
    """Changes of alpha, and what they should do to tau and speedup, pooled and by domain."""
    old, domains = incumbent.record, domain_by_prompt(new)
    results: dict[str, Any] = {}
    for key in temperatures(new):
        if key not in temperatures(old):
            continue
        before, after = alpha_by_prompt(old, key), alpha_by_prompt(new, key)
        if before.keys() & after.keys():
            pooled = compare(before, after, seed=seed, confidence=config.confidence)
            by_domain = compare_domains(before, after, domains=domains, seed=seed, config=config)
            predicted = None
            if incumbent.benchmark is not None:
                predicted = predicted_changes(
                    before,
                    after,
                    benchmark=incumbent.benchmark,
                    temperature=key,
                    domains=domains,
                    seed=seed,
                    confidence=config.confidence,
                )
            results[key] = asdict(pooled) | {
                "by_domain": _records(by_domain),
                "predicted": predicted,
            }
    return results


def _records(domains: Mapping[str, DomainComparison]) -> dict[str, Any]:
    return {name: domain.as_record() for name, domain in domains.items()}


def _pooled_reason(
    verdict: Verdict, incumbent: Recorded, *, pooled: Comparison, config: DriftConfig
) -> str:
    measured = change_clause(pooled, config, subject=f"alpha of the draft of {incumbent.label}")
    few = pooled.num_prompts < config.min_prompts
    ending = {
        "matched": f"it still matches within the margin of {config.margin:.3f}",
        "drifted": f"it has drifted beyond the margin of {config.margin:.3f}",
        "unknown": f"fewer than {config.min_prompts} common prompts cannot tell"
        if few
        else f"the interval is too wide to tell at a margin of {config.margin:.3f}",
    }[verdict]
    return f"On the new target {measured}: {ending}."
