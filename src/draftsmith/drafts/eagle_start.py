"""Building a feature head: which layers it reads, what it starts as, which targets can have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.drafts.eagle import JOINED, EagleHead
from draftsmith.drafts.student import (
    empty_student,
    layer_prefix,
    own_parameter_names,
    starting_weight,
    student_config,
    with_own_head,
)
from draftsmith.errors import DraftError

_DEPTHS = (0.2, 0.6)  # of a low and a middle layer; the third is the last one
_LAYER = "body.layers.0."


def resolve_feature_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads, non-negative.

    Args:
        layers: As the recipe names them, negative ones counting from the end; none is a low, a
            middle and the last one: 6, 18 and 29 of 30 layers.
        num_layers: The target's.

    Raises:
        DraftError: The target has no such layer.
    """
    if not layers:
        last = num_layers - 1
        low, middle = (min(round(depth * num_layers), last) for depth in _DEPTHS)
        return low, middle, last
    resolved = tuple(index + num_layers if index < 0 else index for index in layers)
    if not all(0 <= index < num_layers for index in resolved):
        raise DraftError(
            "choosing the layers whose features the head reads",
            found=f"layers {list(layers)}",
            expected=f"indices of the target's {num_layers} layers",
            remedy="mend `feature_layers` in the recipe under conf/draft/, or leave it empty",
        )
    return resolved


def build_head(
    target: PreTrainedModel,
    feature_layers: Sequence[int],
    token_ids: Tensor | None,
    *,
    own_head: bool = False,
) -> EagleHead:
    """A head that starts as the target's last layer over its last feature.

    Fusion passes the last of the features through. The half that reads embeddings starts as the
    projections of the first layer, which read nothing else.

    Args:
        target: Live target; its embedding module is shared, not copied.
        feature_layers: Non-negative layer indices.
        token_ids: int64 `[entries]`, the draft's vocabulary; None keeps the whole head.
        own_head: Output rows start as the target's and are trained.

    Raises:
        DraftError: The target's class has no attention that can read two inputs, or its last layer
            is of another kind than one that stands alone.
    """
    last = int(target.config.get_text_config().num_hidden_layers) - 1
    config = student_config(target.config.get_text_config(), [last])
    config = with_own_head(config) if own_head else config
    head = empty_head(config, target, token_ids, feature_layers)
    source, prefix = target.state_dict(), layer_prefix(target)
    state = {}
    for name in own_parameter_names(head):
        if name.startswith(_LAYER):
            rest = name.removeprefix(_LAYER)
            origins = [f"{prefix}{i}.{_without_half(rest)}" for i in _layers_for(rest, last)]
            parts = [starting_weight(source, origin, target) for origin in origins]
            state[name] = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    norm: Any = target.base_model.norm
    state |= {f"norm.{name}": value for name, value in norm.state_dict().items()}
    hidden = int(config.hidden_size)
    passing = head.fc.weight.new_zeros(hidden, hidden * len(feature_layers))
    passing[:, -hidden:] = torch.eye(hidden)
    state["fc.weight"] = passing
    head.load_state_dict(state, strict=False)
    return head


def _without_half(name: str) -> str:
    """The target's name of a weight of the head's layer."""
    for half in ("embedding", "feature"):
        name = name.replace(f"input_layernorm.{half}.", "input_layernorm.")
    return name


def _layers_for(name: str, last: int) -> tuple[int, ...]:
    """The target's layers whose weights, side by side, a weight of the head's layer starts as."""
    if name.startswith("input_layernorm.embedding."):
        return (0,)
    is_joined = name.endswith(tuple(f"{joined}.weight" for joined in JOINED))
    return (0, last) if is_joined else (last,)


def empty_head(
    config: Any,  # noqa: ANN401  Transformers configurations share no useful type
    target: PreTrainedModel,
    token_ids: Tensor | None,
    feature_layers: Sequence[int],
) -> EagleHead:
    """A head with the target's embedding and output rows in place; the rest knows no target yet.

    Raises:
        DraftError: The target's class has no attention that can read two inputs.
    """
    student = empty_student(config, target, token_ids)
    body: Any = student.base_model
    _require_two_inputs(body, target)
    head = EagleHead(body, student.get_output_embeddings(), feature_layers)
    head.train(mode=False)
    return head


def _require_two_inputs(body: nn.Module, target: PreTrainedModel) -> None:
    """Refuse what has other names or another order than Llama's, or scales what it is given."""
    layer = getattr(body, "layers", [None])[0]
    attention = getattr(layer, "self_attn", None)
    hidden = int(target.config.get_text_config().hidden_size)
    found = None
    widths = [getattr(getattr(attention, name, None), "in_features", None) for name in JOINED]
    if widths != [hidden] * len(JOINED):
        found = f"an attention without {', '.join(JOINED)} over the hidden state"
    elif not hasattr(layer, "input_layernorm") or not hasattr(body, "norm"):
        found = "layers that norm after their attention"
    elif not _passes_through(body, hidden):
        found = "a model that scales the embeddings that it is given"
    if found is not None:
        raise DraftError(
            f"building a feature head for {type(target).__name__}",
            found=found,
            expected="a decoder of Llama's shape, such as Llama, Mistral, Qwen or Gemma 3",
            remedy="use a recipe of family student for this target",
        )


@torch.no_grad()
def _passes_through(body: Any, hidden: int) -> bool:  # noqa: ANN401  torch knows no parts of it
    """Whether the body without layer and norm gives back what it is given."""
    layers, norm = body.layers, body.norm
    body.layers, body.norm = nn.ModuleList(), nn.Identity()
    given = torch.ones(1, 1, hidden, dtype=body.dtype, device=body.device)
    mask = given.new_zeros(1, 1, 1, 1)  # made from positions otherwise, which have to be read
    try:
        output: Tensor = body(
            inputs_embeds=given, attention_mask=mask, use_cache=False
        ).last_hidden_state
    finally:
        body.layers, body.norm = layers, norm
    # A body without weights, which is built for its size, can be told by the very tensor only.
    return output is given or (not output.is_meta and torch.equal(output, given))
