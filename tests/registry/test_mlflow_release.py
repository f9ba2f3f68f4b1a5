from __future__ import annotations

import signal

import pytest

from draftsmith.errors import RegistryError
from draftsmith.registry.mlflow_release import release
from draftsmith.registry.mlflow_retention import prune
from draftsmith.registry.mlflow_store import PairStore
from tests.registry import dying
from tests.registry.small_pairs import CONFIG, digest


@pytest.fixture
def barred(stocked):
    """Versions 1 and 2 were champion; 2 was rolled back."""
    for version in ("1", "2"):
        stocked.promote(version, ["fine"])
    stocked.rollback(reason="slow", is_reachable=dying.always)
    return stocked


def records(store):
    return [(move.kind, move.predecessor, move.version) for move in store.history()[3:]]


def test_a_released_version_may_be_promoted_again_and_both_reasons_are_on_record(barred):
    item = release(barred.catalog, "2", reason="it was the disk")
    assert (item.pair.version, item.quarantine) == ("2", "slow")
    assert barred.resolve("2").state == "ok"
    assert barred.history()[-1].reason == "it was the disk; it was in quarantine for: slow"
    barred.promote("2", ["it was the disk"])
    assert records(barred) == [("release", None, "2"), ("promotion", "1", "2")]
    assert barred.predecessor().version == "1"


def test_a_release_moves_no_alias_and_makes_nobody_champion(barred):
    barred.quarantine("3", "bad")  # which never was champion
    release(barred.catalog, "3", reason="it is good")
    assert barred.champion().version == "1"
    assert [pair.version for pair in barred.incumbents(digest("t1"))] == []
    assert prune(barred.catalog, keep=4, dry_run=True).removed == ("3",)
    with pytest.raises(RegistryError, match="version 3, which never was champion"):
        barred.rollback("3", reason="slow", is_reachable=dying.always)


def test_a_version_that_nothing_bars_is_not_released(barred):
    with pytest.raises(RegistryError, match="no quarantine; its state is: ok"):
        release(barred.catalog, "1", reason="why not")
    with pytest.raises(RegistryError, match="resolving 9"):
        release(barred.catalog, "9", reason="why not")
    assert records(barred) == []


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_release_that_is_killed_at_any_write_is_true_to_the_tag(barred, root, number):
    names = ["create_run", "delete_model_version_tag", "set_terminated"]
    assert dying.run(root, "release", number) == -signal.SIGKILL
    assert dying.writes(root) == names[:number]
    store = PairStore(root, CONFIG)
    assert store.champion().version == "1"
    is_out = number == 3
    assert (store.resolve("2").quarantine is None) == is_out
    if is_out:
        with pytest.raises(RegistryError, match="no quarantine"):
            release(store.catalog, "2", reason=dying.REASON)
    else:
        release(store.catalog, "2", reason=dying.REASON)
    assert records(store) == [("release", None, "2")]
    store.promote("2", ["fine"])
    assert records(store) == [("release", None, "2"), ("promotion", "1", "2")]
    client = store.catalog.client
    experiment = store.catalog.experiment_id()
    assert client.search_runs([experiment], "attributes.status = 'RUNNING'") == []
