"""`draftsmith monitor` and `generate --telemetry` on a real registry with a tiny pair."""

from __future__ import annotations

import dataclasses
import http.server
import itertools
import json
import threading
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient
from typer.testing import CliRunner

from benchmarks.live_service import MARGIN, evaluation_record, monitor_config, stream
from draftsmith.artifacts import write_json, write_text
from draftsmith.cli import app
from draftsmith.drift.telemetry import append_telemetry
from draftsmith.drift.telemetry_reading import read_telemetry
from draftsmith.registry.mlflow_store import PairStore
from tests.full_disk import files_up_to
from tests.registry.small_pairs import CONFIG, TAGS
from tests.registry.tiny_models import save_draft_for, save_target

SECTIONS = {
    "registry": {"name": "demo", "experiment": "draftsmith", "include_target": False},
    "drift": {
        "margin": MARGIN,
        "confidence": 0.95,
        "temperature": 0.0,
        "min_prompts": 50,
        "on_match": "reuse",
    },
    "monitor": dataclasses.asdict(monitor_config()),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A champion whose record says what the simulated draft accepted when it was registered."""
    root = tmp_path_factory.mktemp("monitored")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        write_text(root / "build" / "config.yaml", yaml.safe_dump(SECTIONS))
        save_target(root / "target")
        record = save_draft_for(root / "target", root / "draft")
        write_json(root / "evaluation.json", evaluation_record(0, digest=record.digest))
        store = PairStore(root, CONFIG)
        store.register(
            record,
            root / "draft",
            evidence={"evaluation.json": root / "evaluation.json"},
            tags=TAGS,
            target_source=str(root / "target"),
        )
        store.promote("1", ["first"])
        yield root, record.digest


@pytest.fixture
def write_stream(project, tmp_path):
    """Write requests of the champion to a file; returns its path."""

    def write(seed=1, num_requests=400, name="telemetry.jsonl", **given):
        for request in stream(num_requests, seed, **{"digest": project[1], **given}):
            append_telemetry(tmp_path / name, request)
        return str(tmp_path / name)

    return write


def monitor(project, *arguments):
    return CliRunner().invoke(app, ["monitor", *arguments, "--root", str(project[0])])


def live_drift(project):
    return PairStore(project[0], CONFIG).resolve("1").pair.live_drift


def test_healthy_traffic_is_ok_and_tags_nothing(project, write_stream):
    done = monitor(project, write_stream(), "--fail")
    assert done.exit_code == 0, done.output
    assert "ok: version 1" in done.stdout
    assert "all domains" in done.stdout
    assert not live_drift(project)


def test_traffic_that_shifted_neither_fails_nor_tags(project, write_stream):
    path = write_stream(domain=lambda i: "maths" if i < 200 else "translation")
    done = monitor(project, path, "--fail", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["verdict"] == "traffic shift"
    assert not live_drift(project)


def test_traffic_without_a_reference_fails_with_a_code_of_its_own(project, write_stream):
    path = write_stream(num_requests=120, temperature=1.0)
    done = monitor(project, path, "--fail", "--json")
    assert done.exit_code == 4, done.output
    data = json.loads(done.stdout)
    assert (data["verdict"], data["tagged"]) == ("no reference", False)
    done = monitor(project, path)
    assert done.exit_code == 0, done.output
    assert "120 at temperature 1.0" in done.stdout
    assert "evaluation.temperatures" in done.stdout
    assert not live_drift(project)


def test_requests_of_another_pair_are_left_out_and_said(project, write_stream):
    write_stream()
    path = write_stream(2, 30, digest="another", lost=0.2)
    done = monitor(project, path)
    assert "30 requests belong to another pair" in done.stdout


def test_several_files_are_one_stream(project, write_stream):
    paths = [write_stream(seed, 30, f"part-{seed}.jsonl") for seed in (1, 2)]
    done = monitor(project, *paths, "--json")
    assert json.loads(done.stdout)["telemetry"]["num_requests"] == 60


def test_decay_fails_on_request_and_is_tagged_unless_told_otherwise(project, write_stream):
    path = write_stream(lost=0.12)
    done = monitor(project, path, "--fail", "--no-tag", "--json")
    assert done.exit_code == 3, done.output
    data = json.loads(done.stdout)
    assert (data["verdict"], data["tagged"]) == ("draft decay", False)
    assert not live_drift(project)
    assert monitor(project, path, "--no-tag").exit_code == 0
    done = monitor(project, path)
    assert done.exit_code == 0
    assert "live-drift tag" in done.stdout
    store = PairStore(project[0], CONFIG)
    assert store.resolve("1").pair.live_drift
    assert data["telemetry"]["reasons"][0] in store.resolve("1").tags["live_drift"]


@pytest.fixture
def refused_tags(project, monkeypatch):
    """Version 1 carries no alarm, and the database takes no tag."""
    if live_drift(project):
        PairStore(project[0], CONFIG).clear_live_drift("1", "the next test needs it")
    original = MlflowClient.set_model_version_tag

    def on_a_full_disk(*arguments):
        with files_up_to(1 << 16):
            return original(*arguments)

    monkeypatch.setattr(MlflowClient, "set_model_version_tag", on_a_full_disk)


@pytest.mark.usefixtures("refused_tags")
def test_an_alarm_that_cannot_be_tagged_is_told_all_the_same(project, write_stream):
    path = write_stream(lost=0.12)
    for arguments, code in ((("--fail",), 3), ((), 2)):
        done = monitor(project, path, "--json", *arguments)
        assert done.exit_code == code, done.output
        data = json.loads(done.stdout)
        assert (data["verdict"], data["tagged"]) == ("draft decay", False)
        assert data["not_tagged"] in done.stderr
    done = monitor(project, path, "--fail")
    assert done.exit_code == 3
    assert "draft decay: version 1" in done.stdout
    assert "the version is not tagged" in done.stderr
    assert not live_drift(project)


def test_metrics_of_another_server_are_judged_beside_telemetry(project, write_stream, tmp_path):
    text = (
        'vllm:spec_decode_num_drafts_total{model_name="m"} 20000\n'
        'vllm:spec_decode_num_draft_tokens_total{model_name="m"} 20000\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 400\n'
    )
    write_text(tmp_path / "metrics", text)
    done = monitor(
        project, write_stream(), "--metrics", str(tmp_path / "metrics"), "--no-tag", "--json"
    )
    data = json.loads(done.stdout)
    assert data["telemetry"]["verdict"] == "ok"
    assert data["metrics"]["verdict"] == data["verdict"] == "draft decay"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "neither telemetry files nor --metrics"),
        (("missing.jsonl",), "missing.jsonl"),
        (("missing.jsonl", "--version", "9"), "resolving 9"),
        (("--metrics", "missing"), "missing"),
        (("telemetry.jsonl", "telemetry.jsonl"), "telemetry.jsonl twice"),
        (("--metrics", "http://a", "--metrics", "http://a"), "http://a twice"),
        (("--metrics", "http://a", "--metrics", "http://b"), "a URL before another source"),
        (("--metrics", "now.prom", "--count", "8"), "--count 8 without a URL"),
        (("--metrics", "now.prom", "--export", "out.prom"), "without telemetry files"),
    ],
)
def test_an_error_is_one_message_and_exit_code_2(project, arguments, message):
    done = monitor(project, *arguments, "--json")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_torn_line_is_said_and_blinds_nobody(project, write_stream):
    path = write_stream(num_requests=150)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:100] + b"\n" + whole)
    assert "1 torn lines are left out, the first is 1" in monitor(project, path).stdout
    report = json.loads(monitor(project, path, "--json").stdout)["telemetry"]
    assert (report["num_requests"], report["torn_lines"]) == (150, {path: [1]})


def test_a_line_that_is_no_telemetry_stops_the_command_with_its_place(project, write_stream):
    path = write_stream(num_requests=2)
    with Path(path).open("a", encoding="utf-8") as file:
        file.write('{"temperature": 1}\n')
    done = monitor(project, path)
    assert done.exit_code == 2
    assert f"{path}:3" in done.stderr


def clear_drift(project, *arguments):
    return CliRunner().invoke(app, ["clear-drift", *arguments, "--root", str(project[0])])


def test_an_alarm_that_was_none_is_cleared_with_its_reason_on_record(project, write_stream):
    store = PairStore(project[0], CONFIG)
    if live_drift(project):
        store.clear_live_drift("1", "the next test needs it")
    store.set_live_drift("1", "the first alarm")
    store.set_live_drift("1", "the second alarm")
    assert store.resolve("1").tags["live_drift"] == "the first alarm"
    assert clear_drift(project, "1", "--reason", " ").exit_code == 2
    assert live_drift(project)
    done = clear_drift(project, "@champion", "--reason", "the eval prompts were swapped", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["version"] == "1"
    assert not live_drift(project)
    record = store.resolve("1").tags["live_drift_cleared"]
    assert "the eval prompts were swapped" in record
    assert "the first alarm" in record
    done = clear_drift(project, "1", "--reason", "again")
    assert done.exit_code == 2
    assert "no live-drift tag" in done.stderr


def test_what_is_exported_is_read_back_as_the_same_counts(project, write_stream, tmp_path):
    write_stream(2, 20, digest="another")
    path = write_stream(num_requests=60)
    textfile = tmp_path / "collector" / "draftsmith.prom"
    done = monitor(project, path, "--export", str(textfile))
    assert done.exit_code == 0, done.output
    own = [r for r in read_telemetry(Path(path)).requests if r.pair_digest == project[1]]
    done = monitor(project, "--metrics", str(textfile), "--json")
    window = json.loads(done.stdout)["metrics"]["window"]
    assert window["num_drafts"] == sum(r.drafted[0] for r in own)
    assert window["num_accepted_tokens_per_pos 0"] == sum(r.accepted[0] for r in own)


@pytest.fixture
def address(tmp_path):
    """A server whose gauge has another value at every scrape."""
    scrapes = itertools.count()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"sglang:spec_accept_length 1.%d\n" % next(scrapes))

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()


def test_a_gauge_is_scraped_as_often_as_asked(project, address):
    done = monitor(
        project, "--metrics", address, "--count", "8", "--every", "0", "--no-tag", "--json"
    )
    assert done.exit_code == 0, done.output
    assert "8 scrapes" in json.loads(done.stdout)["metrics"]["reasons"][0]
    done = monitor(project, "--metrics", address, "--json")
    assert json.loads(done.stdout)["metrics"]["verdict"] == "not enough requests"


def test_a_counter_that_is_no_number_is_said(project, tmp_path):
    write_text(tmp_path / "metrics", 'vllm:spec_decode_num_drafts_total{engine="0"} NaN\n')
    done = monitor(project, "--metrics", str(tmp_path / "metrics"), "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)["metrics"]
    assert report["verdict"] == "not enough requests"
    assert "no finite number" in report["notes"][0]


def test_generate_appends_a_line_about_its_request(project, tmp_path):
    path = tmp_path / "telemetry.jsonl"
    arguments = ("generate", "models:/demo/1", "hello", "--max-new-tokens", "8")
    options = ("--telemetry", str(path), "--domain", "chat", "--draft-length", "2", "--json")
    for _ in range(2):
        done = CliRunner().invoke(app, [*arguments, *options, "--root", str(project[0])])
        assert done.exit_code == 0, done.output
    lines = read_telemetry(path).requests
    data = json.loads(done.stdout)
    assert len(lines) == 2
    line = lines[1]
    assert (line.pair_digest, line.domain, line.temperature) == (project[1], "chat", 0.0)
    assert line.committed == len(data["token_ids"])
    assert line.rounds == data["num_rounds"]
    assert line.drafted[0] <= line.rounds
    assert line.prompt_tokens > 5
    assert line.latency_s > 0
    done = monitor(project, str(path))
    assert "not enough requests" in done.stdout
