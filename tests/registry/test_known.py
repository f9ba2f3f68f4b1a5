from __future__ import annotations

import pytest

from draftsmith.distillation.recipe import RecipeDigests
from draftsmith.drift.settings import DriftConfig
from draftsmith.drift.start import StartConfig, start_report
from draftsmith.registry.known import fetch_sources, known_pairs
from tests.registry.small_pairs import SOURCE, TAGS, digest, make_files, make_record

PLAIN, WARM = digest("small"), digest("small from d1")
DRIFT = DriftConfig(margin=0.02, confidence=0.95, temperature=0.0, min_prompts=50, on_match="reuse")


@pytest.fixture
def put(store, tmp_path):
    """Register a pair of target t2 whose recipe has the digest of `settings`."""

    def call(draft, settings):
        draft_dir, evidence = make_files(tmp_path / draft, draft)
        record = make_record("t2", draft, recipe=settings)
        return store.register(record, draft_dir, evidence=evidence, tags=TAGS, target_source=SOURCE)

    return call


def entry(store, plain, warm=()):
    recipes = {"small": RecipeDigests(tuple(plain), tuple(warm))}
    return known_pairs(store, digest("t2"), digest("c1"), recipes)["small"]


def start(store, seeds):
    """What stage start makes of the known pair."""
    known = {"small": entry(store, seeds)}
    report = start_report(
        {"small": seeds}, known=known, incumbent=None, config=StartConfig(), drift=DRIFT
    )
    return report["recipes"]["small"]


def known(store, plain, *warm):
    found = entry(store, [plain], warm)
    return None if found is None else found["version"]


def test_nothing_is_known_of_an_empty_registry(store):
    assert known(store, PLAIN, WARM) is None


def test_a_pair_is_known_of_the_same_target_recipe_and_corpus(store, put):
    version = put("d2", "small")
    recipes = {"small": RecipeDigests((PLAIN,)), "other": RecipeDigests((digest("other"),))}
    found = known_pairs(store, digest("t2"), digest("c1"), recipes)
    assert (found["small"]["version"], found["other"]) == (version, None)
    for target, corpus in (("t1", "c1"), ("t2", "c2")):
        assert known_pairs(store, digest(target), digest(corpus), recipes)["small"] is None


def test_a_reused_pair_is_known_once_it_was_promoted(store, register):
    reused = TAGS | {"evaluated_corpus_digest": digest("c2")}
    register(target="t2", corpus="c1", tags=reused)
    recipes = {"small": RecipeDigests((PLAIN,))}
    call = (store, digest("t2"), digest("c2"), recipes)
    assert known_pairs(*call)["small"] is None  # it may have been blocked
    store.promote("1", ["it matches"])
    assert known_pairs(*call)["small"]["version"] == "1"


def test_a_warm_started_pair_is_known_once_it_was_promoted_and_never_as_the_plain_recipe(
    store, put
):
    version = put("d2", "small from d1")
    assert known(store, PLAIN, WARM) is None
    store.promote(version, ["fine"])
    assert known(store, PLAIN, WARM) == version
    assert known(store, PLAIN) is None
    assert known(store, PLAIN, digest("small from d9")) is None


def test_the_newest_known_pair_wins_and_one_without_live_drift_before_one_with(store, put):
    plain = put("d2", "small")
    warm = put("d3", "small from d1")
    store.promote(warm, ["fine"])
    assert known(store, PLAIN, WARM) == warm
    store.set_live_drift(warm, "alarm")
    assert known(store, PLAIN, WARM) == plain
    store.quarantine(plain, "slow")
    assert known(store, PLAIN, WARM) == warm


def test_the_first_seed_that_gave_no_pair_yet_is_the_next_to_train_with(store, put):
    seeds = [digest(name) for name in ("small", "small+1", "small+2")]
    first = put("d2", "small")
    assert (entry(store, seeds)["version"], entry(store, seeds)["reseed"]) == (first, 1)
    second = put("d3", "small+1")
    store.quarantine(second, "slow")
    store.set_live_drift(first, "alarm")
    found = entry(store, seeds)
    assert (found["version"], found["quarantine"], found["reseed"]) == (second, "slow", 2)
    assert entry(store, seeds[:1])["reseed"] is None


def test_a_rollback_of_what_an_alarm_had_trained_starts_no_training(store, put):
    """The alarm on the first draft stays; going back from the second must not give a third."""
    seeds = [digest(name) for name in ("small", "small+1", "small+2")]
    first = put("d2", "small")
    store.promote(first, ["fine"])
    store.set_live_drift(first, "alarm")
    assert (entry(store, seeds)["version"], entry(store, seeds)["quarantine"]) == (first, None)
    second = put("d3", "small+1")
    store.promote(second, ["fine"])
    assert entry(store, seeds)["version"] == second
    store.rollback(reason="slow", is_reachable=lambda item: True)
    found = entry(store, seeds)
    assert (found["version"], found["quarantine"], found["live_drift"]) == (second, "slow", False)
    decided = start(store, seeds)
    assert (decided["action"], decided["source_version"]) == ("known", second)
    store.set_live_drift(second, "alarm")  # one of its own does ask for a third
    decided = start(store, seeds)
    assert (decided["action"], decided["reseed"]) == ("retrain", 2)


def test_an_alarm_concerns_every_version_with_that_draft(store, register, put):
    elsewhere = register("t1", "d2")
    here = put("d2", "small")
    store.set_live_drift(elsewhere, "alarm")
    assert entry(store, [PLAIN])["version"] == here
    assert entry(store, [PLAIN])["live_drift"]
    assert all(item.pair.live_drift for item in store.versions())


def test_a_pair_in_quarantine_is_the_last_choice(store, put):
    only = put("d2", "small")
    store.quarantine(only, "slow")
    assert (entry(store, [PLAIN])["version"], entry(store, [PLAIN])["quarantine"]) == (only, "slow")
    put("d3", "small")
    assert entry(store, [PLAIN])["quarantine"] is None


def test_a_known_pair_whose_files_are_damaged_is_marked_and_known_no_longer(
    store, put, tmp_path, damage
):
    version = put("d2", "small")
    taken = {"action": "known", "source_version": version}
    assert fetch_sources(store, {"recipes": {"small": taken}}, tmp_path / "sound")
    damage(store, version)
    assert not fetch_sources(store, {"recipes": {"small": taken}}, tmp_path / "elsewhere")
    assert "draft/" in store.resolve(version).damage
    assert entry(store, [PLAIN]) is None
    assert put("d2", "small") != version
