"""Recipes of each family and a job for a small target."""

from __future__ import annotations

from transformers import Qwen3MoeConfig

from draftsmith.drafts.settings import EagleConfig, MedusaConfig, StudentConfig
from draftsmith.planning.corpus import CorpusSize
from draftsmith.planning.job import Job, Machine
from draftsmith.planning.models import CacheShape
from tests.distillation.small_training import make_config
from tests.drafts.small_models import VOCAB_SIZE

RECIPES = {
    "student": StudentConfig("student", (0, -1), 32),
    "whole": StudentConfig("student", (1,), 0, own_head=True),
    "eagle": EagleConfig("eagle", (), 32, 2, 0.8),
    "own rows": EagleConfig("eagle", (0, 2), 32, 3, 0.8, own_head=True),
    "medusa": MedusaConfig("medusa", 3, 1, own_heads=True, vocabulary_size=32, head_decay=0.8),
    "shared": MedusaConfig("medusa", 2, 2, own_heads=False, vocabulary_size=0, head_decay=0.8),
}
CORPUS = CorpusSize(
    origin="data/corpus",
    train_responses=40,
    train_tokens=240,
    train_prompt_tokens=200,
    learned_prompt_tokens=120,
    rollout_tokens=300,
    longest_prompt=5,
    longest_response=7,
)


def make_job(directory, *, machine=None, dtype="float32", corpus=CORPUS, **distill):
    return Job(
        directory,
        dtype,
        make_config(**distill),
        corpus,
        CacheShape(rows=2, slots=40),
        machine or Machine("cpu"),
    )


def make_mixture():
    """The config of a small mixture of experts."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
    )
