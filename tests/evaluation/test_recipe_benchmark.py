"""The benchmark of recipes: what it trains, keeps, and shows."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import asdict

import pytest
import torch

from benchmarks import recipe_rows, recipes
from benchmarks.recipe_table import ALL
from draftsmith.artifacts import read_json, write_json
from draftsmith.config import write_config
from draftsmith.corpus.dataset import write_corpus
from draftsmith.drafts.manifest import read_manifest
from draftsmith.drafts.settings import EagleConfig, StudentConfig
from tests.distillation.small_training import make_config
from tests.evaluation.test_benchmark import CONFIG as BENCHMARK
from tests.evaluation.test_record import CONFIG as EVALUATION

SMALL = {
    "student": StudentConfig("student", (0, -1), 36),
    "eagle": EagleConfig("eagle", (), 36, 2, 0.8),
}
STEPS = "6"


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
    sections = {
        "distill": asdict(make_config(steps=20)),
        "evaluation": asdict(dataclasses.replace(EVALUATION, decoding_prompts=8, draft_length=3)),
        "benchmark": asdict(BENCHMARK),
    }
    write_config(root / "build/config.yaml", sections)
    return root


@pytest.fixture(autouse=True)
def small(monkeypatch, loaded):
    monkeypatch.setattr(recipe_rows, "RECIPES", SMALL)
    monkeypatch.setattr(recipes, "BATCH_SIZES", (1, 2))
    monkeypatch.setattr(recipes, "load_by_digest", lambda *_: loaded)


def run(project, tmp_path, *more, rows=tuple(SMALL)):
    out = tmp_path / "recipes.json"
    work = ["--work", str(tmp_path / "work"), "--out", str(out)]
    arguments = ["--project", str(project), *work, "--steps", STEPS, "--recipes", *rows, *more]
    torch.manual_seed(0)
    return recipes.main(arguments), out


def drafts_of(tmp_path, kind):
    return sorted((tmp_path / "work").glob(f"{kind}*/draft"))


@pytest.mark.slow
def test_every_recipe_gets_its_line_and_nothing_is_trained_twice(project, tmp_path, capsys):
    status, out = run(project, tmp_path)
    assert status == 0
    report = read_json(out)
    assert set(report["recipes"]) == set(SMALL)
    assert set(report["prompt_lookup"]) == {"1", "2"}
    assert report["prompt_lookup"]["1"]["tau"] >= 1
    for entry in report["recipes"].values():
        assert entry["losslessness"]
        assert set(entry["alpha"]) == {"0.0", "0.7"}
        assert entry["steps"] == int(STEPS)
        assert entry["training_s"] > 0
        assert entry["predicted_tokens"] > 0
        assert entry["break_even_alpha"] is None or 0 < entry["break_even_alpha"] <= 1
    (change,) = report["alpha_changes"].values()
    for temperature, alpha in report["recipes"]["eagle"]["alpha"].items():
        assert change[temperature][ALL]["proposed"] == pytest.approx(alpha["mean"])
        assert set(change[temperature]) == {ALL, *alpha["by_domain"]}
    assert report["settings"]["distill"]["steps"] == int(STEPS)
    shown = capsys.readouterr().out
    assert "speedup, batch 1" in shown
    assert all(name in shown for name in ("prompt lookup", *SMALL))
    before = [read_manifest(folder).digest for folder in drafts_of(tmp_path, "")]
    first = json.dumps(report["recipes"], sort_keys=True)
    assert run(project, tmp_path)[0] == 0
    assert [read_manifest(folder).digest for folder in drafts_of(tmp_path, "")] == before
    assert json.dumps(read_json(out)["recipes"], sort_keys=True) == first


@pytest.mark.slow
def test_a_warm_start_goes_on_from_a_draft_beside_rows_that_do_not(project, tmp_path):
    assert run(project, tmp_path, rows=["student"])[0] == 0
    (source,) = drafts_of(tmp_path, "student")
    rows = ["student@4", "warm student@4"]
    status, out = run(project, tmp_path, "--warm-start", str(source), rows=rows)
    assert status == 0
    assert [entry["steps"] for entry in read_json(out)["recipes"].values()] == [4, 4]
    (cold,) = set(drafts_of(tmp_path, "student")) - {source}
    assert "started_from" not in read_manifest(cold).training
    (warm,) = drafts_of(tmp_path, "warm-student")
    facts = read_manifest(warm).training["started_from"]
    assert read_json(out)["recipes"]["warm student@4"]["started_from"] == facts
    assert facts["draft_digest"] == read_manifest(source).digest


@pytest.mark.slow
def test_a_domain_that_is_left_out_is_not_trained_on(project, tmp_path, rollouts):
    domain = sorted({rollout.domain for rollout in rollouts})[0]
    status, out = run(project, tmp_path, rows=["student", f"student without {domain}"])
    assert status == 0
    whole, without = (read_manifest(folder) for folder in drafts_of(tmp_path, "student"))
    assert whole.corpus_digest != without.corpus_digest
    assert whole.recipe_digest == without.recipe_digest
    tokens = [draft.training["predicted_tokens"] for draft in (whole, without)]
    assert tokens[0] != tokens[1]
    for entry in read_json(out)["recipes"].values():
        assert domain in entry["alpha"]["0.0"]["by_domain"]


@pytest.mark.slow
def test_a_draft_of_the_project_that_was_trained_alike_is_taken_over(project, tmp_path, caplog):
    assert run(project, tmp_path, rows=["student"])[0] == 0
    (source,) = drafts_of(tmp_path, "student")
    shutil.copytree(source, project / "models/drafts/any")
    caplog.set_level("INFO")
    status, out = run(project, tmp_path / "again", rows=["student"])
    shutil.rmtree(project / "models/drafts")
    assert status == 0
    assert "state=taken_over" in caplog.text
    assert read_json(out)["recipes"]["student"]["training_s"] is None


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (["medusa"], "student; eagle"),
        (["student@0"], "student; eagle"),
        (["warm student"], "--warm-start"),
        (["student without fishing"], "a domain of the corpus"),
    ],
)
def test_a_row_that_cannot_be_is_refused(project, tmp_path, capsys, rows, named):
    assert run(project, tmp_path, rows=rows)[0] == 2
    assert named in capsys.readouterr().err
    assert not drafts_of(tmp_path, "")
