"""`draftsmith import-draft`, from a folder to a recipe that the pipeline composes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from draftsmith.artifacts import write_json
from draftsmith.cli import app
from draftsmith.config import compose, load_value, write_config
from draftsmith.drafts.settings import CheckpointConfig, RecipeConfig
from draftsmith.targets.identity import identify
from pipeline.compose import SCHEMA
from tests.registry.tiny_models import save_target

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def root(tmp_path):
    shutil.copytree(REPOSITORY / "conf", tmp_path / "conf")
    save_target(tmp_path / "target")
    write_json(tmp_path / "build" / "target.json", identify(tmp_path / "target", "float32"))
    return tmp_path


@pytest.fixture
def checkpoint(root):
    return save_target(root / "elsewhere" / "sibling", seed=1)


def run(checkpoint, root, *arguments):
    command = ["import-draft", str(checkpoint), *arguments, "--root", str(root)]
    return CliRunner().invoke(app, command)


def test_it_becomes_a_recipe_that_composes_beside_the_others(root, checkpoint):
    done = run(checkpoint, root)
    assert done.exit_code == 0, done.output
    assert "recipes:" in done.stdout
    params = {"groups": {}, "recipes": ["student", "sibling"], "override": {}}
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    config = compose(root / "params.yaml", root / "conf", schema=SCHEMA)
    write_config(root / "build" / "config.yaml", config)
    recipes = load_value(root / "build" / "config.yaml", "drafts", dict[str, RecipeConfig])
    assert recipes["student"].family == "student"
    sibling = recipes["sibling"]
    assert isinstance(sibling, CheckpointConfig)
    assert sibling.source == "elsewhere/sibling"
    assert (root / "models/imported/sibling/model.safetensors").is_file()


def test_importing_again_updates_the_recipe(root, checkpoint):
    first = json.loads(run(checkpoint, root, "--json").stdout)
    again = json.loads(run(checkpoint, root, "--json").stdout)
    save_target(checkpoint, seed=2)
    changed = json.loads(run(checkpoint, root, "--json").stdout)
    assert first == again
    assert first["fits_target"]
    assert changed["digest"] != first["digest"]
    assert changed["digest"] in (root / changed["recipe"]).read_text()


def test_a_recipe_of_another_family_is_not_overwritten(root, checkpoint):
    before = (root / "conf/draft/student.yaml").read_text()
    done = run(checkpoint, root, "--name", "student")
    assert done.exit_code == 2
    assert "family student" in done.stderr
    assert (root / "conf/draft/student.yaml").read_text() == before
    assert not (root / "models").exists()


@pytest.mark.parametrize("name", ["a b", "../x", "1st", ""])
def test_a_name_that_no_recipe_can_have_is_refused(root, checkpoint, name):
    done = run(checkpoint, root, f"--name={name}") if name else run(root / "missing", root)
    assert (done.exit_code, done.stdout) == (2, "")
    assert not (root / "models").exists()


def test_without_a_resolved_target_the_check_is_left_to_the_run(root, checkpoint):
    (root / "build/target.json").unlink()
    done = run(checkpoint, root)
    assert done.exit_code == 0
    assert "dvc repro" in done.stdout


def test_a_head_of_another_kind_is_refused_before_anything_is_written(root):
    folder = root / "elsewhere" / "head"
    write_json(folder / "config.json", {"speculators_model_type": "dflash"})
    (folder / "model.safetensors").write_bytes(b"")
    done = run(folder, root)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "of the kind dflash" in done.stderr
    assert not (root / "models").exists()
    assert not (root / "conf/draft/head.yaml").exists()
