"""`draftsmith advise` from the command line to its file, on a tiny registered pair."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from draftsmith.artifacts import read_json, write_json, write_text
from draftsmith.cli import app
from draftsmith.corpus.dataset import write_corpus
from draftsmith.corpus.rollouts import Rollout
from draftsmith.registry.advice_table import SCHEMA
from draftsmith.registry.mlflow_store import PairStore
from tests.registry.small_pairs import CONFIG, TAGS
from tests.registry.tiny_models import save_draft_for, save_target

SECTION = "registry:\n  name: demo\n  experiment: draftsmith\n  include_target: false\n"
LENGTHS = {"0.0": [0.5, 0.25], "0.7": [0.4, 0.2]}
NUM_PROMPTS, NUM_DECODED = 60, 8


def rollout(number):
    prompt_ids = [1, *(3 + (number * 7 + place) % 200 for place in range(12)), 2]
    answer = [3 + (number + place) % 200 for place in range(20)]
    domain = ("chat", "code")[number % 2]
    return Rollout(f"p{number:02}", domain, 0.0, prompt_ids, answer, finished=True)


def evaluation():
    """What the evaluate stage would have found, as far as advice asks."""
    decoded = {f"p{number:02}" for number in range(NUM_DECODED)}
    names = [f"p{number:02}" for number in range(NUM_PROMPTS)]
    return {
        "alpha": {
            key: {"mean": survived[0], "low": 0.1, "high": 0.9, "num_prompts": NUM_PROMPTS}
            for key, survived in LENGTHS.items()
        },
        "survival": LENGTHS,
        "copied": dict.fromkeys(LENGTHS, {"share": 0.2, "survival": [0.6, 0.5]}),
        "guesses": {"0.0": {"shares": [[0.5, 0.2], [0.5]], "reached": [100, 50]}},
        "prompts": [
            {
                "prompt_id": name,
                "tau": dict.fromkeys(LENGTHS, 1.5) if name in decoded else {},
                "num_rounds": dict.fromkeys(LENGTHS, 30) if name in decoded else {},
            }
            for name in names
        ],
    }


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A champion with evidence, and the corpus of its target."""
    root = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        write_text(root / "build" / "config.yaml", SECTION)
        record = save_draft_for(save_target(root / "target"), root / "draft")
        benchmark = {"draft_length": 1, "lookup_length": 2, "temperature": 0.0, "tree": [0, 0]}
        files = {"benchmark.json": benchmark, "evaluation.json": evaluation()}
        for name, content in files.items():
            write_json(root / "evidence" / name, content)
        store = PairStore(root, CONFIG)
        evidence = {name: root / "evidence" / name for name in files}
        source = str(root / "target")
        version = store.register(
            record, root / "draft", evidence=evidence, tags=TAGS, target_source=source
        )
        store.promote(version, ["first"])
        rollouts = [rollout(number) for number in range(NUM_PROMPTS)]
        facts = {"digest": "c" * 64, "target_digest": record.target_digest}
        write_corpus(root / "data" / "corpus", {"train": rollouts, "eval": rollouts}, facts)
        yield root, record


def advise(root, *arguments):
    given = ["--max-batch", "2", "--max-context", "32", "--root", str(root), *arguments]
    return CliRunner().invoke(app, ["advise", *given])


@pytest.fixture(scope="module")
def advised(project):
    """What the command printed and wrote."""
    root, _ = project
    done = advise(root, "--budget", "12s")
    assert done.exit_code == 0, done.output
    return done.stdout, read_json(root / "reports" / "advice.json")


def test_advice_is_written_for_the_champion_at_every_evaluated_temperature(project, advised):
    _, record = project
    report = advised[1]
    assert (report["schema"], report["pair_digest"]) == (SCHEMA, record.digest)
    assert {str(entry["temperature"]) for entry in report["workloads"]} == set(LENGTHS)
    assert {entry["new_tokens"] for entry in report["workloads"]} == {16, 64}
    assert "answers of 256, 512 tokens" in report["left_out"][-1]
    assert report["budget_s"] == 12.0
    assert report["taken_s"] > 0
    assert report["prediction"]["on_unseen_prompts"] is True
    for entry in report["workloads"]:
        assert {"verdict", "instead", "draft_length", "copy_length", "tree"} <= set(entry)


def test_the_tables_and_the_error_of_predictions_are_printed(advised):
    shown, report = advised
    for temperature in LENGTHS:
        assert f"temperature {temperature}" in shown
    assert "reports/advice.json" in shown
    told = report["prediction"]["num_trials"]
    assert f"{told} workloads" in shown or "No prediction was checked" in shown


def test_a_second_call_takes_up_what_was_measured(project, advised):
    root, _ = project
    done = advise(root, "--budget", "1s", "--json")
    assert done.exit_code == 0, done.output
    again = json.loads(done.stdout)
    assert again["measured_costs"][0]["verify_ms"] == advised[1]["measured_costs"][0]["verify_ms"]
    assert again["prediction"]["num_trials"] >= advised[1]["prediction"]["num_trials"]


def test_a_corpus_of_another_target_is_refused_by_name(project, advised):
    root, record = project
    path = root / "data" / "corpus" / "corpus.json"
    facts = read_json(path)
    write_json(path, facts | {"target_digest": "d" * 64})
    done = advise(root, "--budget", "1s")
    write_json(path, facts)
    assert done.exit_code == 2
    message = " ".join(done.stderr.split())
    for words in (record.target_digest, "d" * 64, "dvc repro"):
        assert words in message
    assert read_json(root / "reports" / "advice.json")["pair_digest"] == record.digest


def test_a_project_without_a_corpus_says_what_to_do(project):
    root, _ = project
    moved = root / "data" / "elsewhere"
    (root / "data" / "corpus").rename(moved)
    done = advise(root, "--budget", "1s")
    moved.rename(root / "data" / "corpus")
    assert done.exit_code == 2
    assert "dvc repro" in done.stderr
