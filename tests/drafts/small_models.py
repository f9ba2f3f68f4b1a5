"""Small random targets of four families, with weights large enough to matter."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
)

from draftsmith.drafts.checkpoint import Lineage, save_draft
from draftsmith.drafts.student import build_student

KINDS = ("llama", "qwen2", "gemma3", "gpt2")
NUM_LAYERS = 3
VOCAB_SIZE = 48
TARGET_DIGEST = "a" * 64
_WEIGHT_SCALE = 6.0


def make_config(kind, *, tied=False, hidden_size=32, num_layers=NUM_LAYERS, **more):
    plain = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": tied,
    } | more
    match kind:
        case "llama":
            return LlamaConfig(**plain)
        case "qwen2":
            return Qwen2Config(**plain)
        case "gemma3":
            kinds = ["sliding_attention", "full_attention", "sliding_attention"]
            return Gemma3TextConfig(
                head_dim=8,
                query_pre_attn_scalar=8,
                sliding_window=4,
                layer_types=kinds[:num_layers],
                **plain,
            )
        case "gpt2":
            return GPT2Config(
                vocab_size=VOCAB_SIZE,
                n_embd=hidden_size,
                n_layer=num_layers,
                n_head=4,
                n_positions=64,
                bos_token_id=None,
                eos_token_id=1,
                tie_word_embeddings=tied,
            )
    raise ValueError(kind)


def make_target(kind="llama", *, dtype=torch.float32, seed=0, **options):
    """A causal LM in eval mode under sdpa; matrices are scaled so that layers change the result."""
    torch.manual_seed(seed)
    config = make_config(kind, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(_WEIGHT_SCALE)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval().requires_grad_(requires_grad=False)


def some_tokens(rows=2, width=9, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (rows, width), generator=generator)


def make_lineage(layers=(0, 2), target_digest=TARGET_DIGEST):
    return Lineage("small", "b" * 64, target_digest, "c" * 64, "d" * 64, tuple(layers))


def save_small(directory, target, token_ids=None, layers=(0, 2), noise=0.01):
    """Save a student a little off its target's layers; returns it and its manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    student = build_student(target, layers, token_ids)
    generator = torch.Generator().manual_seed(2)
    for parameter in student.parameters():
        if parameter.requires_grad:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data += noise * drawn.to(parameter.dtype)
    manifest = save_draft(
        directory, student, token_ids, lineage=make_lineage(layers), training={"steps": 0}
    )
    return student, manifest
