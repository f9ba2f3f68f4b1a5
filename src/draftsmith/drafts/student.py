"""A student: a causal LM of the target's own class that starts as a few of the target's layers.

Embeddings and output head stay the target's: the input embedding is the same module, the head holds
the target's rows of the draft's vocabulary. Neither is trained or stored with the draft, unless the
draft has a head of its own, which starts as those rows. Nothing here is special to one model class:
layers are found by their number.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.errors import DraftError

_OWN_HEAD = "own_head"  # of the draft's configuration


def resolve_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Non-negative indices.

    Raises:
        DraftError: An index lies outside the target, or occurs twice.
    """
    resolved = tuple(index + num_layers if index < 0 else index for index in layers)
    if len(set(resolved)) < len(resolved) or not all(0 <= i < num_layers for i in resolved):
        raise DraftError(
            "choosing the student's layers",
            found=f"layers {list(layers)}",
            expected=f"distinct indices of the target's {num_layers} layers",
            remedy="mend `layers` in the recipe under conf/draft/",
        )
    return resolved


def student_config(
    target_config: Any,  # noqa: ANN401  Transformers configurations share no useful type
    layers: Sequence[int],
) -> Any:  # noqa: ANN401
    """The target's configuration cut down to `layers`; lists of one entry a layer are cut alike."""
    config = copy.deepcopy(target_config)
    num_layers = int(config.num_hidden_layers)
    per_layer = {
        name: [value[index] for index in layers]
        for name, value in config.to_dict().items()
        if isinstance(value, list)
        and len(value) == num_layers
        and not name.endswith("_token_id")  # several ids that end a turn
    }
    config.num_hidden_layers = len(layers)
    for name, value in per_layer.items():
        setattr(config, name, value)
    config.tie_word_embeddings = False
    return config


def with_own_head(config: Any) -> Any:  # noqa: ANN401
    """The configuration of a draft that trains and stores output rows of its own."""
    changed = copy.deepcopy(config)
    setattr(changed, _OWN_HEAD, True)
    return changed


def has_own_head(draft: PreTrainedModel) -> bool:
    """Whether its output rows are its own."""
    return bool(getattr(draft.config, _OWN_HEAD, False))


def build_student(
    target: PreTrainedModel,
    layers: Sequence[int],
    token_ids: Tensor | None,
    *,
    own_head: bool = False,
) -> PreTrainedModel:
    """A student that starts as the target's chosen layers.

    Args:
        target: Live target; its embedding module is shared, not copied.
        layers: Non-negative layer indices.
        token_ids: int64 `[entries]`, the draft's vocabulary; None keeps the whole head.
        own_head: Output rows start as the target's and are trained.

    Returns:
        The student in the target's dtype and on its device; what is the target's is frozen.
    """
    config = student_config(target.config.get_text_config(), layers)
    student = empty_student(with_own_head(config) if own_head else config, target, token_ids)
    own = set(own_parameter_names(student)) - set(output_row_names(student))
    source = target.state_dict()
    prefix = layer_prefix(target)
    renamed = {}
    for name in own:
        origin = name
        if name.startswith(prefix):
            place, rest = name.removeprefix(prefix).split(".", 1)
            origin = f"{prefix}{layers[int(place)]}.{rest}"
        renamed[name] = starting_weight(source, origin, target)
    student.load_state_dict(renamed, strict=False)
    return student


def starting_weight(source: dict[str, Tensor], name: str, target: PreTrainedModel) -> Tensor:
    """A weight of the target that one of its draft starts as.

    Raises:
        DraftError: It has none of this name: its layers are of several kinds (dense ones beside
            mixtures of experts), and in the draft another kind stands in this layer's place.
    """
    if name not in source:
        raise DraftError(
            f"building a draft of layers of {type(target).__name__}",
            found=f"no {name} in the target",
            expected="a layer of the kind that the target's class puts in its place in the draft",
            remedy="name other layers in the recipe under conf/draft/ (family student), or use "
            "family medusa, which takes none",
        )
    return source[name]


def empty_student(
    config: Any,  # noqa: ANN401
    target: PreTrainedModel,
    token_ids: Tensor | None,
) -> PreTrainedModel:
    """A student with the target's embedding and head in place; the rest knows no target yet."""
    own_config = copy.deepcopy(config)  # from_config writes into the object it is given
    student: PreTrainedModel = AutoModelForCausalLM.from_config(
        own_config, dtype=target.dtype, attn_implementation="sdpa"
    )
    student.set_input_embeddings(target.get_input_embeddings())
    rows, is_own = output_rows(target, token_ids), has_own_head(student)
    student.set_output_embeddings(copy.deepcopy(rows) if is_own else rows)
    student.to(target.device)  # type: ignore[arg-type]  # annotated as an unbound method
    student.get_input_embeddings().requires_grad_(requires_grad=False)
    student.get_output_embeddings().requires_grad_(requires_grad=is_own)
    student.eval()
    return student


def output_rows(target: PreTrainedModel, token_ids: Tensor | None) -> nn.Linear:
    """The target's output head, or a copy of those of its rows that the draft's vocabulary has."""
    head: nn.Linear = target.get_output_embeddings()
    if token_ids is None:
        return head
    rows = token_ids.to(head.weight.device)
    trimmed = nn.Linear(
        head.in_features,
        len(token_ids),
        bias=head.bias is not None,
        device="meta",
        dtype=head.weight.dtype,
    )
    trimmed.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        trimmed.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    return trimmed


def own_parameter_names(student: PreTrainedModel) -> list[str]:
    """State of the student that is its own: all but embedding and head, unless that is its own."""
    shared = {id(p) for p in student.get_input_embeddings().parameters()}
    if not has_own_head(student):
        shared |= {id(p) for p in student.get_output_embeddings().parameters()}
    named = _named(student)
    return [name for name in student.state_dict() if id(named[name]) not in shared]


def output_row_names(draft: PreTrainedModel) -> list[str]:
    """State that is the output head's."""
    rows = {id(p) for p in draft.get_output_embeddings().parameters()}
    named = _named(draft)
    return [name for name in draft.state_dict() if id(named[name]) in rows]


def _named(draft: PreTrainedModel) -> dict[str, Tensor]:
    return {**dict(draft.named_parameters(remove_duplicate=False)), **dict(draft.named_buffers())}


def trained_rows(draft: PreTrainedModel) -> list[nn.Parameter]:
    """Parameters of the output head that are trained."""
    return [p for p in draft.get_output_embeddings().parameters() if p.requires_grad]


def layer_prefix(model: PreTrainedModel) -> str:
    """Name in front of the layer index in the state dict, such as `model.layers.`.

    Raises:
        DraftError: No list of modules has the model's number of layers.
    """
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return f"{name}."
    raise DraftError(
        f"building a student of {type(model).__name__}",
        found="no list of decoder layers",
        expected=f"a module list of {num_layers} layers",
        remedy="use a decoder-only target",
    )


def num_trained_parameters(student: PreTrainedModel) -> int:
    """Parameters that belong to the student alone."""
    state = student.state_dict()
    return sum(state[name].numel() for name in own_parameter_names(student))


def head_logits(model: PreTrainedModel, hidden: Tensor, rows: nn.Module | None = None) -> Tensor:
    """Logits of last hidden states `[..., hidden]`, as the model's own forward makes them.

    Families that scale or cap their logits say so in their configuration; `check_head` proves the
    result. Hidden states of a student that trains in float32 are rounded to the head's dtype.

    Args:
        model: Says how logits are made.
        hidden: Of any number of positions.
        rows: The output rows; None are the model's.
    """
    config = model.config.get_text_config()
    head: Any = model.get_output_embeddings() if rows is None else rows
    logits: Tensor = head(hidden.to(head.weight.dtype))
    if getattr(config, "logits_scaling", None):
        logits = logits / config.logits_scaling
    if getattr(config, "logit_scale", None):
        logits = logits * config.logit_scale
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits


@torch.no_grad()
def check_head(model: PreTrainedModel, token_ids: Tensor) -> None:
    """Compare `head_logits` with the model's forward on `token_ids` (int64 `[1, positions]`).

    Raises:
        DraftError: They differ: the model does something to its logits that is not known here.
    """
    token_ids = token_ids.to(model.device)
    hidden = model.base_model(input_ids=token_ids).last_hidden_state
    ours, theirs = head_logits(model, hidden).float(), model(input_ids=token_ids).logits.float()
    worst = float((ours - theirs).abs().max())
    if worst > 1e-2 * float(theirs.abs().max()):
        raise DraftError(
            f"computing logits of {type(model).__name__} from its last hidden state",
            found=f"a difference of {worst:.3g} from its forward",
            expected="equal logits",
            remedy="report the model class: it post-processes logits in an unknown way",
        )
