"""Where each draft comes from: a known pair, the incumbent, or training from either model.

Reuse takes the incumbent's draft as it is; a warm start trains on from its weights; a retraining
starts from the target's layers, with another seed where traffic raised an alarm about what the
configured one gives.

The content of `build/start.json` triggers training when it changes, so its reasons hold no
measured number: a second measurement must not retrain anything. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.drift.incumbent import rules_out_reuse
from draftsmith.drift.settings import DriftConfig
from draftsmith.errors import EvidenceError

Pair = Mapping[str, Any]


@dataclass(frozen=True)
class StartConfig:
    """The `start` section.

    Attributes:
        action: `auto` follows the incumbent test; the others overrule it and known pairs.
    """

    action: Literal["auto", "reuse", "warm_start", "retrain"] = "auto"


def start_report(
    recipes: Mapping[str, Sequence[str]],
    *,
    known: Mapping[str, Pair | None],
    incumbent: Mapping[str, Any] | None,
    config: StartConfig,
    drift: DriftConfig,
    imported: Collection[str] = (),
) -> dict[str, Any]:
    """The content of `build/start.json`.

    Args:
        recipes: The draft recipes of this run, name -> the digests that drafts of its settings can
            have.
        known: For each recipe the registered pair of the same target, recipe and corpus, if there
            is one, with `quarantine` and `reseed` as `registry.known` describes them.
        incumbent: `reports/incumbent.json`; its `incumbent` is the pair whose draft may be reused
            or trained on.
        config: Whether the configuration overrules the test.
        drift: The drift section, for its `on_match`.
        imported: Recipes whose draft was trained elsewhere: it is taken as it is.

    Raises:
        EvidenceError: The incumbent's draft is demanded and there is none that could be taken.
    """
    report: Mapping[str, Any] = incumbent or {"verdict": "none", "incumbent": None, "changed": []}
    pair: Pair | None = report["incumbent"]
    if config.action in ("reuse", "warm_start"):
        _require_usable(pair, recipes, action=config.action, changed=report["changed"])
    decisions: dict[str, Any] = {}
    for recipe in recipes:
        match config.action:
            case "retrain":
                decisions[recipe] = _retrain("The configuration asks for a new draft.")
            case "reuse" | "warm_start":
                decisions[recipe] = _forced(config.action, recipe, pair)
            case "auto":
                decisions[recipe] = _automatic(
                    recipes[recipe], known.get(recipe), report=report, drift=drift
                )
    for recipe in set(imported) & set(decisions):
        if decisions[recipe]["action"] == "warm_start":
            decisions[recipe]["action"] = "reuse"  # there is no training to start
    return {"recipes": decisions}


def _automatic(
    digests: Sequence[str], known: Pair | None, *, report: Mapping[str, Any], drift: DriftConfig
) -> dict[str, Any]:
    if known is not None:
        return _of_known(known)
    pair: Pair | None = report["incumbent"]
    if pair is None or report["verdict"] == "none":
        return _retrain("There is no promoted pair of another target whose draft could be used.")
    return _from_incumbent(digests, pair, verdict=report["verdict"], drift=drift)


def _of_known(known: Pair) -> dict[str, Any]:
    label = f"Version {known['version']} has this target, recipe and corpus"
    if known["live_drift"] and known["reseed"] is not None:
        return _retrain(
            f"{label}, and traffic raised an alarm about its draft: another seed gives another.",
            reseed=known["reseed"],
        )
    if known["live_drift"]:
        reason = f"{label}; its draft carries a live-drift tag and was imported: import another."
    elif known["quarantine"] is not None:
        is_trained = known["reseed"] is not None
        other = "change corpus, recipe or distill.seed" if is_trained else "import another draft"
        reason = (
            f"{label} and is in quarantine, which starts no training. To go on, take it out "
            f"(`draftsmith release {known['version']}`), or {other}."
        )
    else:
        reason = "This pair of target, recipe and corpus is registered."
    return _take("known", known, reason=reason)


def _from_incumbent(
    digests: Sequence[str], pair: Pair, *, verdict: str, drift: DriftConfig
) -> dict[str, Any]:
    label = f"The draft of version {pair['version']}"
    if pair["recipe_digest"] not in digests:
        return _retrain(f"{label} was built by another recipe or with other settings.")
    if pair["live_drift"]:
        return _retrain(f"{label} carries a live-drift tag.")
    if verdict == "drifted":
        return _retrain(f"{label} has drifted away from the new target.")
    if verdict != "matched":
        return _retrain(f"Whether {label[0].lower()}{label[1:]} still matches is unknown.")
    if drift.on_match == "retrain":
        return _retrain(f"{label} still matches, and the configuration asks for a new one anyway.")
    return _take(drift.on_match, pair, reason=f"{label} still matches the new target.")


def _forced(action: str, recipe: str, pair: Pair | None) -> dict[str, Any]:
    if pair is None or pair["recipe"] != recipe:
        return _retrain("The incumbent's draft is asked for, and it was built by another recipe.")
    return _take(action, pair, reason="The configuration asks for the incumbent's draft.")


def _require_usable(
    pair: Pair | None, recipes: Collection[str], *, action: str, changed: Sequence[str]
) -> None:
    if pair is None:
        found = "no promoted pair of another target"
    elif pair["recipe"] not in recipes:
        found = f"version {pair['version']}, built by recipe {pair['recipe']}"
    elif rules_out_reuse(changed):
        found = f"version {pair['version']}, whose target differs in {' and '.join(changed)}"
    else:
        return
    raise EvidenceError(
        f"taking the incumbent's draft (start.action: {action})",
        found=found,
        expected=f"a promoted draft of {' or '.join(recipes)}, of the same tokenizer and width",
        remedy="set start.action to auto or retrain, or name the promoted recipe under recipes",
    )


def _take(action: str, pair: Pair, *, reason: str) -> dict[str, Any]:
    return {
        "action": action,
        "source_pair_digest": pair["pair_digest"],
        "source_version": pair["version"],
        "reseed": 0,
        "reason": reason,
    }


def _retrain(reason: str, *, reseed: int = 0) -> dict[str, Any]:
    return {
        "action": "retrain",
        "source_pair_digest": None,
        "source_version": None,
        "reseed": reseed,
        "reason": reason,
    }
