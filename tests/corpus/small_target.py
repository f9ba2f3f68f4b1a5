"""A Llama of width 32 that can be fitted to the small world in a few seconds."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.tiny_target import train

MAX_POSITIONS = 256


def small_model(tokenizer: PreTrainedTokenizerFast, *, num_layers: int = 2) -> LlamaForCausalLM:
    """Untrained, float32, the same numbers on every call."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def fitted_model(
    tokenizer: PreTrainedTokenizerFast, *, num_layers: int = 2, steps: int = 100
) -> LlamaForCausalLM:
    """Trained on the small world: it ends its turns and its distributions are far from uniform."""
    model = small_model(tokenizer, num_layers=num_layers)
    train(model, tokenizer, "home", steps)
    return model.requires_grad_(requires_grad=False)
