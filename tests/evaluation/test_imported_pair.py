"""Imported drafts are evaluated like any other."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from draftsmith.artifacts import write_json
from draftsmith.cli import app
from draftsmith.config import load_value
from draftsmith.distillation.imported import import_checkpoint, take_over
from draftsmith.drafts.settings import CheckpointConfig
from draftsmith.evaluation.any_pair import load_any_draft
from draftsmith.evaluation.record import Evaluator
from draftsmith.evaluation.settings import EvaluationConfig
from draftsmith.serving.eagle3 import write_head
from draftsmith.targets.resolved import TARGETS
from draftsmith.targets.snapshot import keep_copy
from tests.decoding.heads import fitted_head

CONFIG = EvaluationConfig(
    decoding_prompts=4,
    draft_length=2,
    guesses=(3, 2),
    guess_prompts=6,
    lookup_length=3,
    temperatures=(0.0,),
    max_new_tokens=8,
    batch_size=4,
    exact_prompts=2,
    near_tie_prompts=2,
    self_test_tokens=8,
    seed=0,
)


def test_the_target_as_its_own_imported_draft_is_always_accepted(
    loaded, checkpoint, rollouts, stop_ids, tmp_path
):
    recipe = import_checkpoint(checkpoint, "itself", root=tmp_path, target=loaded.identity)
    folder = tmp_path / "drafts" / "itself"
    manifest = take_over(recipe, loaded.identity, folder, root=tmp_path)
    evaluator = Evaluator(CONFIG, loaded.model, loaded.identity, rollouts, stop_ids)
    record = evaluator.evaluate(folder)
    assert (record["recipe"], record["family"]) == ("itself", "causal-lm")
    assert record["draft_digest"] == manifest.digest
    assert record["alpha"]["0.0"]["mean"] == 1
    assert record["survival"]["0.0"] == [1.0, 1.0]
    assert record["losslessness"]["holds"]
    assert load_any_draft(loaded, folder).manifest == manifest


@pytest.fixture
def project(loaded, tmp_path):
    """A project whose target is resolved."""
    keep_copy(loaded.directory, loaded.identity, tmp_path / TARGETS)
    write_json(tmp_path / "build" / "target.json", loaded.identity)
    return tmp_path


def test_an_exported_head_that_is_imported_again_drafts_losslessly(
    loaded, rollouts, stop_ids, project, monkeypatch
):
    texts = [(r.prompt_ids, r.response_ids) for r in rollouts if r.temperature == 0][::2]
    head = fitted_head(loaded.model, texts, layers=(0, 1, 2), steps=25)
    write_head(head, None, project / "elsewhere")
    command = ["import-draft", "elsewhere", "--name", "mine", "--root", ".", "--json"]
    monkeypatch.chdir(project)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["fits_target"]
    file = project / told["recipe"]
    fields = (field.name for field in dataclasses.fields(CheckpointConfig))
    recipe = CheckpointConfig(**{name: load_value(file, name, str) for name in fields})
    folder = project / "drafts" / "mine"
    manifest = take_over(recipe, loaded.identity, folder, root=project)
    config = dataclasses.replace(CONFIG, decoding_prompts=8)
    record = Evaluator(config, loaded.model, loaded.identity, rollouts, stop_ids).evaluate(folder)
    assert (record["recipe"], record["family"]) == ("mine", "eagle")
    assert record["draft_digest"] == manifest.digest
    assert record["losslessness"]["holds"]
    assert record["survival"]["0.0"][0] > 0.1
