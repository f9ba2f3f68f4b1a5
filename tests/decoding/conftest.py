"""Tiny random models for the decoder's tests, one of each supported class, built once a session.

Weights are scaled so that attention matters and the argmax is far from uniform: with the usual
initial values generation is constant and would hide a broken cache.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from draftsmith.decoding import TokenText

WINDOW = 8
_EAGER = ("gemma2", "gpt_oss")  # what Transformers' sdpa would leave out
_WEIGHT_SCALE = 8.0
_DRAFT_NOISE = 0.05


@dataclass(frozen=True)
class Family:
    """A target, a draft that is a noisy copy of it, and an untouched target of Transformers."""

    target: PreTrainedModel
    draft: PreTrainedModel
    reference: PreTrainedModel


def _config(kind: str, vocab_size: int, max_positions: int) -> PretrainedConfig:
    plain = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_positions,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    if kind == "gpt2":
        return GPT2Config(
            vocab_size=vocab_size,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=max_positions,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
    if kind == "gpt_neox":
        del plain["num_key_value_heads"]
    config_class, special = _CLASSES[kind]
    return config_class(**plain, **special)


_ALTERNATING = {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_GEMMA = {"query_pre_attn_scalar": 8, **_ALTERNATING}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
_CLASSES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "gemma2": (Gemma2Config, {"attn_logit_softcapping": 5.0, **_GEMMA}),
    "gemma3": (Gemma3TextConfig, _GEMMA),
    "gpt_neox": (GPTNeoXConfig, {}),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 4, **_EXPERTS, **_ALTERNATING}),
    "granite": (GraniteConfig, {}),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "olmo2": (Olmo2Config, {}),
    "phi3": (Phi3Config, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, "moe_intermediate_size": 32, **_EXPERTS}),
    "smollm3": (SmolLM3Config, {}),
}


def _scale_matrices(model: PreTrainedModel, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(factor)


def _noisy_copy(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A copy with `noise` standard deviations added: accepted often, rejected often."""
    generator = torch.Generator().manual_seed(1)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in clone.parameters():
            if parameter.ndim > 1:
                shift = torch.randn(parameter.shape, generator=generator)
                parameter.add_(shift * parameter.std() * noise)
    return clone


def _build(
    kind: str, *, vocab_size: int = 64, max_positions: int = 320, noise: float = _DRAFT_NOISE
) -> Family:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = _config(kind, vocab_size, max_positions)
        attention = "eager" if kind in _EAGER else "sdpa"
        reference = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    _scale_matrices(reference, _WEIGHT_SCALE)
    # The decoder switches a model's attention through its configuration, so nothing may share one.
    return Family(copy.deepcopy(reference), _noisy_copy(reference, noise), reference)


@pytest.fixture(scope="session")
def family() -> Callable[..., Family]:
    """`family(kind, vocab_size=, max_positions=, noise=)`; equal arguments give the same models."""
    return functools.cache(_build)


@pytest.fixture(scope="session")
def llama(family: Callable[..., Family]) -> Family:
    """The class that tests use when the class does not matter."""
    return family("llama")


@pytest.fixture(scope="session")
def continue_greedily() -> Callable[[PreTrainedModel, list[int], int], list[int]]:
    """Argmax continuation by a full forward a token: no cache, no code of the decoder."""

    @torch.inference_mode()
    def loop(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
        token_ids = list(prompt)
        for _ in range(num_tokens):
            logits = model(torch.tensor([token_ids]), use_cache=False).logits
            token_ids.append(int(logits[0, -1].argmax()))
        return token_ids[len(prompt) :]

    return loop


@pytest.fixture(scope="session")
def ragged_prompts() -> list[list[int]]:
    """Prompts of 1, 5, 9, 20 and 3 tokens: below, across and beyond the window of 8."""
    return [[1 + (7 * i + j * j) % 60 for j in range(n)] for i, n in enumerate([1, 5, 9, 20, 3])]


# Letters, words that overlap in many ways, and pieces of the three bytes of a euro sign.
_WORDS = "th he the er an in ing on st op stop pped to re ed at or Ġa Ġthe Ġs Ġto ab ba aa .Ġ Ċa"
_BYTES = "â Ĥ ¬ Ĥ¬ ¬e eâ"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """What the 64 ids of the tiny models spell, byte-level; 63 is special."""
    words = [*"abcdefghijklmnopqrstuvwxyzĠĊ.,!", *_WORDS.split(), *_BYTES.split()]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    assert backend.get_vocab_size() == 64
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="session")
def token_text(tokenizer: PreTrainedTokenizerFast) -> TokenText:
    """The same for the decoder."""
    return TokenText(tokenizer)
