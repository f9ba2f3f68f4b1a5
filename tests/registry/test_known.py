from __future__ import annotations

import pytest

from draftsmith.registry.known import known_pairs
from tests.registry.small_pairs import SOURCE, TAGS, digest, make_files, make_record

PLAIN, WARM = digest("small"), digest("small from d1")


@pytest.fixture
def put(store, tmp_path):
    """Register a pair of target t2 whose recipe has the digest of `settings`."""

    def call(draft, settings):
        draft_dir, evidence = make_files(tmp_path / draft, draft)
        record = make_record("t2", draft, recipe=settings)
        return store.register(record, draft_dir, evidence=evidence, tags=TAGS, target_source=SOURCE)

    return call


def known(store, *digests):
    found = known_pairs(store, digest("t2"), digest("c1"), {"small": digests})["small"]
    return None if found is None else found["version"]


def test_nothing_is_known_of_an_empty_registry(store):
    assert known(store, PLAIN, WARM) is None


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
