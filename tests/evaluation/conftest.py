"""A small fitted target on disk, drafts of it, and its own rollouts.

A near-uniform random target would let random drafts pass.
"""

from __future__ import annotations

import pytest
import torch

from draftsmith.artifacts import digest_json
from draftsmith.corpus.chat import make_chat
from draftsmith.corpus.prompts import user_prompt
from draftsmith.corpus.rollouts import Limits, RolloutJob, ShardStore, roll_out
from draftsmith.decoding import Engine, NoProposer
from draftsmith.drafts.checkpoint import Lineage, load_draft, save_draft
from draftsmith.drafts.student import build_student
from draftsmith.drafts.vocabulary import choose_tokens, count_tokens
from draftsmith.targets.loading import load_target
from tests.corpus.small_target import fitted_model
from tests.tiny_target import conversations, make_tokenizer, save

NUM_LAYERS = 3
NUM_PROMPTS = 24
MAX_NEW_TOKENS = 20
TRIMMED_SIZE = 36


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Folder of the target."""
    tokenizer = make_tokenizer()
    folder = tmp_path_factory.mktemp("target")
    save(fitted_model(tokenizer, num_layers=NUM_LAYERS, steps=160), tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def loaded(checkpoint):
    """The target with tokenizer and identity, in float32."""
    return load_target(checkpoint, dtype="float32")


@pytest.fixture(scope="session")
def target(loaded):
    return loaded.model


@pytest.fixture(scope="session")
def stop_ids(loaded):
    return make_chat(loaded.model, loaded.tokenizer).stop_ids


@pytest.fixture(scope="session")
def rollouts(loaded, stop_ids, tmp_path_factory):
    """The target's responses at temperatures 0 and 0.7."""
    chat = make_chat(loaded.model, loaded.tokenizer)
    prompts = [user_prompt(text, d) for d, text, _ in conversations("home")[:: 200 // NUM_PROMPTS]]
    prompts += [user_prompt(text, d) for d, text, _ in conversations("home")[1::40]]
    jobs = [
        RolloutJob(p.prompt_id, p.domain, temperature, chat.prompt_ids(p))
        for p in prompts
        for temperature in (0.0, 0.7)
    ]
    return roll_out(
        Engine(loaded.model, NoProposer(), max_rows=16, draft_length=0),
        jobs,
        limits=Limits(MAX_NEW_TOKENS, stop_ids, 0),
        store=ShardStore(tmp_path_factory.mktemp("shards"), 16),
    )


@pytest.fixture(scope="session")
def prompts(rollouts):
    """(id, token ids) of every prompt."""
    return list({rollout.prompt_id: rollout.prompt_ids for rollout in rollouts}.items())


@pytest.fixture(scope="session")
def save_student(loaded, tmp_path_factory):
    """`save_student(name, layers, token_ids=, is_random=, **lineage)` -> the draft's folder."""

    def write(name, layers, token_ids=None, *, is_random=False, **lineage):
        facts = {
            "recipe": name,
            "recipe_digest": digest_json(name),
            "target_digest": loaded.identity.digest,
            "tokenizer_digest": loaded.identity.tokenizer_digest,
            "corpus_digest": digest_json("corpus"),
        }
        # The target's output rows know which tokens it says, so a random draft has rows of its own.
        student = build_student(loaded.model, layers, token_ids, own_head=is_random)
        if is_random:
            generator = torch.Generator().manual_seed(3)
            for parameter in student.parameters():
                if parameter.requires_grad:
                    parameter.data.normal_(0, 0.5, generator=generator)
        folder = tmp_path_factory.mktemp(name)
        lineage = Lineage(**{**facts, **lineage}, layers=tuple(layers))
        save_draft(folder, student, token_ids, lineage=lineage, training={})
        return folder

    return write


@pytest.fixture(scope="session")
def draft_folders(save_student, rollouts, loaded, stop_ids):
    """Folders of a perfect draft, two students and a random one."""
    responses = [rollout.response_ids for rollout in rollouts]
    counts = count_tokens(responses, len(loaded.tokenizer))
    token_ids = choose_tokens(counts, TRIMMED_SIZE, always=stop_ids)
    layers = tuple(range(NUM_LAYERS))
    return {
        "whole": save_student("whole", layers),
        "student": save_student("student", (0, NUM_LAYERS - 1)),
        "trimmed": save_student("trimmed", (0, NUM_LAYERS - 1), token_ids),
        "random": save_student("random", (0,), is_random=True),
    }


@pytest.fixture(scope="session")
def drafts(draft_folders, loaded):
    """The same, joined to the target."""
    return {
        name: load_draft(folder, loaded.model, target_digest=loaded.identity.digest)
        for name, folder in draft_folders.items()
    }
