"""Sizes of a target and its drafts, from a configuration alone.

The models are built by the code that builds them for training and decoding, on torch's meta device,
which knows shapes and has no memory. No weight is read. Knows nothing of activations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.decoding.features import decoder_layers
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.distillation.building import build_draft, in_float32, named_layers
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.medusa import MedusaHeads
from draftsmith.drafts.settings import TrainedConfig
from draftsmith.drafts.student import has_own_head, output_rows, own_parameter_names
from draftsmith.errors import TargetError
from draftsmith.planning.memory import KnownMasks
from draftsmith.targets.compatibility import refuse_unservable
from draftsmith.targets.components import DTYPES, failures_of, load_config

_AUTO_MODEL: Any = AutoModelForCausalLM  # Transformers types it loosely
_ID_BYTES = 8  # of an entry of the stored vocabulary
_FLOAT_BYTES = 4
_ADAMW_MOMENTS = 2


@dataclass(frozen=True)
class CacheShape:
    """What a decoder holds at once.

    Attributes:
        rows: Requests in flight.
        slots: Tokens of each, those that are only drafted included.
    """

    rows: int
    slots: int


@dataclass(frozen=True)
class TargetSizes:
    """A target, in bytes where nothing else is said.

    Attributes:
        num_parameters: Of all of it.
        weights: All of them.
        layers: Of these, the decoder layers'.
        largest_layer: One of them.
        cache: Keys and values of a decoder.
    """

    num_parameters: int
    weights: int
    layers: int
    largest_layer: int
    cache: int


@dataclass(frozen=True)
class DraftSizes:
    """A draft, in bytes where nothing else is said.

    Attributes:
        num_parameters: Of all that a forward of the draft reads.
        num_trained: Of those, the trained ones; the others are the target's and frozen.
        trained: Trained weights, in float32 as the trainer holds them.
        gradients: Theirs.
        optimizer: AdamW's state of them.
        copies: Rows of the target that a training holds once more.
        served: What a decoder holds besides the target.
        cache: Keys, values and features of a decoder.
        checkpoint: One checkpoint of the training: trained weights and optimizer; early stopping
            adds the best weights.
        stored: The finished draft on disk.
    """

    num_parameters: int
    num_trained: int
    trained: int
    gradients: int
    optimizer: int
    copies: int
    served: int
    cache: int
    checkpoint: int
    stored: int


def meta_target(directory: Path, dtype: str) -> PreTrainedModel:
    """`causal_lm` on the meta device; raises what that raises."""
    with torch.device("meta"):
        return causal_lm(directory, dtype)


def causal_lm(directory: Path, dtype: str) -> PreTrainedModel:
    """The target that a config describes, with weights of no meaning, where torch makes tensors.

    Args:
        directory: Holds the config.
        dtype: "auto" (as the config says), bfloat16, float16 or float32.

    Raises:
        TargetError: The config is damaged, or of a kind that cannot be served.
    """
    config = load_config(directory)
    refuse_unservable(config, directory)
    stated = config.dtype or config.get_text_config().dtype or "none in its config"
    name = str(stated).removeprefix("torch.") if dtype == "auto" else dtype
    if name not in DTYPES:
        raise TargetError(
            f"choosing the dtype of {directory}",
            found=name,
            expected=f"one of {', '.join(DTYPES)}",
            remedy="name the dtype that it is to be served in with --dtype",
        )
    remedy = "use a causal language model that this Transformers version knows"
    with failures_of(directory, "config", remedy=remedy):
        model: PreTrainedModel = _AUTO_MODEL.from_config(
            config, dtype=DTYPES[name], attn_implementation="sdpa"
        )
    model.eval().requires_grad_(requires_grad=False)
    return model


def target_sizes(target: PreTrainedModel, cache: CacheShape) -> TargetSizes:
    """Sizes of a target on the meta device; its attention is then that of the decoder."""
    weights = list(target.parameters())
    layers = [_bytes(layer.parameters()) for layer in decoder_layers(target)]
    return TargetSizes(
        num_parameters=_count(weights),
        weights=_bytes(weights),
        layers=sum(layers),
        largest_layer=max(layers),
        cache=_cache_bytes(target, cache),
    )


def draft_sizes(recipe: TrainedConfig, target: PreTrainedModel, cache: CacheShape) -> DraftSizes:
    """Sizes of a recipe's draft.

    Args:
        recipe: The recipe.
        target: On the meta device.
        cache: What the decoder holds.

    Raises:
        DraftError: The target's class can have no such draft.
    """
    with torch.device("meta"):
        return _draft_sizes(recipe, target, cache)


def _draft_sizes(recipe: TrainedConfig, target: PreTrainedModel, cache: CacheShape) -> DraftSizes:
    token_ids = draft_vocabulary(recipe, target)
    draft = build_draft(recipe, target, draft_layers(recipe, target), token_ids)
    state, own = draft.state_dict(), own_parameter_names(draft)
    stored = _bytes([state[name] for name in own])
    parameters = list(draft.parameters())
    trained = [p for p in parameters if p.requires_grad]
    theirs = {id(p) for p in target.parameters()}
    copies = _bytes([p for p in parameters if not p.requires_grad and id(p) not in theirs])
    served, cached = stored + copies, _cache_bytes(draft, cache)
    in_float32(draft)
    if has_own_head(draft) and token_ids is not None:
        copies += _bytes(output_rows(target, token_ids).parameters())
    optimizer = _ADAMW_MOMENTS * _bytes(trained) + _FLOAT_BYTES * len(trained)
    return DraftSizes(
        num_parameters=_count(parameters),
        num_trained=_count(trained),
        trained=_bytes(trained),
        gradients=_bytes(trained),
        optimizer=optimizer,
        copies=copies,
        served=served,
        cache=cached,
        checkpoint=_bytes(trained) + optimizer,
        stored=stored + (0 if token_ids is None else _ID_BYTES * len(token_ids)),
    )


def draft_layers(recipe: TrainedConfig, target: PreTrainedModel) -> tuple[int, ...]:
    """The target's layers that the draft is about."""
    return named_layers(recipe, int(target.config.get_text_config().num_hidden_layers))


def draft_vocabulary(recipe: TrainedConfig, target: PreTrainedModel) -> Tensor | None:
    """Ids of as many tokens as the draft's vocabulary has; None where it is the target's."""
    rows = len(target.get_output_embeddings().weight)
    wanted = recipe.vocabulary_size
    return torch.arange(wanted) if 0 < wanted < rows else None


@torch.no_grad()
def _cache_bytes(model: PreTrainedModel, cache: CacheShape) -> int:
    """What the decoder holds for a model: slots of all layers, and the features that a head reads.

    One forward of one token makes the layers take their memory.
    """
    held = 0
    if not isinstance(model, MedusaHeads):  # which have no attention
        slots = SlotModel(model)
        slots.reserve(rows=cache.rows, slots=cache.slots)
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        with KnownMasks(1, first=0):
            slots.forward(token, token, span=1)
        assert slots.cache is not None
        held += slots.cache.num_bytes
    if isinstance(model, EagleHead | MedusaHeads):
        width = int(model.config.hidden_size)
        held += cache.rows * cache.slots * width * model.dtype.itemsize
    return held


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors; those that share their memory count once."""
    held = {tensor.untyped_storage()._cdata: tensor.nbytes for tensor in tensors}
    return sum(held.values())
