"""The registered model's page tells of its champion, whoever moved the alias."""

from __future__ import annotations

import pytest

from tests.registry.small_pairs import TAGS

MEASURED = {**TAGS, "temperature": "0.0", "speedup_low": "1.1000", "speedup_high": "1.3000"}


def always(_):
    return True


@pytest.fixture
def told(store):
    """What the model's page says."""
    return lambda: store.catalog.client.get_registered_model("demo").description


def test_before_the_first_promotion_it_says_that_nobody_is_champion(store, register, told):
    store.set_challenger(register())
    assert "**No champion yet**" in told()


def test_it_tells_the_champions_figures_since_when_and_how_to_load_it(store, register, told):
    store.promote(register(tags=MEASURED), ["first"])
    day = store.history()[-1].time_utc[:10]
    text = told()
    assert f"**Champion since {day}: version 1**, recipe small, for target `" in text
    assert "`package:llm/model.gguf`" in text
    assert "alpha 0.4000 at temperature 0.0, tau 1.5000, " in text
    assert "speedup 1.2000 (1.1000 to 1.3000) on A CPU" in text
    assert '`draftsmith.load_pair("models:/demo@champion")`' in text


def test_it_follows_promotions_and_rollbacks(store, register, told):
    first, second = register("t1", "d1"), register("t2", "d2")
    store.promote(first, ["first"])
    store.promote(second, ["faster"])
    assert f"version {second}**" in told()
    store.rollback(reason="slow", is_reachable=always)
    assert f"version {first}**" in told()


def test_new_evidence_of_the_champion_is_told_by_the_next_run(store, register, told):
    version = register()
    store.promote(version, ["first"])
    assert register(tags=TAGS | {"speedup": "1.7000"}) == version
    store.set_challenger(version)
    assert "speedup 1.7000 on A CPU" in told()


def test_a_model_that_was_made_without_a_page_gets_one(store, register, told):
    """Of a version before there were pages, or one whose description was deleted."""
    version = register()
    store.promote(version, ["first"])
    store.catalog.client.update_registered_model("demo", description="")
    assert store.promote(version, ["again"]) is None
    assert f"version {version}**" in told()


def test_what_is_said_already_is_not_written_again(store, register):
    version = register()
    store.promote(version, ["first"])
    before = store.catalog.client.get_registered_model("demo").last_updated_timestamp
    store.set_challenger(version)
    written = store.catalog.client.get_registered_model("demo").last_updated_timestamp
    store.set_challenger(version)
    store.promote(version, ["again"])
    after = store.catalog.client.get_registered_model("demo").last_updated_timestamp
    assert before <= written == after
