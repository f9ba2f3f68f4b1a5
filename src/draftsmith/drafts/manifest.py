"""`draft.json`: what a draft is, what it was distilled from, and how.

The digest says what it is; the rest is provenance.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.artifacts import digest_json, read_json, write_json
from draftsmith.errors import DraftError

FILE_NAME = "draft.json"
SCHEMA = 1
STUDENT, EAGLE, MEDUSA, CAUSAL_LM = "student", "eagle", "medusa", "causal-lm"  # families


@dataclass(frozen=True)
class DraftManifest:
    """One draft.

    Attributes:
        schema: Version of this record.
        family: How it drafts: `student` (under the target's embedding and head), `eagle` (the same
            over the target's features), `medusa` (heads on the target's last hidden state) or
            `causal-lm` (a whole model with the target's tokenizer).
        recipe: Name of the recipe under conf/draft/.
        recipe_digest: Digest of the recipe's and the training's settings.
        digest: Identity: weights, vocabulary map and architecture.
        weights_digest: sha256 of model.safetensors.
        vocabulary_digest: Digest of the vocabulary map, None for the full vocabulary.
        target_digest: The target it was distilled from, or was taken over for.
        tokenizer_digest: The tokenizer it shares with its target.
        corpus_digest: The corpus it was distilled on; empty when it was trained elsewhere.
        architecture: Facts needed to rebuild it.
        training: Facts of the training run, or where the draft came from.
    """

    schema: int
    family: str
    recipe: str
    recipe_digest: str
    digest: str
    weights_digest: str
    vocabulary_digest: str | None
    target_digest: str
    tokenizer_digest: str
    corpus_digest: str
    architecture: dict[str, Any]
    training: dict[str, Any]


def draft_digest(
    weights_digest: str, vocabulary_digest: str | None, architecture: dict[str, Any]
) -> str:
    """Identity of a draft."""
    return digest_json(
        {"weights": weights_digest, "vocabulary": vocabulary_digest, "architecture": architecture}
    )


def write_manifest(directory: Path, manifest: DraftManifest) -> None:
    """Write `draft.json`, atomically."""
    write_json(directory / FILE_NAME, manifest)


def read_manifest(directory: Path) -> DraftManifest:
    """Read `draft.json`.

    Raises:
        ArtifactError: It is missing or not JSON.
        DraftError: Its keys are not those of this schema.
    """
    data = read_json(directory / FILE_NAME)
    names = {field.name for field in dataclasses.fields(DraftManifest)}
    if set(data) != names or data["schema"] != SCHEMA:
        strange = sorted(set(data) ^ names)
        raise DraftError(
            f"reading {directory / FILE_NAME}",
            found=f"schema {data.get('schema')} with keys {strange} missing or extra",
            expected=f"schema {SCHEMA}",
            remedy="rebuild the draft with this version of draftsmith",
        )
    return DraftManifest(**data)
