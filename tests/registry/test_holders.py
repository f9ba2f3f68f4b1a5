from __future__ import annotations

import pytest

from draftsmith.errors import DamagedPairError
from draftsmith.registry.holders import fetch_holders, first_intact
from tests.registry.small_pairs import digest


@pytest.fixture
def served(stocked):
    """Versions 1, 2 and 3 were champion, in this order."""
    for version in ("1", "2", "3"):
        stocked.promote(version, ["fine"])
    return stocked


def test_the_holders_are_told_with_history_and_alarms(served, tmp_path):
    served.set_live_drift("2", "alarm")
    served.quarantine("1", "slow")
    held = fetch_holders(served, tmp_path / "pairs")
    assert (held["champion"].version, held["predecessor"].version) == ("3", "2")
    assert held["history"] == ["1", "2", "3"]
    assert held["tagged"] == {digest("d2"): "2"}
    assert held["quarantined"] == {served.resolve("1").pair.pair_digest: "1"}
    assert len(list((tmp_path / "pairs").iterdir())) == 2


def test_an_empty_registry_has_no_holders(store, tmp_path):
    held = fetch_holders(store, tmp_path)
    nobody = {"champion": None, "predecessor": None, "history": []}
    assert held == nobody | {"tagged": {}, "quarantined": {}}


def test_a_damaged_pair_may_be_registered_again_free_of_its_quarantine(
    served, register, tmp_path, damage
):
    served.quarantine("1", "slow")
    damage(served, "1")
    served.set_damage("1", "draft/ changed")
    version = register("t1", "d1")
    assert version != "1"
    assert served.resolve(version).quarantine is None
    assert fetch_holders(served, tmp_path / "pairs")["quarantined"] == {}


def test_a_damaged_predecessor_is_marked_and_done_without(served, tmp_path, damage):
    damage(served, "2")
    for folder in ("first", "second"):
        held = fetch_holders(served, tmp_path / folder)
        assert (held["champion"].version, held["predecessor"]) == ("3", None)
        assert "draft/" in served.resolve("2").state


def test_a_damaged_champion_is_an_error_and_is_marked(served, tmp_path, damage):
    damage(served, "3")
    for folder in ("first", "second"):
        with pytest.raises(DamagedPairError, match="version 3"):
            fetch_holders(served, tmp_path / folder)
        assert "draft/" in served.resolve("3").state
    done = served.rollback(reason="damaged", is_reachable=lambda item: True)
    assert done.champion.version == "2"


def test_the_first_intact_incumbent_is_taken(served, tmp_path, damage):
    damage(served, "2")
    found = first_intact(served, served.incumbents(digest("t3")), tmp_path)
    assert found.version == "1"
    assert [pair.version for pair in served.incumbents(digest("t3"))] == ["1"]
