"""The benchmark of recipes: what it trains, keeps, and shows."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict

import pytest
import torch

from benchmarks import recipes
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
    monkeypatch.setattr(recipes, "RECIPES", SMALL)
    monkeypatch.setattr(recipes, "BATCH_SIZES", (1, 2))
    monkeypatch.setattr(recipes, "load_by_digest", lambda *_: loaded)


def run(project, tmp_path, *more):
    out = tmp_path / "recipes.json"
    work = ["--work", str(tmp_path / "work"), "--out", str(out)]
    arguments = ["--project", str(project), *work, "--steps", STEPS, "--recipes", *SMALL, *more]
    torch.manual_seed(0)
    return recipes.main(arguments), out


@pytest.mark.slow
def test_every_recipe_gets_its_line_and_nothing_is_trained_twice(project, tmp_path, capsys):
    status, out = run(project, tmp_path)
    assert status == 0
    report = read_json(out)
    assert set(report["recipes"]) == set(SMALL)
    for entry in report["recipes"].values():
        assert entry["losslessness"]
        assert set(entry["alpha"]) == {"0.0", "0.7"}
        assert entry["steps"] == int(STEPS)
    shown = capsys.readouterr().out
    assert "speedup, batch 1" in shown
    assert all(name in shown for name in SMALL)
    drafts = sorted((tmp_path / "work").glob("*/draft"))
    before = [read_manifest(folder).digest for folder in drafts]
    first = json.dumps(report["recipes"], sort_keys=True)
    assert run(project, tmp_path)[0] == 0
    assert [read_manifest(folder).digest for folder in drafts] == before
    assert json.dumps(read_json(out)["recipes"], sort_keys=True) == first


@pytest.mark.slow
def test_a_warm_start_goes_on_from_a_draft(project, tmp_path):
    assert run(project, tmp_path)[0] == 0
    (source,) = (tmp_path / "work").glob("student*/draft")
    arguments = ["--warm-start", str(source), "--recipes", "student"]
    assert run(project, tmp_path, *arguments)[0] == 0
    (warm,) = (tmp_path / "work").glob("student*-warm/draft")
    facts = read_manifest(warm).training["started_from"]
    assert facts["draft_digest"] == read_manifest(source).digest
