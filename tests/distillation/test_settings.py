from __future__ import annotations

import dataclasses

import pytest

from draftsmith.artifacts import digest_json
from draftsmith.distillation.recipe import recipe_digest, recipe_digests
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.settings import LayerChoice, StudentConfig
from tests.distillation.small_training import make_config

RECIPE = StudentConfig(family="student", layers=(0, -1), vocabulary_size=100)
DRAFT = "d" * 64


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"steps": 0}, "steps"),
        ({"warm_start_steps": 0}, "warm_start_steps"),
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
    "warm_start_steps": 5,
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
WARM = {"warm_start_steps"}  # concerns no training from the target's layers
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
    is_idle = key in {*OPERATIONAL, *WARM, *NEEDS}
    assert (digest(**changes) == digest()) is is_idle
    if key in NEEDS:
        assert digest(**changes, **NEEDS[key]) != digest(**NEEDS[key])


def warm_digest(**changes):
    return recipe_digest(RECIPE, make_config(**changes), started_from=DRAFT)


def test_a_warm_starts_own_steps_are_in_its_digest_in_place_of_the_others():
    assert warm_digest(warm_start_steps=5) == warm_digest(warm_start_steps=5, steps=9)
    assert warm_digest(warm_start_steps=5) != warm_digest(warm_start_steps=6)
    assert warm_digest(warm_start_steps=10) == warm_digest(warm_start_steps=11)  # of 10 in all
    assert warm_digest(warm_start_steps=5, seed=1) != warm_digest(warm_start_steps=5)


def test_drafts_that_are_older_than_the_steps_of_warm_starts_are_still_known():
    config = make_config(warm_start_steps=5)
    settings = dataclasses.asdict(RECIPE)
    del settings["own_head"]
    before = {"recipe": settings, "distill": make_config().decisive()}
    assert "warm_start_steps" not in before["distill"]
    known = recipe_digests(RECIPE, config, [DRAFT], num_seeds=1)
    assert known.plain == (digest_json(before),)
    assert digest_json(before | {"started_from": DRAFT}) in known.warm
    assert warm_digest(warm_start_steps=5) in known.warm


@pytest.mark.parametrize(
    ("own", "warmup", "expected"), [(4, 2, (4, 2)), (4, 6, (4, 4)), (99, 6, (10, 6))]
)
def test_a_warm_start_never_has_more_steps_than_all_nor_more_warm_up_than_steps(
    own, warmup, expected
):
    config = make_config(warm_start_steps=own, warmup_steps=warmup)
    warm = config.warm_started()
    assert (warm.steps, warm.warmup_steps) == expected
    assert warm.warm_started() == warm
    kept = {"steps": config.steps, "warmup_steps": config.warmup_steps}
    assert dataclasses.replace(warm, **kept) == config


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
