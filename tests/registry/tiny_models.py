"""A tiny random target with a chat template, and a draft for it."""

from __future__ import annotations

import dataclasses

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.drafts.checkpoint import Lineage, save_draft
from draftsmith.drafts.student import build_student
from draftsmith.registry.pair import DraftIdentity, PairRecord
from draftsmith.targets.identity import identify
from draftsmith.targets.loading import load_target
from tests.registry.small_pairs import digest

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ("<|none|>", "<|start|>", "<|end|>")


def save_target(folder, *, seed=0, template=TEMPLATE):
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    tokenizer.chat_template = template
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokens),
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_draft_for(target_folder, folder):
    """A draft of the target's last layer; returns the pair's record."""
    target = load_target(target_folder, dtype="float32")
    token_ids = torch.arange(0, 200)
    lineage = Lineage(
        recipe="small",
        recipe_digest=digest("small"),
        target_digest=target.identity.digest,
        tokenizer_digest=target.identity.tokenizer_digest,
        corpus_digest=digest("c1"),
        layers=(1,),
    )
    folder.mkdir(parents=True)
    student = build_student(target.model, (1,), token_ids)
    manifest = save_draft(folder, student, token_ids, lineage=lineage, training={})
    identity = identify(target_folder, "float32")
    return PairRecord(
        target=dataclasses.asdict(identity),
        draft=DraftIdentity.from_json(dataclasses.asdict(manifest)),
    )
