"""From reports to the registry: propose the best recipe's pair, carry out the gate's decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.artifacts import read_json, write_json
from draftsmith.errors import EvidenceError, PromotionRefusedError
from draftsmith.evaluation.choice import best_recipe, losers, unusable_recipes
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.overrides import overridden_checks
from draftsmith.registry.pair import DraftIdentity, PairRecord, evidence_tags
from draftsmith.targets.resolved import describe_source
from draftsmith.targets.settings import TargetConfig

_EXPERIMENT = "An experiment (DVC_EXP_NAME is set) registers and proposes; it does not promote."


@dataclass(frozen=True)
class Proposal:
    """What a run proposes.

    Attributes:
        target: build/target.json.
        evaluation: reports/evaluation.json.
        benchmark: reports/benchmark.json.
        drift: reports/drift.json.
        drafts: Folder of the recipes' drafts.
        plots: Folder of plots; PNG files are attached.
        source: Where the target came from.
        quarantined: Digest of a pair in quarantine -> its version, as stage drift saw them.
    """

    target: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    benchmark: Mapping[str, Any]
    drift: Mapping[str, Any]
    drafts: Path
    plots: Path
    source: TargetConfig
    quarantined: Mapping[str, str]


def register_proposal(
    store: PairStore, proposal: Proposal, *, root: Path, staging: Path
) -> dict[str, Any]:
    """Register the best usable recipe's pair (once, by digest) and make it the challenger.

    Args:
        store: The registry.
        proposal: Reports and drafts.
        root: The project's folder.
        staging: Folder for the single-recipe records that are uploaded.

    Returns:
        The content of reports/registration.json, the same on every rerun.

    Raises:
        EvidenceError: The reports do not concern the draft on disk.
    """
    unusable = unusable_recipes(proposal.evaluation, proposal.quarantined)
    recipe = best_recipe(proposal.benchmark, unusable)
    folder = proposal.drafts / recipe
    pair = PairRecord(proposal.target, DraftIdentity.from_json(read_json(folder / "draft.json")))
    _require_evidence_of(proposal, recipe, pair.digest)
    evidence = _stage_evidence(proposal, recipe, staging)
    tags = evidence_tags(
        proposal.evaluation["recipes"][recipe],
        proposal.benchmark["recipes"][recipe],
        device=str(proposal.benchmark["device"]["name"]),
        drift=str(proposal.drift["verdict"]),
        corpus_digest=str(proposal.evaluation["corpus_digest"]),
    )
    source = describe_source(proposal.source.source, proposal.source.revision, root=root)
    version = store.register(pair, folder, evidence=evidence, tags=tags, target_source=source)
    store.set_challenger(version)
    return {
        "schema": 1,
        "name": store.name,
        "version": version,
        "pair_digest": pair.digest,
        "recipe": recipe,
        "losers": losers(proposal.benchmark, unusable),
        "quarantine": store.resolve(version).quarantine,
    }


def _require_evidence_of(proposal: Proposal, recipe: str, pair_digest: str) -> None:
    """Refuse reports that were made of another pair than the one on disk."""
    stages = {"evaluation": "evaluate", "benchmark": "benchmark"}
    reports = {"evaluation": proposal.evaluation, "benchmark": proposal.benchmark}
    for name, report in reports.items():
        found = report["recipes"][recipe]["pair_digest"]
        if found != pair_digest:
            raise EvidenceError(
                f"registering {recipe}",
                found=f"the {name} of pair {found}",
                expected=f"one of pair {pair_digest}, which is on disk",
                remedy=f"run `dvc repro {stages[name]}`",
            )


def _stage_evidence(proposal: Proposal, recipe: str, staging: Path) -> dict[str, Path]:
    """Write the recipe's own records; returns name in the registry -> file, plots included."""
    benchmark = proposal.benchmark
    origin = {key: benchmark[key] for key in ("device", "provenance")}
    records = {
        "target.json": proposal.target,
        "evaluation.json": proposal.evaluation["recipes"][recipe],
        "benchmark.json": {**benchmark["recipes"][recipe], **origin},
        "drift.json": proposal.drift,
    }
    for name, record in records.items():
        write_json(staging / name, record)
    evidence = {name: staging / name for name in records}
    return evidence | {f"plots/{p.name}": p for p in sorted(proposal.plots.rglob("*.png"))}


def carry_out(
    store: PairStore, decision: Mapping[str, Any], *, is_experiment: bool
) -> dict[str, Any]:
    """Move @champion when the decision says so; the content of reports/promotion.json."""
    promotes = decision["verdict"] == "promote" and not is_experiment
    reasons, predecessor = list(decision["reasons"]), None
    if promotes:
        try:
            predecessor = store.promote(
                decision["version"],
                reasons,
                against=decision["champion"],
                overridden=overridden_checks(decision),
            )
        except PromotionRefusedError as error:  # something changed since the gate decided
            promotes, reasons = False, [str(error)]
    if is_experiment:
        reasons.append(_EXPERIMENT)
    return {
        "schema": 1,
        "promoted": promotes,
        "name": decision["name"],
        "version": decision["version"],
        "pair_digest": decision["pair_digest"],
        "predecessor_version": predecessor,
        "reasons": reasons,
    }
