"""The command on a project of which nothing has run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import MambaConfig
from typer.testing import CliRunner

from draftsmith.artifacts import short, write_json
from draftsmith.cli import app
from draftsmith.corpus.dataset import write_corpus
from tests.planning.test_corpus import rollout

ROOT = Path(__file__).parents[2]
PARAMS = """
groups: {target: default}
recipes: [eagle]
override:
  target: {source: nowhere, dtype: bfloat16}
  drafts.eagle.vocabulary_size: 32
  distill: {steps: 10, warmup_steps: 2}
"""


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    shutil.copytree(ROOT / "conf", root / "conf")
    (root / "params.yaml").write_text(PARAMS, encoding="utf-8")
    return root


def run(project, *arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments), "--root", str(project)])


def run_json(project, *arguments):
    done = run(project, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_config_alone_is_enough(project, config_of):
    folder = config_of()
    report = run_json(project, folder / "config.json", "--device", "cpu")
    assert set(report) == {
        "cache",
        "corpus",
        "disk",
        "machine",
        "recipes",
        "schema",
        "source",
        "step",
        "target",
        "time",
    }
    assert report["schema"] == 1
    assert set(report["recipes"]["eagle"]) == {
        "family",
        "memory",
        "signal_cache",
        "sizes",
        "verdicts",
    }
    assert report["target"]["dtype"] == "bfloat16"
    assert report["corpus"]["origin"] == "limits"
    assert report["cache"] == {"rows": 1, "slots": 2048 + 4 + 1}
    assert run_json(project, folder, "--device", "cpu")["recipes"] == report["recipes"]


def test_options_change_what_is_planned(project, config_of):
    report = run_json(
        project,
        config_of(),
        *("--recipe", "student", "--recipe", "medusa", "--dtype", "float32", "--device", "cuda"),
        *("--device-memory", "0.5", "--shards", "2", "--processes", "2", "--batch-size", "3"),
        *("--context", "40", "--prompts", "100", "--prompt-tokens", "9"),
        *("--response-tokens", "10", "--rollout-tokens-per-s", "100"),
        *("--training-tokens-per-s", "50", "--price-per-device-hour", "2"),
    )
    assert set(report["recipes"]) == {"student", "medusa"}
    assert report["machine"] == {
        "device_type": "cuda",
        "memory": 500_000_000,
        "shards": 2,
        "processes": 2,
    }
    assert report["target"]["dtype"] == "float32"
    assert report["cache"] == {"rows": 3, "slots": 45}
    assert report["corpus"]["train_prompt_tokens"] == 9 * report["corpus"]["train_responses"]
    assert report["time"]["cost"] == pytest.approx(2 * report["time"]["device_hours"])
    assert report["step"]["rows"] == 2


def test_the_table_says_what_fits(project, config_of):
    done = run(project, config_of(), "--device-memory", "0.001", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "eagle: GB of a device" in done.stdout
    assert "eagle, training: does not fit" in done.stdout
    assert "eagle, signal cache: fits" in done.stdout


def test_by_default_it_is_the_projects_target_and_its_corpus_where_they_are(project, config_of):
    digest = "e" * 64
    write_json(project / "build/target.json", {"digest": digest})
    shutil.copytree(config_of(), project / "models/targets" / short(digest))
    splits = {"train": [rollout(4, 6)] * 3, "eval": [rollout(2, 5)]}
    write_corpus(project / "data/corpus", splits, {"digest": "c" * 64})
    report = run_json(project, "--device", "cpu")
    assert report["corpus"]["origin"] == "data/corpus"
    assert report["time"]["rollout_tokens"] == 23
    assert report["source"] == "nowhere"
    expected = run_json(project, "--device", "cpu", "--prompts", "10")
    assert expected["corpus"]["origin"] == "limits"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "config of the target nowhere"),
        ((), "config of the target nowhere"),
        (("{config}", "--device", "tpu"), "cpu or cuda"),
        (("{config}", "--shards", "4", "--processes", "2"), "all processes divide the target"),
        (("{config}", "--recipe", "eagel"), "did you mean `eagle`"),
        (("{config}", "--dtype", "int4"), "bfloat16"),
        (("{mamba}",), "cannot be rolled back"),
        (("{zebra}",), "zebra"),
        (("{gpt2}",), "recipe of family student"),
    ],
)
def test_an_error_is_one_message_and_exit_code_2(project, config_of, tmp_path, arguments, message):
    MambaConfig(num_hidden_layers=2, hidden_size=16).save_pretrained(tmp_path / "mamba")
    write_json(tmp_path / "zebra/config.json", {"model_type": "zebra"})
    folders = {
        "config": config_of(),
        "gpt2": config_of("gpt2"),
        "mamba": tmp_path / "mamba",
        "zebra": tmp_path / "zebra",
    }
    done = run(project, *(argument.format(**folders) for argument in arguments), "--json")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_recipes_that_train_nothing_are_refused_by_name(project, config_of):
    text = f"family: checkpoint\nsource: there\ndigest: {'a' * 64}\n"
    (project / "conf/draft/sibling.yaml").write_text(text, encoding="utf-8")
    done = run(project, config_of(), "--recipe", "sibling", "--json")
    assert done.exit_code == 2
    assert "planning sibling" in done.stderr
    report = run_json(project, config_of(), "--recipe", "sibling", "--recipe", "eagle")
    assert set(report["recipes"]) == {"eagle"}
