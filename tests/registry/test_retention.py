"""What pruning deletes, on a real registry, and what it never does."""

from __future__ import annotations

import json

import pytest
from mlflow.exceptions import MlflowException
from typer.testing import CliRunner

from draftsmith.artifacts import write_json, write_text
from draftsmith.cli import app
from draftsmith.registry.local_copies import num_bytes, superfluous_copies
from draftsmith.registry.mlflow_retention import prune
from draftsmith.registry.pair import LIVE_DRIFT_TAG, PairVersion, RegisteredPair
from draftsmith.registry.retention import retention
from tests.registry.small_pairs import digest, make_record

SECTION = "registry:\n  name: demo\n  experiment: draftsmith\n  include_target: false\n"


def version(number, *, aliases=(), quarantine=None, live_drift=False, damage=None):
    tags = make_record(draft=number).tags() | ({LIVE_DRIFT_TAG: "fell"} if live_drift else {})
    pair = RegisteredPair.from_tags("demo", number, tags)
    return PairVersion(pair, aliases, tags, "2026-03-01T00:00:00+00:00", quarantine, damage)


def promote(store, *versions):
    for number in versions:
        store.promote(number, ["all checks passed"])


def removed(versions, moved, keep):
    return list(retention(versions, moved, keep=keep).removed)


def test_the_last_champions_stay():
    versions = [version(str(n)) for n in range(1, 6)]
    assert removed(versions, ["1", "2", "4"], 2) == ["1", "3"]
    assert removed(versions, ["1", "2", "4", "1"], 2) == ["2", "3"]
    assert removed(versions, ["1", "2", "4"], 3) == ["3"]


def test_who_cannot_be_champion_again_takes_no_place_among_them():
    versions = [version("1"), version("2"), version("3", quarantine="slow"), version("4")]
    assert removed([item for item in versions if item.pair.version != "1"], ["1", "2"], 2) == []
    for bar in ({"quarantine": "slow"}, {"live_drift": True}, {"damage": "draft/ is gone"}):
        versions[2] = version("3", **bar)
        gone = ["3"] if "damage" in bar else []  # which nothing keeps out, nor can serve
        assert removed(versions, ["1", "2", "3", "2"], 2) == gone


def test_aliases_bars_and_the_newest_keep_a_version():
    versions = [
        version("1"),
        version("2", aliases=("champion",)),
        version("3", quarantine="slow"),
        version("4", live_drift=True),
        version("5", aliases=("canary",)),
        version("6"),
        version("7"),
    ]
    decided = retention(versions, [], keep=1)
    assert decided.removed == ("1", "6")
    assert decided.kept["2"] == "@champion"
    assert "slow" in decided.kept["3"]
    assert "live-drift" in decided.kept["4"]
    assert decided.kept["7"] == "the newest version"
    assert retention([], [], keep=3).removed == ()


def test_pruning_deletes_versions_and_keeps_the_history_and_the_way_back(stocked):
    promote(stocked, "1", "2", "3", "4")
    history = stocked.history()
    client = stocked.catalog.client
    model = client.get_model_version("demo", "1").source.rpartition("/")[2]
    assert client.get_logged_model(model).model_id == model
    planned = prune(stocked.catalog, keep=2, dry_run=True)
    assert len(stocked.versions()) == 4
    assert prune(stocked.catalog, keep=2, dry_run=False) == planned
    assert planned.removed == ("1", "2")
    assert [item.pair.version for item in stocked.versions()] == ["3", "4"]
    assert stocked.history() == history
    with pytest.raises(MlflowException):
        client.get_logged_model(model)
    assert prune(stocked.catalog, keep=2, dry_run=False).removed == ()
    assert stocked.rollback(reason="slow", is_reachable=lambda _: True).champion.version == "3"


def test_a_damaged_version_does_not_take_the_place_of_the_only_way_back(stocked):
    promote(stocked, "1", "2", "3")
    stocked.set_damage("2", "draft/ is gone")
    assert "1" not in prune(stocked.catalog, keep=2, dry_run=False).removed
    assert stocked.rollback(reason="slow", is_reachable=lambda _: True).champion.version == "1"


def test_a_pruned_pair_can_be_registered_again(stocked, register):
    promote(stocked, "1", "2")
    prune(stocked.catalog, keep=1, dry_run=False)
    assert stocked.find(make_record("t1", "d1").digest) is None
    number = register("t1", "d1")
    assert stocked.find(make_record("t1", "d1").digest).version == number
    promote(stocked, number)


class TestCopies:
    @pytest.fixture
    def project(self, root, stocked):
        """Champion 2 and newest 4; copies of the pairs 1 and 2, of a stranger and of targets."""
        write_text(root / "build" / "config.yaml", SECTION)
        write_json(root / "build" / "target.json", {"digest": digest("current")})
        promote(stocked, "2")
        for number in ("1", "2"):
            stocked.fetch(stocked.resolve(number).pair, root / "models" / "champions")
        stranger = root / "models" / "champions" / digest("stranger")[:16]
        write_json(stranger / "origin.json", {"name": "other", "version": "1"})
        write_json(stranger / "pair.json", {"target": {"digest": digest("t8")}})
        for target in ("t1", "t2", "t3", "t8", "t9", "current"):
            folder = root / "models" / "targets" / digest(target)[:16]
            write_text(folder / "model.safetensors", "weights")
        write_text(root / "models" / "targets" / ".resolved.json", "{}")
        return root

    def run(self, root, *arguments):
        command = ["prune", "--keep", "2", *arguments, "--root", str(root)]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        return done.stdout

    def left(self, root, kind):
        return {path.name for path in (root / "models" / kind).iterdir()}

    def test_copies_go_with_their_versions_and_no_others(self, project):
        data = json.loads(self.run(project, "--json"))
        assert data["removed"] == ["1", "3"]
        pairs = {make_record("t2", "d2").digest, digest("stranger")}
        assert self.left(project, "champions") == {name[:16] for name in pairs}
        kept = {digest(name)[:16] for name in ("t2", "t3", "t8", "current")}
        assert self.left(project, "targets") == kept | {".resolved.json"}
        assert data["bytes"] > 0

    def test_a_dry_run_says_the_same_and_changes_nothing(self, project):
        before = [self.left(project, kind) for kind in ("champions", "targets")]
        planned = json.loads(self.run(project, "--dry-run", "--json"))
        assert [self.left(project, kind) for kind in ("champions", "targets")] == before
        done = json.loads(self.run(project, "--json"))
        assert planned == done | {"dry_run": True}
        text = self.run(project)
        assert "kept     version 2: @champion" in text
        assert "0 versions and 0 copies" in text

    def test_of_a_link_only_the_link_goes(self, project):
        checkpoint = project / "checkpoint"
        write_text(checkpoint / "model.safetensors", "weights")
        link = project / "models" / "targets" / digest("t7")[:16]
        link.symlink_to(checkpoint, target_is_directory=True)
        self.run(project)
        assert not link.is_symlink()
        assert (checkpoint / "model.safetensors").read_text() == "weights"

    def test_without_a_current_target_no_snapshot_is_touched(self, project, stocked):
        (project / "build" / "target.json").unlink()
        copies = superfluous_copies(project, "demo", [stocked.resolve("2").pair])
        assert [path.parent.name for path in copies] == ["champions"]
        assert num_bytes(copies) > 0
