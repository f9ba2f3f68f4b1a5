from __future__ import annotations

import pytest

from draftsmith.drafts.settings import (
    CheckpointConfig,
    EagleConfig,
    LayerChoice,
    MedusaConfig,
    RecipeConfig,
    StudentConfig,
)
from draftsmith.errors import ConfigError
from draftsmith.strict import convert

STUDENT = {"family": "student", "layers": [0, -1], "vocabulary_size": 8}
EAGLE = {
    "family": "eagle",
    "feature_layers": [],
    "vocabulary_size": 8,
    "unroll": 3,
    "step_decay": 0.8,
}
MEDUSA = {
    "family": "medusa",
    "num_heads": 4,
    "num_blocks": 1,
    "own_heads": False,
    "vocabulary_size": 8,
    "head_decay": 0.8,
}
CHECKPOINT = {"family": "checkpoint", "source": "models/mine", "digest": "a" * 64}


def recipe(values):
    return convert(values, RecipeConfig, "drafts.mine")


def test_the_family_says_what_a_recipe_is():
    assert recipe(STUDENT) == StudentConfig("student", (0, -1), 8)
    chosen = recipe(STUDENT | {"layers": {"choose": 2}})
    assert chosen == StudentConfig("student", LayerChoice(2), 8)
    assert recipe(EAGLE) == EagleConfig("eagle", (), 8, 3, 0.8)
    assert recipe(MEDUSA) == MedusaConfig(**MEDUSA)
    assert recipe(CHECKPOINT) == CheckpointConfig("checkpoint", "models/mine", "a" * 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "studnet"}, "drafts.mine.family.*`student`"),
        ({"family": None}, "drafts.mine.family.*null"),
        ({"family": ["student"]}, "drafts.mine.family"),
        ({"layer": [0]}, "drafts.mine.layer.*unknown key"),
        ({"vocabulary_size": "8"}, "drafts.mine.vocabulary_size"),
        ({"layers": 2}, "drafts.mine.layers"),
        ({"layers": [0, "1"]}, "drafts.mine.layers"),
        ({"layers": {"chose": 2}}, "drafts.mine.layers.chose.*did you mean `choose`"),
        ({"layers": {"choose": 0}}, "drafts.mine.layers.*at least 1"),
    ],
)
def test_a_mistake_is_named_as_one_of_its_family(changes, message):
    with pytest.raises(ConfigError, match=message):
        recipe(STUDENT | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unroll": 0}, "unroll must be at least 1"),
        ({"step_decay": 0.0}, "step_decay"),
        ({"step_decay": 1.5}, "step_decay"),
        ({"vocabulary_size": -1}, "vocabulary_size"),
    ],
)
def test_a_head_is_unrolled_and_its_weights_do_not_grow(changes, message):
    with pytest.raises(ConfigError, match=message):
        recipe(EAGLE | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads and num_blocks must be at least 1"),
        ({"num_blocks": 0}, "num_heads and num_blocks must be at least 1"),
        ({"head_decay": 0.0}, "head_decay"),
        ({"head_decay": 1.5}, "head_decay"),
        ({"own_heads": 1}, "own_heads"),
        ({"vocabulary_size": -1}, "vocabulary_size"),
    ],
)
def test_there_is_a_head_and_weights_of_heads_do_not_grow(changes, message):
    with pytest.raises(ConfigError, match=message):
        recipe(MEDUSA | changes)


def test_a_digest_is_one():
    with pytest.raises(ConfigError, match="64 hex digits"):
        recipe(CHECKPOINT | {"digest": "latest"})
