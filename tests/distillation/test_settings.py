from __future__ import annotations

import dataclasses

import pytest

from draftsmith.distillation.recipe import recipe_digest
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.settings import LayerChoice, StudentConfig
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
        ({"js_beta": 0.0}, "js_beta"),
        ({"js_beta": 1.0}, "js_beta"),
        ({"early_stop_patience": -1}, "early_stop_patience"),
        ({"early_stop_steps": 0}, "early_stop_steps"),
        ({"topk": 0}, "topk"),
    ],
)
def test_values_out_of_range_are_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        make_config(**changes)


def test_a_recipe_names_layers_and_a_size():
    with pytest.raises(ValueError, match="layers"):
        dataclasses.replace(RECIPE, layers=())
    with pytest.raises(ValueError, match="choose"):
        LayerChoice(choose=0)
    with pytest.raises(ValueError, match="vocabulary_size"):
        dataclasses.replace(RECIPE, vocabulary_size=-1)


# Another valid value of every key.
OTHERS = {
    "steps": 11,
    "batch_size": 8,
    "gradient_accumulation": 2,
    "gradient_checkpointing": True,
    "learning_rate": 1e-4,
    "weight_decay": 0.1,
    "warmup_steps": 2,
    "schedule": "wsd",
    "max_grad_norm": 2.0,
    "mixed_precision": "bf16",
    "loss": "acceptance",
    "js_beta": 0.25,
    "signal": "cache",
    "topk": 9,
    "max_cache_gb": 2.0,
    "early_stop_patience": 3,
    "early_stop_steps": 3,
    "prompt_positions": True,
    "checkpoint_steps": 5,
    "log_steps": 2,
    "seed": 1,
}
OPERATIONAL = {"gradient_checkpointing", "max_cache_gb", "checkpoint_steps", "log_steps"}
# A key that counts only beside another one.
NEEDS = {
    "js_beta": {"loss": "jensen_shannon"},
    "topk": {"signal": "topk"},
    "early_stop_steps": {"early_stop_patience": 2},
}


def digest(**changes):
    return recipe_digest(RECIPE, make_config(**changes))


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(DistillConfig)])
def test_the_digest_depends_on_every_setting_that_changes_weights_and_on_no_other(key):
    changes = {key: OTHERS[key]}
    assert make_config(**changes) != make_config()
    is_idle = key in OPERATIONAL or key in NEEDS
    assert (digest(**changes) == digest()) is is_idle
    if key in NEEDS:
        assert digest(**changes, **NEEDS[key]) != digest(**NEEDS[key])


def test_the_digest_depends_on_the_whole_recipe():
    config = make_config()
    recipes = [
        RECIPE,
        dataclasses.replace(RECIPE, layers=(0,)),
        dataclasses.replace(RECIPE, layers=LayerChoice(choose=1)),
        dataclasses.replace(RECIPE, layers=LayerChoice(choose=2)),
        dataclasses.replace(RECIPE, vocabulary_size=0),
    ]
    assert len({recipe_digest(recipe, config) for recipe in recipes}) == len(recipes)
