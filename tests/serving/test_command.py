"""`draftsmith serve` and `draftsmith export` as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.drafts.manifest import DraftManifest
from draftsmith.errors import ConfigError, DecodingError, DraftError
from draftsmith.serving.export import export_pair
from draftsmith.serving.served_pair import EngineOptions, prepare
from draftsmith.serving.server import PairServer, ServeOptions
from draftsmith.serving.settings import Limits
from draftsmith.serving.source import PairSource
from draftsmith.targets.loading import load_target
from tests.serving.service import PINNED, QUESTIONS, chat

ROOT = Path(__file__).resolve().parents[2]


def test_the_kernels_that_torch_keeps_are_limited_unless_somebody_says_otherwise(monkeypatch):
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")  # so that it is put back
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    assert CliRunner().invoke(app, ["serve", PINNED, "--verify", "x"]).exit_code == 2
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"


def test_on_a_signal_what_was_begun_is_answered_and_nothing_else(project, tmp_path, pair):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "draftsmith.cli", "serve", PINNED, "--port", "0", "--json"]
    options = ["--root", str(project.root), "--telemetry", str(tmp_path / "lines.jsonl")]
    process = subprocess.Popen(
        [*command, *options, "--max-context", "256"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = iter(process.stdout.readline, "")
        text = ""
        for line in lines:
            text += line
            if line == "}\n":
                break
        started = json.loads(text)
        assert started["pair_digest"] == pair.record.digest
        url = started["url"]
        assert url.startswith("http://127.0.0.1:")
        body = chat(QUESTIONS[0], stream=True, max_tokens=200, min_tokens=200)
        with requests.post(
            f"{url}/v1/chat/completions", json=body, stream=True, timeout=60
        ) as done:
            pieces = done.iter_lines()
            next(pieces)
            process.send_signal(signal.SIGTERM)
            rest = [piece for piece in pieces if piece]
        assert rest[-1] == b"data: [DONE]"
        assert process.wait(60) == 0
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{url}/health", timeout=9)
    finally:
        process.kill()
        log = process.stderr.read()
    assert "event=ended" in log
    assert "Traceback" not in log
    (line,) = (tmp_path / "lines.jsonl").read_text().splitlines()
    assert json.loads(line)["committed"] == 200


def test_an_address_in_use_is_refused_before_a_pair_is_loaded(project, server):
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"listening on 127.0.0.1:{port}"):
        PairServer(ServeOptions(PairSource("models:/demo/9", project.root), port=port))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["models:/demo/9"], "resolving 9 of demo"),
        (["models:/demo"], "models:/<name>@<alias>"),
        ([PINNED, "--draft-length", "x"], "--draft-length"),
        ([PINNED, "--verify", "x"], "--verify"),
        ([PINNED, "--verify", "typical_lossy"], "expected rejection or match"),
        ([PINNED, "--api-keys", "nowhere"], "API keys"),
    ],
)
def test_what_cannot_be_served_is_one_clear_error(project, arguments, words):
    done = CliRunner().invoke(
        app, ["serve", *arguments, "--port", "0", "--root", str(project.root)]
    )
    assert done.exit_code == 2
    assert words in done.output


def test_what_is_lossy_is_not_served(pair):
    options = EngineOptions(verify="typical_lossy")
    with pytest.raises(DecodingError, match="'rejection' or 'match'"):
        prepare(pair, "demo", "1", options=options, limits=Limits())


def test_an_exported_draft_drafts_in_transformers(project, tmp_path, pair):
    folder = tmp_path / "out"
    arguments = [PINNED, str(folder), "--to", "transformers", "--root", str(project.root)]
    done = CliRunner().invoke(app, ["export", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    assert written["largest_difference"] < 1e-4
    assert written["target"]["digest"] == pair.record.target_digest
    assert json.loads((folder / "target.json").read_text()) == written["target"]
    readme = (folder / "README.md").read_text()
    assert written["draft"] in readme
    assert written["target"]["directory"] in readme
    # The command of the README, on the target that it names.
    (code,) = [block.split("```")[0] for block in readme.split("```python\n")[1:]]
    target = load_target(project.root / "target", dtype="float32").model
    draft = AutoModelForCausalLM.from_pretrained(written["draft"], dtype="float32")
    ids = torch.tensor([pair.encode(QUESTIONS[0])])
    options = {"do_sample": False, "max_new_tokens": 24, "attention_mask": torch.ones_like(ids)}
    assisted = target.generate(ids, assistant_model=draft, **options)
    assert assisted.tolist() == target.generate(ids, **options).tolist()
    names = {}
    exec(code, names)
    assert names["draft"].config.num_hidden_layers == 2


def test_an_export_for_vllm_holds_its_configuration(tmp_path, pair):
    folder = tmp_path / "out"
    export_pair(pair, folder, to="vllm")
    speculation = json.loads((folder / "speculative_config.json").read_text())
    assert speculation == {
        "method": "draft_model",
        "model": str(folder.resolve() / "draft"),
        "num_speculative_tokens": pair.draft_length,
    }
    assert json.dumps(speculation) in (folder / "README.md").read_text()
    with pytest.raises(Exception, match="remove it"):
        export_pair(pair, folder, to="vllm")


@pytest.mark.parametrize("family", ["eagle", "medusa"])
def test_a_family_that_cannot_stand_alone_is_refused(tmp_path, pair, family, monkeypatch):
    manifest = DraftManifest(**{**vars(pair.draft.manifest), "family": family})
    other = type(pair.draft)(pair.draft.model, pair.draft.token_ids, manifest)
    monkeypatch.setattr(pair, "draft", other)
    with pytest.raises(DraftError, match=f"family {family}"):
        export_pair(pair, tmp_path / "out", to="vllm")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="--to"):
        export_pair(pair, tmp_path / "out", to="tgi")
