"""Tiny random checkpoints with a real tokenizer and chat template, like those a team hands over."""

from __future__ import annotations

import shutil

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.targets.settings import TargetConfig

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|none|>", "<|start|>", "<|end|>"]
NUM_ROWS = 272


def vocabulary():
    """Three special tokens, every byte, one merge: 260 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, "th"]
    return {token: index for index, token in enumerate(tokens)}


def make_tokenizer(template=TEMPLATE, merges=(("t", "h"),)):
    backend = Tokenizer(models.BPE(vocab=vocabulary(), merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(seed=0, rows=NUM_ROWS):
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=rows,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2)
    return model


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine") / "checkpoint"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(pristine, tmp_path):
    """A checkpoint of this test's own, to change as it likes."""
    return shutil.copytree(pristine, tmp_path / "work" / "checkpoint")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "targets"


@pytest.fixture
def configure():
    def make(source, **changes):
        settings = {
            "name": "tiny",
            "source": str(source),
            "revision": None,
            "dtype": "auto",
            "snapshot": "copy",
        }
        return TargetConfig(**(settings | changes))

    return make


@pytest.fixture
def tiny_gguf(tmp_path):
    """A Llama of one layer in GGUF, whose stated end token is not the one that ends a turn."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    tokens = list(vocabulary())
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    numbers = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(tokens), 32),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }
    for name, shape in shapes.items():
        values = numbers.standard_normal(shape).astype(np.float32)
        packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
