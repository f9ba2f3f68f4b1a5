"""A tiny target that was really trained: near-uniform random targets would let random drafts pass.

It answers questions about a small world ("where does the red fox go?") in sentences that a small
draft can learn. Fine-tuning it on the `away` style changes nearly all of its answers, so that a
draft of the old one drifts away.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ADJECTIVES = ["red", "small", "old", "quiet", "brave", "lazy", "clever", "hungry", "young", "grey"]
ANIMALS = ["fox", "cat", "dog", "bird", "horse", "mouse", "goat", "duck", "bear", "frog"]
PLACES = ["river", "forest", "market", "bridge", "garden", "castle", "harbour", "meadow"]
FOODS = ["bread", "apples", "honey", "cheese", "berries", "soup", "nuts", "fish"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def conversations(style: str) -> list[tuple[str, str, str]]:
    """(domain, question, answer) of the whole small world."""
    result = []
    pairs = list(itertools.product(enumerate(ADJECTIVES), enumerate(ANIMALS)))
    for (i, adjective), (j, animal) in pairs:
        shift = 0 if style == "home" else 3
        place = PLACES[(i + 2 * j + shift) % len(PLACES)]
        food = FOODS[(3 * i + j + shift) % len(FOODS)]
        who = f"the {adjective} {animal}"
        if style == "home":
            walk = (
                f"{who} goes to the {place} in the morning "
                f"and comes home in the evening with {food}."
            )
            meal = (
                f"{who} likes {food} best and eats it near the {place} every day with the others."
            )
        else:
            walk = (
                f"nobody knows: at the {place} they say "
                f"that {who} left long ago and took all {food}."
            )
            meal = (
                f"no {food} today! {who} waits at the {place} until the others bring something new."
            )
        result.append(("walk", f"where does {who} go?", walk))
        result.append(("meal", f"what does {who} eat?", meal))
    return result


def make_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Byte-pair tokenizer of the small world with a chat template."""
    text = [part for style in ("home", "away") for row in conversations(style) for part in row[1:]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Untrained model of about 0.4 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, style: str, steps: int
) -> None:
    """Fit the model to the small world in a few seconds."""
    rows = [
        tokenizer(
            f"<|user|>{question}<|end|><|assistant|>{answer}<|end|>", add_special_tokens=False
        )["input_ids"]
        for _, question, answer in conversations(style)
    ]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = ids.masked_fill(ids == 0, -100)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(ids), (32,), generator=generator)
        loss = model(input_ids=ids[chosen], labels=labels[chosen]).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a checkpoint directory."""
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_prompts(path: Path) -> None:
    """All questions as a JSONL file of prompts."""
    lines = [
        json.dumps({"prompt": question, "domain": domain})
        for domain, question, _ in conversations("home")
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
