"""The drift verdict: may the draft that is PROPOSED follow its reference on the current target?

A champion of the same target is what any other pair of that target has to be no worse than. Else a
reused draft is held against its own record, a new one against the champion's. When the champion
already is this pair, the comparison with its predecessor is kept, so that a promotion changes no
verdict. The rule is non-inferiority by a margin: what is not shown to be no worse has drifted.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True)
class Records:
    """What the registry holds that a proposed draft may be compared with.

    Attributes:
        target_digest: The target that the draft is proposed for.
        champion: Who holds the alias now.
        predecessor: Who held it before.
        incumbent: The last champion with another target.
        known: The registered pair that stage start took the draft from, if it did.
        history: The versions that became champion, oldest first.
        tagged: Digest of a draft -> the version whose traffic raised an alarm about it.
    """

    target_digest: str
    champion: Recorded | None = None
    predecessor: Recorded | None = None
    incumbent: Recorded | None = None
    known: Recorded | None = None
    history: Sequence[str] = ()
    tagged: Mapping[str, str] = field(default_factory=dict)


def choose_reference(proposed: Mapping[str, Any], records: Records) -> Reference:
    """Which record the proposed RecipeEvaluation is compared with.

    A champion of the same target comes first, whatever the draft: who replaces it has to be no
    worse. Else the draft's own record: a reused draft has not changed, so any change is its
    target's. That holds too for a pair that returns with its target: pointing back is no new draft
    that must beat the last. A pair that is known has a record of its own on this target, which
    tells more than one of its draft on another.
    """
    champion, known, incumbent = records.champion, records.known, records.incumbent
    is_champion = champion is not None and champion.pair["pair_digest"] == proposed["pair_digest"]
    other = records.predecessor if is_champion else champion
    if other is None or other.pair["target_digest"] != records.target_digest:
        if incumbent is not None and incumbent.pair["draft_digest"] == proposed["draft_digest"]:
            return Reference("own_record", known or incumbent)
        if known is not None and other is not None and _returns(known, other, records.history):
            return Reference("own_record", known)
    if other is None:
        return Reference("none", None)
    return Reference("predecessor" if is_champion else "champion", other)


def _returns(known: Recorded, other: Recorded, history: Sequence[str]) -> bool:
    """Whether the pair was champion before `other`, which is of another target, was.

    Example: with the history 1, 2, 3 version 1 returns when its target does; afterwards, with
    1, 2, 3, 1 and 3 as the predecessor, it still is one that returned.
    """
    version, last = (str(recorded.pair["version"]) for recorded in (known, other))
    became = [index for index, moved in enumerate(history) if moved == last]
    return bool(became) and version in history[: became[-1]]


def drift_report(
    proposed: Mapping[str, Any], records: Records, *, config: DriftConfig, seed: int
) -> dict[str, Any]:
    """The content of `reports/drift.json`.

    Args:
        proposed: RecipeEvaluation of the proposed pair on the current target.
        records: What it may be compared with.
        config: Margin, confidence, temperature and minimum number of prompts.
        seed: Seed of the intervals.

    Raises:
        EvidenceError: The proposed pair was not measured at the judged temperature.
    """
    reference = choose_reference(proposed, records)
    tagged = records.tagged.get(proposed["draft_digest"])
    judged = _judged(proposed, reference, config=config, seed=seed)
    if tagged is not None:
        reason = f"Version {tagged}, with the same draft, carries a live-drift tag."
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


def _judged(
    proposed: Mapping[str, Any], reference: Reference, *, config: DriftConfig, seed: int
) -> dict[str, Any]:
    empty: dict[str, Any] = {"pooled": None, "by_domain": {}}
    if reference.recorded is None:
        reason = "There is no earlier promoted pair to compare with."
        return empty | {"verdict": "no_reference", "reasons": [reason]}
    key = config.temperature_key
    after = alpha_by_prompt(proposed, key)
    if reason := reference.recorded.lacks(key):
        return empty | {"verdict": "unknown", "reasons": [reason]}
    before = alpha_by_prompt(reference.recorded.record, key)
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
