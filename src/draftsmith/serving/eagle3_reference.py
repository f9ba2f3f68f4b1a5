"""What vLLM computes from a head in the layout of EAGLE-3, written out: the export's self-test.

Reads the exported folder and the target, and nothing of the head that it came from.

    features   x_t = fc(inputs of the target's layers at position t, ascending)
    entry t    h = x_t + attention(norm(embedding of token t + 1), norm(x_t))
               y_t = h + mlp(norm(h))            the feature of the next entry, where there is none
    logits     lm_head(norm(y_t)), row r of them belongs to the target's id r + d2t[r]

Source: vLLM, vllm/model_executor/models/llama_eagle3.py and llama.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.decoding.features import layer_inputs
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.eagle3_layout import WEIGHTS


class Eagle3Reference:
    """The head of an exported folder beside its target.

    Args:
        folder: What `write_head` made.
        target: The live target, whose embedding and hidden states are read.
    """

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        self._config: Any = LlamaConfig.from_pretrained(folder)
        self._weights = load_file(folder / WEIGHTS, device=str(target.device))
        self._rotary = LlamaRotaryEmbedding(self._config).to(target.device)
        self._target = target

    def fused(self, token_ids: Tensor) -> Tensor:
        """Features `[1, width, hidden]` of a text, int64 `[1, width]`."""
        states = self._target.base_model(
            input_ids=token_ids, use_cache=False, output_hidden_states=True
        ).hidden_states
        layers = sorted(self._config.eagle_aux_hidden_state_layer_ids)
        return self._linear("fc", torch.cat([states[layer] for layer in layers], -1))

    def run(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Own features of entries `[1, width, hidden]`; `tokens` are those behind `features`."""
        embedded = self._target.get_input_embeddings()(tokens)
        halves = (
            self._norm("midlayer.input_layernorm", embedded),
            self._norm("midlayer.hidden_norm", features),
        )
        hidden = features + self._attention(torch.cat(halves, -1))
        return hidden + self._mlp(self._norm("midlayer.post_attention_layernorm", hidden))

    def logits(self, own: Tensor) -> Tensor:
        """Over the target's vocabulary; -inf where the draft has no row."""
        rows = self._linear("lm_head", self._norm("norm", own)).float()
        full = rows.new_full((*rows.shape[:-1], self._config.vocab_size), -torch.inf)
        offsets = self._weights["d2t"]
        full[..., offsets + torch.arange(len(offsets), device=offsets.device)] = rows
        return full

    def _linear(self, name: str, hidden: Tensor) -> Tensor:
        bias = self._weights.get(f"{name}.bias")
        return nn.functional.linear(hidden, self._weights[f"{name}.weight"], bias)

    def _norm(self, name: str, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return wide.to(hidden.dtype) * self._weights[f"{name}.weight"]

    def _attention(self, joined: Tensor) -> Tensor:
        q, k, v = (
            self._linear(f"midlayer.self_attn.{name}_proj", joined)
            .unflatten(-1, (-1, self._config.head_dim))
            .transpose(1, 2)
            for name in "qkv"
        )
        positions = torch.arange(joined.shape[1], device=joined.device)[None]
        cos, sin = (part[:, None] for part in self._rotary(joined, positions))
        attended = nn.functional.scaled_dot_product_attention(
            _turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self._linear("midlayer.self_attn.o_proj", attended.transpose(1, 2).flatten(2))

    def _mlp(self, hidden: Tensor) -> Tensor:
        gate = nn.functional.silu(self._linear("midlayer.mlp.gate_proj", hidden))
        up = self._linear("midlayer.mlp.up_proj", hidden)
        return self._linear("midlayer.mlp.down_proj", gate * up)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: the first half of a head's dimensions is paired with the second."""
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


@torch.inference_mode()
def compared_logits(
    head: EagleHead,
    token_ids: Tensor | None,
    target: PreTrainedModel,
    folder: Path,
    *,
    text: Tensor,
) -> tuple[Tensor, Tensor]:
    """Logits of the head and of the exported folder on a text and one own draft behind it.

    Args:
        head: Joined to `target`.
        token_ids: As in `write_head`.
        target: Live target.
        folder: What was written.
        text: int64 `[1, width]`.

    Returns:
        Two of `[1, width, vocab]`, over the target's vocabulary.
    """
    with layer_inputs(target, head.feature_layers) as found:
        target.base_model(input_ids=text, use_cache=False)
    features = head.fuse(torch.cat(found, -1))[:, :-1]
    own = head.run(text[:, 1:], features, use_cache=False)[:, -1:]
    size = int(head.config.vocab_size)
    draft = _spread(head.logits(own), token_ids, size).argmax(-1)
    tokens = torch.cat([text[:, 1:], draft], 1)
    features = torch.cat([features, own], 1)
    expected = _spread(head.logits(head.run(tokens, features, use_cache=False)), token_ids, size)

    written = Eagle3Reference(folder, target)
    features = written.fused(text)[:, :-1]
    own = written.run(text[:, 1:], features)[:, -1:]
    return expected, written.logits(written.run(tokens, torch.cat([features, own], 1)))


def _spread(logits: Tensor, token_ids: Tensor | None, size: int) -> Tensor:
    """Over the target's vocabulary; -inf where the draft has no row."""
    if token_ids is None:
        return logits.float()
    full = logits.new_full((*logits.shape[:-1], size), -torch.inf, dtype=torch.float32)
    full[..., token_ids] = logits.float()
    return full
