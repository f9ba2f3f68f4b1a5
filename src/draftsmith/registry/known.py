"""Pairs that the registry knows already: looked up before training, and their drafts fetched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.registry.mlflow_store import PairStore


def known_pairs(
    store: PairStore, target_digest: str, corpus_digest: str, recipe_digests: Mapping[str, str]
) -> dict[str, dict[str, Any] | None]:
    """For each recipe the newest usable pair of the same target, recipe and corpus."""
    found = {
        name: store.find_known(target_digest, digest, corpus_digest)
        for name, digest in recipe_digests.items()
    }
    return {name: None if pair is None else asdict(pair) for name, pair in found.items()}


def fetch_sources(store: PairStore, report: Mapping[str, Any], into: Path) -> None:
    """Bring the files of every pair that build/start.json takes a draft from."""
    for entry in report["recipes"].values():
        if entry["source_version"] is not None:
            store.fetch(store.resolve(entry["source_version"]).pair, into)
