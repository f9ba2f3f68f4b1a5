"""The draft of a recipe and its loss, as they are before the first step.

Knows nothing of corpora, signals or optimizers, and needs no weights: models on torch's meta device
are built alike, which tells how large they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.distillation.divergences import divergence_of
from draftsmith.distillation.medusa_objective import MedusaObjective
from draftsmith.distillation.objective import StudentObjective, recompute, recompute_layers
from draftsmith.distillation.settings import DistillConfig
from draftsmith.distillation.unrolling import UnrolledObjective
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.eagle_start import build_head, resolve_feature_layers
from draftsmith.drafts.medusa import HeadShape, MedusaHeads, build_heads
from draftsmith.drafts.settings import EagleConfig, LayerChoice, MedusaConfig, TrainedConfig
from draftsmith.drafts.student import (
    build_student,
    has_own_head,
    head_logits,
    output_rows,
    resolve_layers,
)

Objective = StudentObjective | UnrolledObjective | MedusaObjective


def named_layers(recipe: TrainedConfig, num_layers: int) -> tuple[int, ...]:
    """The target's layers that the draft is about, non-negative.

    Args:
        recipe: Names the layers of a student, or those that a head reads; heads on the last hidden
            state are about none. Of a student whose layers are to be chosen they are the first
            ones, of which only the number counts.
        num_layers: The target's.

    Raises:
        DraftError: The target has no such layer.
    """
    if isinstance(recipe, EagleConfig):
        return resolve_feature_layers(recipe.feature_layers, num_layers)
    if isinstance(recipe, MedusaConfig):
        return ()
    wanted = recipe.layers
    named = range(wanted.choose) if isinstance(wanted, LayerChoice) else wanted
    return resolve_layers(named, num_layers)


def build_draft(
    recipe: TrainedConfig,
    target: PreTrainedModel,
    layers: Sequence[int],
    token_ids: Tensor | None,
) -> PreTrainedModel:
    """The recipe's draft as it starts from the target, in its dtype and on its device.

    Args:
        recipe: The recipe.
        target: Its embedding module is shared, not copied.
        layers: What `named_layers` says, or what was chosen.
        token_ids: int64 `[entries]`, the draft's vocabulary; None is the target's.

    Raises:
        DraftError: The target's class can have no such draft.
    """
    if isinstance(recipe, EagleConfig):
        return build_head(target, layers, token_ids, own_head=recipe.own_head)
    if isinstance(recipe, MedusaConfig):
        shape = HeadShape(recipe.num_heads, recipe.num_blocks, recipe.own_heads)
        return build_heads(target, shape, token_ids)
    return build_student(target, layers, token_ids, own_head=recipe.own_head)


def in_float32(draft: PreTrainedModel) -> None:
    """Let what is trained have float32 weights, in place; what is the target's stays as it is."""
    for parameter in draft.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def objective_of(
    recipe: TrainedConfig,
    config: DistillConfig,
    draft: PreTrainedModel,
    target: PreTrainedModel,
    token_ids: Tensor | None,
) -> Objective:
    """The draft with its loss, in one module.

    Args:
        recipe: The recipe.
        config: The distill section.
        draft: What `build_draft` made.
        target: The target.
        token_ids: As in `build_draft`.
    """
    divergence, rows = divergence_of(config), draft.get_output_embeddings()
    if has_own_head(draft):
        rows = output_rows(target, token_ids)

    def target_head(hidden: Tensor) -> Tensor:
        return head_logits(draft, hidden, rows)

    if isinstance(draft, EagleHead) and isinstance(recipe, EagleConfig):
        return UnrolledObjective(
            draft,
            target_head,
            divergence,
            unroll=recipe.unroll,
            step_decay=recipe.step_decay,
            recompute=config.gradient_checkpointing,
        )
    if isinstance(draft, MedusaHeads) and isinstance(recipe, MedusaConfig):
        if config.gradient_checkpointing:
            recompute(draft.heads)
        return MedusaObjective(draft, target_head, divergence, head_decay=recipe.head_decay)
    if config.gradient_checkpointing:
        recompute_layers(draft)
    return StudentObjective(draft, target_head, divergence)
