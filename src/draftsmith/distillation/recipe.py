"""The identity of a recipe: what decides, with target and corpus, which draft comes out."""

from __future__ import annotations

from dataclasses import asdict

from draftsmith.artifacts import digest_json
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.settings import StudentConfig

# They change when files are written and what is logged, never the weights.
_OPERATIONAL = frozenset({"checkpoint_steps", "log_steps", "max_cache_gb"})


def recipe_digest(recipe: StudentConfig, config: DistillConfig) -> str:
    """Digest of the recipe's and the training's settings, those of its operation left out."""
    distill = {key: value for key, value in asdict(config).items() if key not in _OPERATIONAL}
    return digest_json({"recipe": asdict(recipe), "distill": distill})
