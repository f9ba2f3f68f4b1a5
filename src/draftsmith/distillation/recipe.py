"""The identity of a recipe: what decides, with target and corpus, which draft comes out."""

from __future__ import annotations

from dataclasses import asdict

from draftsmith.artifacts import digest_json
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.settings import StudentConfig


def recipe_digest(recipe: StudentConfig, config: DistillConfig) -> str:
    """Digest of the recipe's and the training's settings."""
    return digest_json({"recipe": asdict(recipe), "distill": asdict(config)})
