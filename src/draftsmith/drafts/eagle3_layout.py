"""The layout of EAGLE-3 checkpoints, as vLLM loads them, SpecForge and speculators write them.

A head is a layer of Llama's class over embedding and fused feature. Names and order differ from
ours, and no number does, so that writing and reading are each other's inverse:

    features     the inputs of the target's layers, ascending
    names        `midlayer`; its `input_layernorm` norms the embedding, `hidden_norm` the feature
    biases       one flag for all projections of a part; those that have none get zeros
    vocabulary   `d2t[row]` is the target's id less the row, `t2d` marks the ids that have a row

The embedding is the target's own there too. Knows nothing of files.

Source: vLLM, vllm/model_executor/models/llama_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafts.eagle import EagleHead

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OUR_LAYER, LAYER = "body.layers.0.", "midlayer."
ROTARY = ("default", "linear", "llama3")  # whose formulas Transformers and vLLM share
ACTIVATION = "silu"
SHAPE = (  # fields that our configuration and Llama's call the same
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
)
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # likewise; the target's
_NORMS = {  # of our layer and of theirs
    "input_layernorm.embedding": "input_layernorm",
    "input_layernorm.feature": "hidden_norm",
    "post_attention_layernorm": "post_attention_layernorm",
}
_PARTS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
_BIAS_FLAGS = {"self_attn": "attention_bias", "mlp": "mlp_bias"}


def weight_names(biased: Collection[str] = ()) -> dict[str, str]:
    """Our name of every weight of a head, output rows included, and theirs.

    Args:
        biased: Parts of the layer whose projections have biases, all of them.
    """
    layer = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _NORMS.items()}
    for part, projections in _PARTS.items():
        kinds = ("weight", "bias") if part in biased else ("weight",)
        same = [f"{part}.{name}.{kind}" for name in projections for kind in kinds]
        layer |= dict(zip(same, same, strict=True))
    names = {f"{OUR_LAYER}{ours}": f"{LAYER}{theirs}" for ours, theirs in layer.items()}
    return names | {name: name for name in ("fc.weight", "norm.weight", "lm_head.weight")}


def stated_biases(config: Any) -> list[str]:  # noqa: ANN401  configurations share no useful type
    """Parts whose projections have biases, by the flags of a configuration in this layout."""
    return [part for part, flag in _BIAS_FLAGS.items() if getattr(config, flag)]


def rotary_parameters(config: Any) -> dict[str, Any]:  # noqa: ANN401
    """Of a configuration; empty where it has none."""
    return dict(getattr(config, "rope_parameters", None) or {})


def layout_config(head: EagleHead) -> dict[str, Any]:
    """What vLLM's loader reads; rotary embeddings in the form that every Transformers reads."""
    config, layer = head.config, head.body.layers[0]
    rotary = rotary_parameters(config)
    theta = rotary.pop("rope_theta")
    layers = sorted(head.feature_layers)
    biased = _biased_parts(layer)
    return {name: getattr(config, name, None) for name in SHAPE + TOKENS} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
        "num_hidden_layers": 1,
        "head_dim": layer.self_attn.o_proj.in_features // int(config.num_attention_heads),
        **{flag: part in biased for part, flag in _BIAS_FLAGS.items()},
        "rope_theta": theta,
        "rope_scaling": None if rotary["rope_type"] == "default" else rotary,
        "tie_word_embeddings": False,
        "draft_vocab_size": len(head.state_dict()["lm_head.weight"]),
        "target_hidden_size": int(config.hidden_size),
        LAYER_IDS: layers,
        "num_aux_hidden_states": len(layers),
        "norm_before_residual": False,
    }


def layout_tensors(head: EagleHead, token_ids: Tensor | None) -> dict[str, Tensor]:
    """All tensors of a head in this layout.

    Args:
        head: With its output rows.
        token_ids: int64 `[entries]`: the target's id of each output row; None is the identity.
    """
    layer = head.body.layers[0]
    biased = _biased_parts(layer)
    state = _zero_biases(layer, biased) | head.state_dict()
    tensors = {theirs: state[ours] for ours, theirs in weight_names(biased).items()}
    layers = head.feature_layers
    blocks = tensors["fc.weight"].chunk(len(layers), dim=1)
    tensors["fc.weight"] = torch.cat([blocks[layers.index(one)] for one in sorted(layers)], 1)
    if token_ids is None:
        token_ids = torch.arange(len(tensors["lm_head.weight"]))
    tensors |= vocabulary_tensors(token_ids.cpu(), int(head.config.vocab_size))
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def vocabulary_tensors(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t`, int64 `[entries]`, and `t2d`, bool `[vocab_size]`, of ids inside the vocabulary."""
    has_row = torch.zeros(vocab_size, dtype=torch.bool)
    has_row[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": has_row}


def row_ids(offsets: Tensor) -> Tensor:
    """The target's id of each output row, int64 `[entries]`, from `d2t`."""
    return offsets.long() + torch.arange(len(offsets))


def _biased_parts(layer: nn.Module) -> list[str]:
    """Parts of our layer in which some projection has a bias."""
    return [
        part
        for part, names in _PARTS.items()
        if any(getattr(getattr(layer, part), name).bias is not None for name in names)
    ]


def _zero_biases(layer: nn.Module, biased: Collection[str]) -> dict[str, Tensor]:
    """Zeros in the place of every bias of these parts, under our names."""
    names = [f"{part}.{name}" for part in biased for name in _PARTS[part]]
    weights = {name: layer.get_submodule(name).get_parameter("weight") for name in names}
    return {f"{OUR_LAYER}{name}.bias": w.new_zeros(len(w)) for name, w in weights.items()}
