"""The command line on a real registry with a tiny pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from draftsmith.artifacts import write_json, write_text
from draftsmith.cli import app
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.pair import MODEL_TAG
from tests.registry.small_pairs import CONFIG, SOURCE, TAGS, make_files, make_record
from tests.registry.tiny_models import save_draft_for, save_target

REPOSITORY = Path(__file__).resolve().parents[1]
SECTION = "registry:\n  name: demo\n  experiment: draftsmith\n  include_target: false\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Two promoted pairs: version 1 of a tiny target, version 2 of one that cannot be loaded."""
    root = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        write_text(root / "build" / "config.yaml", SECTION)
        save_target(root / "target")
        record = save_draft_for(root / "target", root / "draft")
        store = PairStore(root, CONFIG)
        arguments = {"evidence": {}, "tags": TAGS}
        store.register(record, root / "draft", target_source=str(root / "target"), **arguments)
        draft_dir, _ = make_files(root / "files")
        store.register(make_record(), draft_dir, target_source=SOURCE, **arguments)
        store.promote("1", ["first"])
        store.promote("2", ["faster"])
        store.set_challenger("2")
        write_json(root / "build" / "target.json", dict(record.target))
        decision = {"verdict": "block", "version": "2", "reasons": ["alpha fell by 0.10"]}
        write_json(root / "reports" / "decision.json", decision)
        yield root


def run(*arguments, root):
    return CliRunner().invoke(app, [*arguments, "--root", str(root)])


def run_json(*arguments, root):
    done = run(*arguments, "--json", root=root)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_every_command_takes_json_and_all_that_read_the_project_take_root():
    def leaves(command, name):
        for key, child in getattr(command, "commands", {}).items():
            yield from leaves(child, f"{name} {key}".strip())
        if not hasattr(command, "commands"):
            yield name, {option for parameter in command.params for option in parameter.opts}

    options = dict(leaves(typer.main.get_command(app), ""))
    assert {"monitor", "measure", "evidence import"} <= set(options)
    assert {name for name, found in options.items() if "--json" not in found} == set()
    assert {name for name, found in options.items() if "--root" not in found} == {"measure"}


def test_status_shows_target_champion_challenger_decision_and_evidence(project):
    data = run_json("status", root=project)
    assert data["champion"]["version"] == data["challenger"]["version"] == "2"
    assert data["champion"]["tags"]["speedup"] == TAGS["speedup"]
    assert data["decision"]["reasons"] == ["alpha fell by 0.10"]
    assert not data["champion_is_for_target"]
    text = run("status", root=project).stdout
    for words in ("llama", "version 2", "1.2000", "alpha fell by 0.10", "another target"):
        assert words in text


def test_pairs_lists_every_version_with_its_tags(project):
    data = run_json("pairs", root=project)
    assert [item["version"] for item in data] == ["1", "2"]
    assert data[1]["aliases"] == ["challenger", "champion"]
    assert data[0]["tags"]["alpha"] == TAGS["alpha"]
    assert "@champion" in run("pairs", root=project).stdout


def test_generate_prints_the_text_tau_and_speed(project):
    arguments = ("generate", "models:/demo/1", "hello", "--max-new-tokens", "8")
    data = run_json(*arguments, root=project)
    assert 1 <= len(data["token_ids"]) <= 8
    assert data["block_efficiency"] >= 1
    text = run(*arguments, root=project).stdout
    assert data["text"] in text
    assert f"tau {data['block_efficiency']:.2f}" in text
    assert "tokens/s" in text


def test_a_stop_string_ends_the_printed_text_before_it(project):
    arguments = ("generate", "models:/demo/1", "hello", "--max-new-tokens", "40")
    whole = run_json(*arguments, "--temperature", "1", root=project)
    stop = next(c for c in whole["text"][3:] if c.isascii() and c.isprintable())
    stops = ("--stop", "no such text", f"--stop={stop}")
    data = run_json(*arguments, "--temperature", "1", *stops, root=project)
    assert data["text"] == whole["text"][: whole["text"].index(stop)]
    assert (data["finish_reason"], data["stopped_by"]) == ("stop", stop)
    assert data["params"]["stop_strings"] == ["no such text", stop]
    least = run_json(*arguments, "--temperature", "1", *stops, "--min-new-tokens=40", root=project)
    assert len(least["token_ids"]) == 40


def test_an_option_that_generate_does_not_know_is_named(project):
    done = run("generate", "models:/demo/1", "hello", "--num-beams", "2", root=project)
    assert done.exit_code == 2
    assert "--num-beams" in done.stderr


def test_generate_takes_an_adaptive_length_and_refuses_what_is_none(project):
    arguments = ("generate", "models:/demo/1", "hello", "--max-new-tokens", "8", "--draft-length")
    data = run_json(*arguments, "adaptive", root=project)
    assert data["token_ids"] == run_json(*arguments, "0", root=project)["token_ids"]
    for wrong in ("-1", "two"):
        done = run(*arguments, wrong, root=project)
        assert done.exit_code == 2
        assert f"found '{wrong}'" in done.output


def test_history_lists_the_moves_with_their_reasons(project):
    data = run_json("history", root=project)
    assert [(m["version"], m["predecessor"], m["reason"]) for m in data] == [
        ("1", None, "first"),
        ("2", "1", "faster"),
    ]
    assert "faster" in run("history", root=project).stdout


def test_diff_shows_what_differs_and_nothing_else(project):
    data = run_json("diff", "1", "@champion", root=project)
    assert data["pair_digest"][0] != data["pair_digest"][1]
    assert "alpha" not in data
    assert "pair_digest" in run("diff", "1", "2", root=project).stdout
    assert run_json("diff", "1", "1", root=project) == {}


def test_verify_hashes_loads_and_decodes_a_version(project):
    data = run_json("verify", "1", root=project)
    assert data["holds"]
    assert data["model_checked"]
    assert data["num_identical"] == data["num_prompts"] == 3
    assert data["num_tokens"] > 3
    assert "3 of 3" in run("verify", "1", root=project).stdout


def test_verify_says_so_where_no_digest_of_the_code_was_recorded(project):
    client = PairStore(project, CONFIG).catalog.client
    recorded = client.get_model_version("demo", "1").tags[MODEL_TAG]
    client.delete_model_version_tag("demo", "1", MODEL_TAG)
    data, text = run_json("verify", "1", root=project), run("verify", "1", root=project).stdout
    client.set_model_version_tag("demo", "1", MODEL_TAG, recorded)
    assert (data["holds"], data["model_checked"]) == (True, False)
    assert "MLmodel and code not known" in text


def test_verify_notices_an_artifact_that_was_changed(project):
    found = sorted(project.rglob("*/artifacts/draft/model.safetensors"))
    assert found
    kept = {path: path.read_bytes() for path in found}
    for path in found:
        path.write_bytes(b"changed")
    done = run("verify", "1", root=project)
    for path, content in kept.items():
        path.write_bytes(content)
    assert done.exit_code == 2
    assert "digest" in done.stderr
    assert "damaged" in run("pairs", root=project).stdout
    assert run_json("verify", "1", root=project)["holds"]
    assert run_json("pairs", root=project)[0]["damage"] is None


def test_a_version_without_a_decision_to_promote_is_not_promoted(project):
    done = run("promote", "1", root=project)
    assert done.exit_code == 3
    assert "no decision" in done.stderr
    assert run_json("status", root=project)["champion"]["version"] == "2"


def test_rollback_quarantines_and_moves_back_to_a_target_at_hand(project):
    data = run_json("rollback", "--reason", "slow", root=project)
    assert data["quarantined"] == "2"
    assert data["champion"]["version"] == "1"
    assert run_json("pairs", root=project)[1]["quarantine"] == "slow"
    assert run_json("status", root=project)["champion_is_for_target"]
    assert "slow" in run("pairs", root=project).stdout
    again = run("rollback", root=project)
    assert again.exit_code == 2
    assert "version 2 is in quarantine" in again.stderr


def test_a_rollback_of_a_version_that_is_champion_no_more_is_refused(project):
    done = run("rollback", "--from", "2", root=project)
    assert done.exit_code == 2
    assert "version 1 as champion" in done.stderr
    assert run_json("status", root=project)["champion"]["version"] == "1"


def test_promote_follows_the_recorded_decision_but_never_into_quarantine(project):
    store = PairStore(project, CONFIG)
    write_json(project / "decision.json", {"verdict": "promote", "reasons": ["it is faster"]})
    for version in ("1", "2"):
        store.attach_decision(version, project / "decision.json", project / "decision.json")
    assert run_json("promote", "1", root=project)["promoted"]
    assert run_json("status", root=project)["champion"]["version"] == "1"
    done = run("promote", "2", root=project)
    assert done.exit_code == 3
    assert "quarantine" in done.stderr


def test_release_takes_a_version_out_of_quarantine_with_a_reason_on_record(project):
    for reason in ("", " "):
        assert run("release", "2", "--reason", reason, root=project).exit_code == 2
    assert run("release", "2", root=project).exit_code == 2
    data = run_json("release", "2", "--reason", "it was the disk", root=project)
    assert data == {"version": "2", "reason": "it was the disk", "quarantine": "slow"}
    assert run_json("pairs", root=project)[1]["quarantine"] is None
    assert "it was the disk" in run("history", root=project).stdout
    assert run_json("promote", "2", root=project)["promoted"]
    again = run("release", "2", "--reason", "again", root=project)
    assert again.exit_code == 2
    assert "no quarantine" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "models:/demo/9", "hello"), "resolving 9"),
        (("generate", "demo", "hello"), "pair.json"),
        (("generate", "models:/demo/1", "hello", "--temperature", "-1"), "temperature"),
        (("rollback", "--to", "7"), "resolving 7"),
    ],
)
def test_an_error_is_one_message_and_exit_code_2(project, arguments, message):
    done = run(*arguments, "--json", root=project)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_project_before_its_first_run_says_what_to_do(tmp_path):
    done = run("status", root=tmp_path)
    assert done.exit_code == 2
    assert "build/config.yaml" in done.stderr


def test_an_empty_registry_is_no_error(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_text(tmp_path / "build" / "config.yaml", SECTION)
    assert run_json("pairs", root=tmp_path) == []
    assert "dvc repro" in run("pairs", root=tmp_path).stdout
    data = run_json("status", root=tmp_path)
    assert data["champion"] is data["challenger"] is data["target"] is data["decision"] is None
    assert "none" in run("status", root=tmp_path).stdout


def test_standard_output_is_pure_json_in_a_process_of_its_own(project):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    environment.pop("MLFLOW_TRACKING_URI", None)
    done = subprocess.run(
        [sys.executable, "-m", "draftsmith.cli", "status", "--root", str(project), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "demo"


def test_help_needs_neither_torch_nor_mlflow():
    code = (
        "import sys, draftsmith.cli; "
        "sys.exit(len({'torch', 'mlflow', 'transformers'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0
