"""The drift verdict: may the draft that is PROPOSED follow its reference on the current target?

A reused draft is held against its own record, a new one against the champion's; when the champion
already is this pair, the comparison with its predecessor is kept, so that a promotion changes no
verdict. The rule is non-inferiority by a margin: what is not shown to be no worse has drifted.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from draftsmith.drift.comparison import Comparison, compare, compare_domains
from draftsmith.drift.evidence import Recorded, alpha_by_prompt, domain_by_prompt
from draftsmith.drift.settings import DriftConfig
from draftsmith.drift.wording import change_clause, domain_reasons

Kind = Literal["champion", "predecessor", "own_record", "none"]
Verdict = Literal["pass", "drifted", "unknown", "no_reference"]

_SUBJECT_OF = {
    "champion": "that of the champion, {label}",
    "predecessor": "that of its predecessor, {label}",
    "own_record": "the draft's own record, {label}",
}


@dataclass(frozen=True)
class Reference:
    """What the proposed draft is held against.

    Attributes:
        kind: Which of the rules chose it.
        recorded: The pair and its record; None for kind `none`.
    """

    kind: Kind
    recorded: Recorded | None


def choose_reference(
    proposed: Mapping[str, Any],
    *,
    champion: Recorded | None,
    predecessor: Recorded | None,
    incumbent: Recorded | None,
    known: Recorded | None = None,
) -> Reference:
    """Which record the proposed RecipeEvaluation is compared with.

    The draft's own record comes first: a reused draft has not changed, so any change is its
    target's. That holds too for a pair that returns, `known` and registered before the one it
    would be held against: pointing back to an old target is no new draft that must beat the last.
    A pair that is known has a record of its own on this target, which tells more than one of its
    draft on another.
    """
    is_reused = incumbent is not None and incumbent.pair["draft_digest"] == proposed["draft_digest"]
    if is_reused:
        return Reference("own_record", known or incumbent)
    is_champion = champion is not None and champion.pair["pair_digest"] == proposed["pair_digest"]
    other = predecessor if is_champion else champion
    if other is None:
        return Reference("none", None)
    if known is not None and int(known.pair["version"]) < int(other.pair["version"]):
        return Reference("own_record", known)
    return Reference("predecessor" if is_champion else "champion", other)


def drift_report(  # noqa: PLR0913  four records, each by its name
    proposed: Mapping[str, Any],
    *,
    champion: Recorded | None,
    predecessor: Recorded | None,
    incumbent: Recorded | None,
    known: Recorded | None = None,
    config: DriftConfig,
    seed: int,
) -> dict[str, Any]:
    """The content of `reports/drift.json`.

    Args:
        proposed: RecipeEvaluation of the proposed pair on the current target.
        champion: Who holds the alias now.
        predecessor: Who held it before.
        incumbent: The newest promoted pair of another target.
        known: The registered pair that stage start took the draft from, if it did.
        config: Margin, confidence, temperature and minimum number of prompts.
        seed: Seed of the intervals.

    Raises:
        EvidenceError: A side was not measured at the judged temperature.
    """
    reference = choose_reference(
        proposed, champion=champion, predecessor=predecessor, incumbent=incumbent, known=known
    )
    tagged = _tagged(proposed, (champion, predecessor, incumbent))
    judged = _judged(proposed, reference, config=config, seed=seed)
    if tagged is not None:
        reason = f"{tagged.label.capitalize()}, with the same draft, carries a live-drift tag."
        judged |= {"verdict": "drifted", "reasons": [reason, *judged["reasons"]]}
    pair = {} if reference.recorded is None else reference.recorded.pair
    return {
        "schema": 1,
        "reference": {
            "kind": reference.kind,
            "pair_digest": pair.get("pair_digest"),
            "version": pair.get("version"),
        },
        "pair_digest": proposed["pair_digest"],
        "draft_digest": proposed["draft_digest"],
        "temperature": config.temperature_key,
        "margin": config.margin,
        "live_drift": tagged is not None,
    } | judged


def judge(pooled: Comparison, config: DriftConfig) -> Verdict:
    """Non-inferiority: pass only when the lower bound of the change is above -margin."""
    if pooled.num_prompts < config.min_prompts:
        return "unknown"
    return "pass" if pooled.low > -config.margin else "drifted"


def _tagged(proposed: Mapping[str, Any], pairs: tuple[Recorded | None, ...]) -> Recorded | None:
    for recorded in pairs:
        if recorded is None or not recorded.pair.get("live_drift"):
            continue
        if recorded.pair["draft_digest"] == proposed["draft_digest"]:
            return recorded
    return None


def _judged(
    proposed: Mapping[str, Any], reference: Reference, *, config: DriftConfig, seed: int
) -> dict[str, Any]:
    empty: dict[str, Any] = {"pooled": None, "by_domain": {}}
    if reference.recorded is None:
        reason = "There is no earlier promoted pair to compare with."
        return empty | {"verdict": "no_reference", "reasons": [reason]}
    key = config.temperature_key
    before, after = alpha_by_prompt(reference.recorded.record, key), alpha_by_prompt(proposed, key)
    if not before.keys() & after.keys():
        label = reference.recorded.label
        reason = f"The {reference.kind.replace('_', ' ')}, {label}, has no eval prompt in common."
        return empty | {"verdict": "unknown", "reasons": [reason]}
    pooled = compare(before, after, seed=seed, confidence=config.confidence)
    domains = compare_domains(
        before, after, domains=domain_by_prompt(proposed), seed=seed, config=config
    )
    verdict = judge(pooled, config)
    return {
        "verdict": verdict,
        "reasons": [
            _pooled_reason(verdict, reference, pooled=pooled, config=config),
            *domain_reasons(domains),
        ],
        "pooled": asdict(pooled),
        "by_domain": {name: domain.as_record() for name, domain in domains.items()},
    }


def _pooled_reason(
    verdict: Verdict, reference: Reference, *, pooled: Comparison, config: DriftConfig
) -> str:
    label = reference.recorded.label if reference.recorded else ""
    against = _SUBJECT_OF[reference.kind].format(label=label)
    measured = change_clause(pooled, config, subject="alpha")
    if verdict == "unknown":
        ending = f"fewer than {config.min_prompts} common prompts cannot tell"
    elif verdict == "pass":
        ending = f"the lower bound is above the margin of {-config.margin:.3f}"
    else:
        beyond = -config.margin - pooled.low
        ending = f"the lower bound is {beyond:.3f} below the margin of {-config.margin:.3f}"
    return f"Compared with {against}, {measured}: {ending}."
