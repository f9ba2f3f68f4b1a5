from __future__ import annotations

import signal

import pytest
from mlflow import MlflowClient

from draftsmith.errors import PromotionRefusedError, RegistryError
from tests.registry.small_pairs import CONFIG, digest, start_child


def always(_):
    return True


def client_of(root):
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    return client, client.get_experiment_by_name(CONFIG.experiment).experiment_id


def moves(root):
    client, experiment = client_of(root)
    runs = client.search_runs([experiment], "tags.sequence != ''")
    runs = sorted(runs, key=lambda run: int(run.data.tags["sequence"]))
    return [
        (
            run.data.tags["kind"],
            run.data.tags["predecessor"] or None,
            run.data.tags["version"],
            run.info.status,
        )
        for run in runs
    ]


def promote(store, *versions):
    for version in versions:
        store.promote(version, ["all checks passed"])


def test_a_promotion_moves_the_alias_and_is_recorded(root, stocked):
    assert stocked.promote("1", ["all checks passed"]) is None
    assert stocked.champion().version == "1"
    assert stocked.predecessor() is None
    assert stocked.promote("2", ["faster"]) == "1"
    assert stocked.champion().version == "2"
    assert stocked.predecessor().version == "1"
    assert moves(root) == [
        ("promotion", None, "1", "FINISHED"),
        ("promotion", "1", "2", "FINISHED"),
    ]


def test_promoting_the_champion_again_changes_nothing(root, stocked):
    promote(stocked, "1", "2")
    assert stocked.promote("2", ["again"]) == "1"
    assert len(moves(root)) == 2


def test_going_back_to_an_older_pair_is_a_promotion_of_its_own(root, stocked):
    promote(stocked, "1", "2", "1")
    assert stocked.champion().version == "1"
    assert stocked.predecessor().version == "2"
    assert len(moves(root)) == 3


def test_a_version_that_does_not_exist_is_not_promoted(root, stocked):
    promote(stocked, "1")
    with pytest.raises(RegistryError, match="resolving 9"):
        stocked.promote("9", [])
    assert stocked.champion().version == "1"
    assert len(moves(root)) == 1


def test_a_version_in_quarantine_is_not_promoted(stocked):
    stocked.quarantine("1", "slow")
    stocked.quarantine("1", "another reason")
    with pytest.raises(RegistryError, match="quarantine: slow"):
        stocked.promote("1", [])
    assert stocked.champion() is None


def test_a_damaged_version_is_not_promoted(stocked):
    stocked.set_damage("1", "draft/ is gone")
    with pytest.raises(PromotionRefusedError, match="draft/ is gone"):
        stocked.promote("1", [])
    assert stocked.champion() is None


def test_a_draft_whose_traffic_raised_an_alarm_is_not_promoted_unless_somebody_answers_for_it(
    stocked,
):
    promote(stocked, "1", "2")
    stocked.set_live_drift("2", "alarm")
    promote(stocked, "1")
    for overridden in ((), ("speedup",)):
        with pytest.raises(PromotionRefusedError, match="live-drift"):
            stocked.promote("2", [], overridden=overridden)
    assert stocked.promote("2", [], overridden=("drift",)) == "1"


def test_who_was_judged_against_another_champion_is_not_promoted(stocked):
    assert stocked.promote("1", [], against=None) is None
    with pytest.raises(PromotionRefusedError, match="version 1 as champion.*against none"):
        stocked.promote("3", [], against=None)
    assert stocked.promote("2", [], against="1") == "1"
    with pytest.raises(PromotionRefusedError, match="version 2 as champion.*against version 1"):
        stocked.promote("3", [], against="1")
    assert stocked.champion().version == "2"
    # Once it is champion, a repeat of the run that made it so changes nothing.
    assert stocked.promote("2", [], against="1") == "1"


def test_a_promotion_killed_before_the_alias_never_happened(root, store):
    killed = start_child(root, "set_registered_model_alias")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert store.champion() is None
    assert store.incumbents(digest("other")) == []
    store.promote("1", ["rerun"])
    assert moves(root) == [
        ("promotion", None, "1", "KILLED"),
        ("promotion", None, "1", "FINISHED"),
    ]


def test_a_promotion_killed_after_the_alias_is_completed(root, stocked):
    """The second record is left as by a process that dies before it could finish it."""
    promote(stocked, "1", "2")
    client, experiment = client_of(root)
    (run,) = client.search_runs([experiment], "tags.sequence = '2'")
    client.update_run(run.info.run_id, status="RUNNING")
    assert stocked.predecessor().version == "1"
    assert stocked.promote("2", ["rerun"]) == "1"
    assert moves(root)[-1] == ("promotion", "1", "2", "FINISHED")


def test_an_alias_that_another_writer_takes_is_noticed(stocked):
    original = MlflowClient.set_registered_model_alias

    def contended(client, name, alias, version):
        original(client, name, alias, version)
        original(client, name, alias, "4")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MlflowClient, "set_registered_model_alias", contended)
        with pytest.raises(RegistryError, match="version 4 after the move"):
            stocked.promote("1", [])


def test_the_challenger_is_what_was_set_last(stocked):
    stocked.set_challenger("1")
    stocked.set_challenger("3")
    assert stocked.challenger().version == "3"
    assert stocked.champion() is None


def test_the_incumbent_is_the_newest_promoted_pair_of_another_target(stocked):
    promote(stocked, "1")
    assert stocked.incumbents(digest("t1")) == []
    assert stocked.incumbents(digest("t2"))[0].version == "1"
    promote(stocked, "2")
    assert stocked.incumbents(digest("t2"))[0].version == "1"
    assert stocked.incumbents(digest("t1"))[0].version == "2"
    assert stocked.incumbents(digest("t3"))[0].version == "2"
    stocked.quarantine("2", "slow")
    assert stocked.incumbents(digest("t3"))[0].version == "1"


def test_a_rollback_changes_no_incumbent_but_the_one_that_it_bars(stocked):
    """Recipes that are not known start from the incumbent: another one may train them again."""
    promote(stocked, "1", "2", "3")
    before = stocked.incumbents(digest("t3"))
    assert [pair.version for pair in before] == ["2", "1"]
    stocked.rollback("1", reason="slow", is_reachable=always)
    assert stocked.incumbents(digest("t3")) == before
    assert [pair.version for pair in stocked.incumbents(digest("t9"))] == ["2", "1"]


def test_a_rollback_moves_back_and_bars_the_bad_version(root, stocked):
    promote(stocked, "1", "2")
    assert stocked.rollback(reason="slow", is_reachable=always).champion.version == "1"
    assert stocked.champion().version == "1"
    assert stocked.resolve("2").quarantine == "slow"
    assert moves(root)[-1] == ("rollback", "2", "1", "FINISHED")
    with pytest.raises(RegistryError, match="quarantine: slow"):
        promote(stocked, "2")
    assert stocked.predecessor() is None


def test_a_rollback_quarantines_before_it_moves(root, stocked):
    promote(stocked, "1", "2")
    killed = start_child(root, "set_registered_model_alias", action="rollback")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert stocked.champion().version == "2"
    assert stocked.resolve("2").quarantine == "slow"
    assert stocked.rollback(reason="again", is_reachable=always).champion.version == "1"
    assert stocked.resolve("2").quarantine == "slow"


def test_a_long_reason_is_cut_in_the_record_and_hinders_no_rollback(root, stocked):
    """Databases refuse a longer tag of a run, when the version is in quarantine already."""
    promote(stocked, "1", "2")
    reason = "slow " * 4000
    assert stocked.rollback(reason=reason, is_reachable=always).champion.version == "1"
    recorded = stocked.history()[-1].reason
    assert len(recorded) == 8000
    assert recorded == f"{reason[:7999]}…"
    assert stocked.resolve("2").quarantine == reason


def test_the_rerun_of_a_cut_rollback_with_a_long_reason_is_known_for_one(root, stocked):
    promote(stocked, "1", "2", "3")
    reason = "slow " * 4000
    stocked.rollback(reason=reason, is_reachable=always)
    client, experiment = client_of(root)
    (run,) = client.search_runs([experiment], "tags.sequence = '4'")
    client.update_run(run.info.run_id, status="RUNNING")  # as if it had died before the end
    done = stocked.rollback(reason=reason, is_reachable=always)
    assert (done.is_completion, done.champion.version) == (True, "2")


def test_a_rollback_skips_what_cannot_be_served(stocked):
    promote(stocked, "1", "2", "3", "4")
    stocked.quarantine("3", "bad")
    done = stocked.rollback(reason="slow", is_reachable=lambda item: item.pair.version == "1")
    assert done.champion.version == "1"


def test_a_rollback_passes_over_a_draft_whose_traffic_raised_an_alarm_while_it_can(stocked):
    promote(stocked, "1", "2", "3")
    stocked.set_live_drift("2", "alarm")
    assert stocked.rollback(reason="slow", is_reachable=always).champion.version == "1"
    last = stocked.rollback(reason="slow too", is_reachable=always).champion
    assert (last.version, last.live_drift) == ("2", True)


def test_a_rollback_passes_over_a_version_that_is_marked_as_damaged(stocked):
    promote(stocked, "1", "2", "3")
    stocked.set_damage("2", "draft/ is gone")
    assert stocked.rollback(reason="slow", is_reachable=always).champion.version == "1"
    with pytest.raises(RegistryError, match="damaged .draft/ is gone"):
        stocked.rollback("2", reason="slow", is_reachable=always)
    stocked.set_damage("2", None)
    assert stocked.rollback("2", reason="slow", is_reachable=always).champion.version == "2"


def test_a_rollback_goes_to_the_version_that_is_named(stocked):
    promote(stocked, "1", "2", "3")
    assert stocked.rollback("1", reason="slow", is_reachable=always).champion.version == "1"
    assert stocked.rollback("2", reason="slow too", is_reachable=always).champion.version == "2"
    assert stocked.resolve("1").quarantine == "slow too"


def test_rollbacks_go_further_back_each_time(stocked):
    promote(stocked, "1", "2", "3")
    assert stocked.rollback(reason="slow", is_reachable=always).champion.version == "2"
    assert stocked.rollback(reason="slow", is_reachable=always).champion.version == "1"
    with pytest.raises(RegistryError, match="version 3 is in quarantine"):
        stocked.rollback(reason="slow", is_reachable=always)


def test_a_rollback_past_a_good_version_can_be_taken_forward_again(stocked):
    promote(stocked, "1", "2", "3")
    first = stocked.rollback("1", reason="slow", is_reachable=always)
    assert (first.champion.version, first.quarantined) == ("1", "3")
    again = stocked.rollback(reason="slow", is_reachable=always)
    assert (again.champion.version, again.quarantined) == ("2", "1")


def test_a_rollback_takes_an_alias_and_says_why_a_version_will_not_do(stocked):
    promote(stocked, "1", "2")
    stocked.set_challenger("1")
    with pytest.raises(RegistryError, match="version 4, which never was champion"):
        stocked.rollback("4", reason="slow", is_reachable=always)
    assert stocked.rollback("@challenger", reason="slow", is_reachable=always).quarantined == "2"
    assert stocked.champion().version == "1"


def test_two_people_who_roll_back_the_same_version_move_once(root, stocked):
    promote(stocked, "1", "2", "3")
    options = {"leaving": "3", "is_reachable": always}
    assert stocked.rollback(reason="slow", **options).champion.version == "2"
    with pytest.raises(RegistryError, match="version 2 as champion"):
        stocked.rollback(reason="answers are slow", **options)
    with pytest.raises(RegistryError, match="resolving 9"):
        stocked.rollback(reason="slow", leaving="9", is_reachable=always)
    assert (stocked.champion().version, stocked.resolve("2").quarantine) == ("2", None)
    assert len(moves(root)) == 4


def test_a_cut_rollback_is_told_from_the_next_one_by_the_version_that_is_to_go(root, stocked):
    promote(stocked, "1", "2", "3")
    stocked.rollback(reason="slow", is_reachable=always)
    client, experiment = client_of(root)
    (run,) = client.search_runs([experiment], "tags.sequence = '4'")
    for leaving, champion, is_completion in (("3", "2", True), ("2", "1", False)):
        client.update_run(run.info.run_id, status="RUNNING")  # as if it had died before the end
        done = stocked.rollback(reason="slow", leaving=leaving, is_reachable=always)
        assert (done.champion.version, done.is_completion) == (champion, is_completion)


def test_a_rollback_with_nowhere_to_go_changes_nothing(root, stocked):
    with pytest.raises(RegistryError, match="no champion"):
        stocked.rollback(reason="slow", is_reachable=always)
    promote(stocked, "1")
    for to, what in ((None, "no other version"), ("1", "is champion"), ("9", "resolving 9")):
        with pytest.raises(RegistryError, match=what):
            stocked.rollback(to, reason="slow", is_reachable=always)
    assert stocked.champion().version == "1"
    assert stocked.resolve("1").quarantine is None
    assert len(moves(root)) == 1


def test_a_rollback_names_the_target_that_cannot_be_reached(stocked):
    promote(stocked, "1", "2")
    with pytest.raises(RegistryError, match=f"target .{digest('t1')[:16]}. cannot be loaded"):
        stocked.rollback(reason="slow", is_reachable=lambda item: False)
    assert stocked.champion().version == "2"
    assert stocked.resolve("2").quarantine is None
