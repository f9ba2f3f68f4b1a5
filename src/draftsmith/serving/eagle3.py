"""A feature head in the layout of EAGLE-3 checkpoints, as vLLM loads them.

vLLM has one such head: a layer of Llama's class over embedding and fused feature. What that layer
cannot compute is refused; what vLLM names or orders otherwise is rewritten, and no number changes:

    features     the inputs of the target's layers, which vLLM hands over in ascending order
    names        `midlayer`; its `input_layernorm` norms the embedding, `hidden_norm` the feature
    biases       one flag for all projections of a part; those that have none get zeros
    vocabulary   `d2t[row]` is the target's id less the row, `t2d` marks the ids that have a row

The embedding is the target's own there too, and is not written.

Source: vLLM, vllm/model_executor/models/llama_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draftsmith.artifacts import write_json, writing
from draftsmith.drafts.eagle import EagleHead
from draftsmith.errors import DraftError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_PARTS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
_NORMS = {  # of our layer and of theirs
    "input_layernorm.embedding": "input_layernorm",
    "input_layernorm.feature": "hidden_norm",
    "post_attention_layernorm": "post_attention_layernorm",
}
_ROTARY = ("default", "linear", "llama3")  # whose formulas Transformers and vLLM share
_SHARED = (  # fields that our configuration and Llama's call the same
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def write_head(head: EagleHead, token_ids: Tensor | None, folder: Path) -> None:
    """Write the head into `folder`, which is made.

    Args:
        head: Joined to its target, whose output rows are written with it.
        token_ids: int64 `[entries]`: the target's id of each output row; None is the identity.
        folder: Gets `config.json` and `model.safetensors`.

    Raises:
        DraftError: vLLM's layer cannot compute what the head computes.
        ArtifactError: The disk refused.
    """
    _require_llama(head)
    folder.mkdir(parents=True)
    if token_ids is None:
        token_ids = torch.arange(len(_output_rows(head)))
    write_json(folder / CONFIG, _config(head))
    with writing(folder):
        save_file(_tensors(head, token_ids.cpu()), folder / WEIGHTS, metadata={"format": "pt"})


def _require_llama(head: EagleHead) -> None:
    found = next(_obstacles(head), None)
    if found is not None:
        raise DraftError(
            "exporting a feature head for vLLM",
            found=found,
            expected="what vLLM's EAGLE-3 head computes: one layer of Llama's class, over inputs "
            "of different layers of the target",
            remedy="use a recipe of family student for this target: vLLM loads students as whole "
            "models of the target's class",
        )


def _obstacles(head: EagleHead) -> Iterator[str]:
    """What vLLM's layer cannot compute."""
    config, layer = head.config, head.body.layers[0]
    own = {name for name in layer.state_dict() if not name.endswith("_proj.bias")}
    known = {f"{norm}.weight" for norm in _NORMS}
    known |= {f"{part}.{name}.weight" for part, names in _PARTS.items() for name in names}
    if strange := sorted(own ^ known):
        yield f"a layer whose weights differ from Llama's by {strange[0]}"
    if getattr(config, "rms_norm_eps", None) is None:
        yield "norms other than Llama's"
    activation = getattr(config, "hidden_act", None)
    if activation != "silu":
        yield f"the activation {activation}"
    if _has_window(config):
        yield "a sliding window of attention"
    kind = _rotary(config).get("rope_type")
    if kind not in _ROTARY:
        yield f"rotary embeddings of type {kind}"
    if getattr(head.lm_head, "bias", None) is not None:
        yield "output rows with a bias"
    layers = head.feature_layers
    if len(set(layers)) < len(layers):
        yield f"features of the layers {list(layers)}, of which vLLM hands each over once only"


def _has_window(config: Any) -> bool:  # noqa: ANN401  configurations share no useful type
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return set(kinds) != {"full_attention"}
    return getattr(config, "sliding_window", None) is not None


def _rotary(config: Any) -> dict[str, Any]:  # noqa: ANN401
    return dict(getattr(config, "rope_parameters", None) or {})


def _config(head: EagleHead) -> dict[str, Any]:
    """What vLLM's loader reads; rotary embeddings in the form that every Transformers reads."""
    config, layer = head.config, head.body.layers[0]
    rotary = _rotary(config)
    theta = rotary.pop("rope_theta")
    is_plain = rotary["rope_type"] == "default"
    layers = sorted(head.feature_layers)
    return {name: getattr(config, name, None) for name in _SHARED} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
        "num_hidden_layers": 1,
        "head_dim": layer.self_attn.o_proj.in_features // int(config.num_attention_heads),
        "attention_bias": bool(_biases(layer, "self_attn")),
        "mlp_bias": bool(_biases(layer, "mlp")),
        "rope_theta": theta,
        "rope_scaling": None if is_plain else rotary,
        "tie_word_embeddings": False,
        "draft_vocab_size": len(_output_rows(head)),
        "target_hidden_size": int(config.hidden_size),
        "eagle_aux_hidden_state_layer_ids": layers,
        "num_aux_hidden_states": len(layers),
        "norm_before_residual": False,
    }


def _tensors(head: EagleHead, token_ids: Tensor) -> dict[str, Tensor]:
    layer = head.body.layers[0]
    state = layer.state_dict()
    tensors = {f"midlayer.{theirs}.weight": state[f"{n}.weight"] for n, theirs in _NORMS.items()}
    for part, names in _PARTS.items():
        weights = {f"{part}.{name}.weight": state[f"{part}.{name}.weight"] for name in names}
        tensors |= {f"midlayer.{n}": w for n, w in (weights | _biases(layer, part)).items()}
    layers = head.feature_layers
    blocks = head.fc.weight.chunk(len(layers), dim=1)
    tensors["fc.weight"] = torch.cat([blocks[layers.index(one)] for one in sorted(layers)], 1)
    tensors["norm.weight"] = head.norm.weight
    tensors["lm_head.weight"] = _output_rows(head)
    tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    has_row = torch.zeros(int(head.config.vocab_size), dtype=torch.bool)
    has_row[token_ids] = True
    tensors["t2d"] = has_row
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _output_rows(head: EagleHead) -> Tensor:
    rows = head.lm_head.weight
    assert isinstance(rows, Tensor)
    return rows


def _biases(layer: nn.Module, part: str) -> dict[str, Tensor]:
    """Biases of all projections of a part of the layer; none where no projection has one."""
    linears = {f"{part}.{name}": getattr(getattr(layer, part), name) for name in _PARTS[part]}
    if all(linear.bias is None for linear in linears.values()):
        return {}
    return {
        f"{name}.bias": linear.weight.new_zeros(linear.out_features)
        if linear.bias is None
        else linear.bias
        for name, linear in linears.items()
    }
