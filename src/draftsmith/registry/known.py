"""Pairs that the registry knows already: looked up before training, and their drafts fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.registry.mlflow_store import PairStore


def known_pairs(
    store: PairStore,
    target_digest: str,
    corpus_digest: str,
    recipe_digests: Mapping[str, Sequence[str]],
) -> dict[str, dict[str, Any] | None]:
    """For each recipe the newest usable pair of the same target, recipe and corpus.

    A warm-started draft is not what the recipe alone gives, so its pair counts only once it was
    promoted. Whoever asks for a draft from the target's layers gets none that a gate blocked.

    Args:
        store: The registry.
        target_digest: The target.
        corpus_digest: The corpus.
        recipe_digests: For each recipe the digest of a training from the target's layers, then
            those of warm starts.
    """
    promoted = {move.version for move in store.history()}
    started = {
        item.pair.recipe_digest
        for item in store.versions()
        if item.pair.target_digest == target_digest and item.pair.version in promoted
    }

    def newest(plain: str, *warm: str) -> dict[str, Any] | None:
        digests = [plain, *(digest for digest in warm if digest in started)]
        found = [store.find_known(target_digest, digest, corpus_digest) for digest in digests]
        usable = [
            pair
            for pair in found
            if pair and (pair.recipe_digest == plain or pair.version in promoted)
        ]
        best = max(usable, key=lambda pair: (not pair.live_drift, int(pair.version)), default=None)
        return None if best is None else asdict(best)

    return {name: newest(*digests) for name, digests in recipe_digests.items()}


def fetch_sources(store: PairStore, report: Mapping[str, Any], into: Path) -> None:
    """Bring the files of every pair that build/start.json takes a draft from."""
    for entry in report["recipes"].values():
        if entry["source_version"] is not None:
            store.fetch(store.resolve(entry["source_version"]).pair, into)
