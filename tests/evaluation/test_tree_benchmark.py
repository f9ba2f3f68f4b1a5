"""`python -m benchmarks.trees` on tiny pairs: what is measured, not what it comes to."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import asdict

import pytest

from benchmarks import tree_sweep, trees
from draftsmith.artifacts import read_json, write_json
from draftsmith.config import write_config
from draftsmith.corpus.dataset import write_corpus
from draftsmith.decoding import Tree
from draftsmith.drafts.manifest import FILE_NAME
from draftsmith.errors import CorpusError, DraftError
from tests.evaluation.test_record import CONFIG


@pytest.fixture(scope="module")
def project(loaded, rollouts, tmp_path_factory):
    """A folder whose corpus stage has run."""
    root = tmp_path_factory.mktemp("project")
    write_corpus(
        root / "data/corpus",
        {"train": rollouts, "eval": rollouts},
        {"digest": "c" * 64, "target_digest": loaded.identity.digest},
    )
    write_json(root / "build/target.json", {"digest": loaded.identity.digest})
    write_config(root / "build/config.yaml", {"evaluation": asdict(CONFIG)})
    return root


@pytest.fixture
def run(project, draft_folders, loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(tree_sweep, "BATCH_SIZES", (1, 2))
    monkeypatch.setattr(tree_sweep, "NODES", (2, 3, 4))
    monkeypatch.setattr(trees, "load_by_digest", lambda *_: loaded)
    places = ["--project", str(project), "--work", str(tmp_path / "work")]
    drafts = [f"{name}={draft_folders[name]}" for name in ("whole", "trimmed")]

    def start():
        out = tmp_path / "trees.json"
        options = ["--drafts", *drafts, "--budget", "0", "--out", str(out)]
        assert trees.main([*places, *options], tokens=4) == 0
        return read_json(out)["drafts"]

    return start


@pytest.mark.slow
def test_chains_and_trees_are_measured_at_every_batch_size(run, capsys):
    entry = run()["trimmed"]
    text = capsys.readouterr().out
    for rows, batch in zip((1, 2), entry["batches"], strict=True):
        assert batch["batch_size"] == rows
        assert {"chain 1", "chain 2"} < set(batch["arms"])
        assert batch["best_chain"] in ("chain 1", "chain 2")
        assert batch["over_chain"].keys() == batch["arms"].keys() - {"chain 1", "chain 2"}
        for name, arm in batch["arms"].items():
            assert 1 <= arm["tau"] <= 1 + arm["depth"]
            assert 1 < arm["expected_tau"] <= 1 + arm["depth"]
            assert arm["verify_ms"] == batch["costs"]["verify_ms"][str(arm["nodes"] + 1)]
            assert arm["speedup"]["mean"] > 0
            is_tree = name in batch["over_chain"]
            assert bool(arm["tree"]) is is_tree
            kinds = {"chain", "tree", "moved"} if is_tree else set()
            assert set(arm["alone_ms"] or ()) == kinds
        assert f"batch {rows}: trees " in text
    assert entry["sampled"]["best_tree"] == entry["batches"][0]["best_tree"]
    assert entry["sampled"]["arms"][entry["sampled"]["best_tree"]]["tau"] >= 1
    assert "temperature 0.7, batch 1: tree" in text


@pytest.mark.slow
def test_a_draft_that_never_errs_gets_what_is_expected_of_its_chains_and_no_tree(run):
    for batch in run()["whole"]["batches"]:
        for length, name in enumerate(("chain 1", "chain 2"), start=1):
            assert batch["arms"][name]["tau"] == batch["arms"][name]["expected_tau"] == 1 + length
        assert batch["best_tree"] is None


@pytest.mark.slow
def test_what_was_measured_is_not_measured_again(run, monkeypatch):
    first = run()
    for name in ("take_turns", "forward_costs", "decode"):
        monkeypatch.delattr(tree_sweep, name)
    assert run() == first


def batch_of(rows, **over):
    """`batch_of(1, tree_4=1.1)`: how fast trees are beside the best chain."""
    names = {name: name.replace("_", " ") for name in over}
    ratios = {names[name]: {"mean": x, "low": x, "high": x} for name, x in over.items()}
    return {
        "batch_size": rows,
        "best_chain": "chain 1",
        "best_tree": max(ratios, key=lambda name: ratios[name]["mean"], default=None),
        "over_chain": ratios,
        "arms": {name: {"nodes": int(name.split()[1])} for name in ratios},
    }


def test_the_largest_tree_and_batch_that_pay_are_named():
    batches = [
        batch_of(1, tree_12=0.9, tree_2=1.1, tree_4=1.2),
        batch_of(4, tree_2=1.01, tree_4=0.9),
        batch_of(16, tree_2=0.8),
    ]
    lines = trees.verdict(batches).splitlines()
    assert lines[0] == (
        "batch 1: trees pay up to 4 nodes beside chain 1; tree 4: 1.20 (1.20 to 1.20) of it"
    )
    assert "up to 2 nodes" in lines[1]
    assert "do not pay" in lines[2]
    assert lines[3] == "trees pay up to batch 4"
    assert trees.verdict([batch_of(1)]).endswith("at no batch size")


@pytest.mark.parametrize(
    ("parents", "moves"),
    [
        ((0, 0, 2), [(0, 12, 11), (0, 13, 12), (1, 12, 11), (1, 13, 12)]),
        ((0, 1, 0), [(0, 13, 11), (1, 13, 11)]),
        ((0, 1), []),
    ],
)
def test_the_path_that_moves_farthest_moves_in_every_row(parents, moves):
    assert tree_sweep.farthest_moves(Tree(parents), rows=2, context=10) == moves


class TestWhichDrafts:
    def test_those_of_the_target_each_once(self, draft_folders, loaded, tmp_path):
        for place, name in (
            ("models/drafts/first", "student"),
            ("models/champions/a/draft", "student"),
            ("models/champions/b/draft", "trimmed"),
            ("models/champions/c/draft", "random"),
        ):
            shutil.copytree(draft_folders[name], tmp_path / place)
        (tmp_path / "models/drafts/README.md").write_text("no draft")
        other = tmp_path / "models/champions/c/draft" / FILE_NAME
        write_json(other, read_json(other) | {"target_digest": "f" * 64})
        assert trees.drafts_of(tmp_path, loaded.identity.digest) == {
            "student": tmp_path / "models/drafts/first",
            "trimmed": tmp_path / "models/champions/b/draft",
        }

    def test_two_of_one_recipe_have_names_of_their_own(self, draft_folders, loaded, tmp_path):
        for place, name in (("first", "student"), ("second", "trimmed")):
            shutil.copytree(draft_folders[name], tmp_path / "models/drafts" / place)
        second = tmp_path / "models/drafts/second" / FILE_NAME
        write_json(second, read_json(second) | {"recipe": "student"})
        first, other = trees.drafts_of(tmp_path, loaded.identity.digest)
        assert (first, other[:8]) == ("student", "student ")

    def test_none_is_an_error(self, tmp_path):
        with pytest.raises(DraftError, match="--drafts"):
            trees.drafts_of(tmp_path, "a" * 64)

    def test_names_come_with_folders(self, capsys):
        with pytest.raises(SystemExit):
            trees.main(["--drafts", "somewhere"])
        assert "NAME=FOLDER" in capsys.readouterr().err


def test_prompts_are_those_with_long_greedy_answers(rollouts):
    found = trees.long_enough(rollouts, CONFIG)
    greedy = [r for r in rollouts if r.temperature == 0]
    long = [r.prompt_ids for r in greedy if len(r.response_ids) >= CONFIG.max_new_tokens]
    assert sorted(found) == sorted(long)
    endless = dataclasses.replace(CONFIG, max_new_tokens=1000)
    with pytest.raises(CorpusError, match="0 eval prompts"):
        trees.long_enough(rollouts, endless)
