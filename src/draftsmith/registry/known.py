"""Pairs that the registry knows already: looked up before training, and their drafts fetched."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.distillation.recipe import RecipeDigests, recipe_digests
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.settings import RecipeConfig
from draftsmith.registry.holders import fetch_or_mark
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.pair import CORPUS_TAG, PairVersion


def possible_digests(
    store: PairStore, recipes: Mapping[str, RecipeConfig], config: DistillConfig
) -> dict[str, RecipeDigests]:
    """For each recipe the digests that registered drafts of its settings can have."""
    versions = store.versions()
    drafts = sorted({item.pair.draft_digest for item in versions})
    return {
        name: recipe_digests(recipe, config, drafts, num_seeds=len(versions) + 1)
        for name, recipe in recipes.items()
    }


def known_pairs(
    store: PairStore,
    target_digest: str,
    corpus_digest: str,
    recipes: Mapping[str, RecipeDigests],
) -> dict[str, dict[str, Any] | None]:
    """For each recipe the pair of the same target, recipe and corpus, the newest usable one first.

    Its draft was distilled from the corpus, or was taken over from another target, evaluated on the
    corpus and promoted. A warm-started draft is not what the recipe alone gives, so its pair counts
    only once it was promoted. Whoever asks for a draft from the target's layers gets none that a
    gate blocked.

    Args:
        store: The registry.
        target_digest: The target.
        corpus_digest: The corpus.
        recipes: The digests that drafts of each recipe can have.

    Returns:
        For each recipe None, or a RegisteredPair with `quarantine` and `reseed`: how far from the
        configured seed the first one is that no such pair was trained with; None where a recipe
        trains nothing.
    """
    promoted = {move.version for move in store.history() if move.moved_alias}
    versions = [
        item
        for item in store.versions()
        if item.pair.target_digest == target_digest
        and item.damage is None
        and _is_of_corpus(item, corpus_digest, promoted)
    ]
    return {name: _known(versions, digests, promoted) for name, digests in recipes.items()}


def _is_of_corpus(item: PairVersion, corpus_digest: str, promoted: Collection[str]) -> bool:
    if item.pair.corpus_digest == corpus_digest:
        return True
    return item.tags.get(CORPUS_TAG) == corpus_digest and item.pair.version in promoted


def _known(
    versions: Sequence[PairVersion], digests: RecipeDigests, promoted: Collection[str]
) -> dict[str, Any] | None:
    plain = [item for item in versions if item.pair.recipe_digest in digests.plain]
    warm = [
        item
        for item in versions
        if item.pair.recipe_digest in digests.warm and item.pair.version in promoted
    ]
    best = max([*plain, *warm], key=_usefulness, default=None)
    if best is None:
        return None
    taken = {item.pair.recipe_digest for item in plain}
    free = (index for index, digest in enumerate(digests.plain) if digest not in taken)
    return {**asdict(best.pair), "quarantine": best.quarantine, "reseed": next(free, None)}


def _usefulness(item: PairVersion) -> tuple[bool, int]:
    """A usable pair before one that an alarm or a quarantine bars; then the newest.

    Of barred ones the newest tells what comes next. Behind an alarm it is the training that the
    alarm asks for; a quarantine asks for none, also where its draft came from such a training.
    """
    return item.quarantine is None and not item.pair.live_drift, int(item.pair.version)


def fetch_sources(store: PairStore, report: Mapping[str, Any], into: Path) -> bool:
    """Bring the files of every pair that build/start.json takes a draft from.

    Returns:
        False when those of a known pair are damaged: it is marked, and known no longer.

    Raises:
        DamagedPairError: Those of the incumbent are.
    """
    entries = [e for e in report["recipes"].values() if e["source_version"] is not None]
    pairs = {e["source_version"]: store.resolve(e["source_version"]).pair for e in entries}
    known = {e["source_version"] for e in entries if e["action"] == "known"}
    for version in pairs.keys() - known:
        store.fetch(pairs[version], into)
    return all(fetch_or_mark(store, pairs[version], into) for version in sorted(known))
