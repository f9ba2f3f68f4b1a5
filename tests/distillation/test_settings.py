from __future__ import annotations

import dataclasses

import pytest

from draftsmith.distillation.recipe import recipe_digest
from draftsmith.drafts.settings import StudentConfig
from tests.distillation.small_training import make_config

RECIPE = StudentConfig(family="student", layers=(0, -1), vocabulary_size=100)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"steps": 0}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"gradient_accumulation": 0}, "gradient_accumulation"),
        ({"gradient_accumulation": 3}, "multiple"),
        ({"checkpoint_steps": 0}, "checkpoint_steps"),
        ({"log_steps": 0}, "log_steps"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_steps": 11}, "warmup_steps"),
    ],
)
def test_values_out_of_range_are_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        make_config(**changes)


def test_a_recipe_names_layers_and_a_size():
    with pytest.raises(ValueError, match="layers"):
        dataclasses.replace(RECIPE, layers=())
    with pytest.raises(ValueError, match="vocabulary_size"):
        dataclasses.replace(RECIPE, vocabulary_size=-1)


def test_the_digest_of_a_recipe_depends_on_every_setting():
    config = make_config()
    others = {
        recipe_digest(RECIPE, dataclasses.replace(config, seed=1)),
        recipe_digest(RECIPE, dataclasses.replace(config, steps=11)),
        recipe_digest(dataclasses.replace(RECIPE, layers=(0,)), config),
        recipe_digest(dataclasses.replace(RECIPE, vocabulary_size=0), config),
    }
    assert len(others) == 4
    assert recipe_digest(RECIPE, config) not in others
    assert recipe_digest(RECIPE, config) == recipe_digest(RECIPE, make_config())
