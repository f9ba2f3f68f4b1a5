"""The identity of a recipe: what decides, with target and corpus, which draft comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from draftsmith.artifacts import digest_json
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.settings import CheckpointConfig, RecipeConfig


@dataclass(frozen=True)
class RecipeDigests:
    """The digests that drafts of a recipe's settings can have.

    Attributes:
        plain: Of trainings from the target's layers: with the configured seed, the next one, ...
            A checkpoint, which is not trained, has one.
        warm: Of trainings that went on from an earlier draft.
    """

    plain: tuple[str, ...]
    warm: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Both."""
        return self.plain + self.warm


def recipe_digest(
    recipe: RecipeConfig, config: DistillConfig, *, started_from: str | None = None
) -> str:
    """Digest of the recipe's settings and of those of the training that decide its weights.

    Args:
        recipe: The recipe; nothing is trained for a checkpoint, so its content alone counts.
        config: The distill section.
        started_from: Digest of the draft that a warm start goes on from, with the steps of one;
            None is a training that starts from the target's layers.
    """
    if isinstance(recipe, CheckpointConfig):
        return checkpoint_digest(recipe)
    settings = asdict(recipe)
    if not settings.get("own_head"):
        settings.pop("own_head", None)  # as if it were not there: older drafts are still known
    if started_from is None:
        return digest_json({"recipe": settings, "distill": config.decisive()})
    decisive = config.warm_started().decisive()
    return digest_json({"recipe": settings, "distill": decisive, "started_from": started_from})


def recipe_digests(
    recipe: RecipeConfig, config: DistillConfig, drafts: Sequence[str], *, num_seeds: int
) -> RecipeDigests:
    """The digests that drafts of these settings can have.

    Args:
        recipe: The recipe.
        config: The distill section.
        drafts: Digests of the drafts that a warm start may have gone on from.
        num_seeds: How many seeds count, the configured one and those after it.
    """
    if isinstance(recipe, CheckpointConfig):
        return RecipeDigests((checkpoint_digest(recipe),))
    # Warm starts had all steps before they had a number of their own: older drafts are still known.
    lengths = (config, replace(config, warm_start_steps=config.steps))
    return RecipeDigests(
        plain=tuple(recipe_digest(recipe, config.reseeded(by)) for by in range(num_seeds)),
        warm=tuple(
            recipe_digest(recipe, length, started_from=draft)
            for draft in drafts
            for length in lengths
        ),
    )


def checkpoint_digest(recipe: CheckpointConfig) -> str:
    """Digest of a recipe that takes a checkpoint over, wherever that came from."""
    return digest_json({"family": recipe.family, "digest": recipe.digest})
