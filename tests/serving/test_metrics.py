"""What is counted: readable by the monitor, equal to telemetry and to what callers were told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import requests
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.drift.counters import counted
from draftsmith.drift.exposition import scrape
from draftsmith.drift.telemetry_reading import read_telemetry
from draftsmith.serving.metrics import Histogram
from tests.serving.service import QUESTIONS, chat, client_of, post, serving

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docs" / "examples" / "grafana-dashboard.json"


@pytest.fixture(scope="module")
def counted_server(project, tmp_path_factory):
    """A server that has answered ten requests, what it said of them, and its telemetry."""
    file = tmp_path_factory.mktemp("telemetry") / "lines.jsonl"
    with serving(project.root, telemetry=file) as server:
        client = client_of(server)
        said = [
            client.chat.completions.create(
                **chat(question, metadata={"domain": "walk"}, n=1 + place % 2)
            ).usage
            for place, question in enumerate(QUESTIONS[:8])
        ]
        post(server, chat(QUESTIONS[0], temperature=9))
        yield server, said, file


def value(text, name):
    (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, flags=re.MULTILINE)
    return float(found)


def test_counters_agree_with_what_callers_were_told(counted_server, pair):
    server, said, _ = counted_server
    text = requests.get(f"{server.url}/metrics", timeout=9).text
    label = f'{{pair_digest="{pair.record.digest}"}}'
    drafted, accepted, rounds = (
        sum(usage.speculation[name] for usage in said) for name in ("drafted", "accepted", "rounds")
    )
    # Positions behind an answer's end were drafted and are not counted.
    assert 0 < value(text, f"draftsmith_spec_decode_num_draft_tokens_total{label}") <= drafted
    assert value(text, f"draftsmith_spec_decode_num_accepted_tokens_total{label}") == accepted > 0
    lengths = re.findall(r"^draftsmith_spec_decode_rounds_total\{.*\} (\d+)$", text, re.MULTILINE)
    assert sum(map(int, lengths)) == rounds
    generated = sum(usage.completion_tokens for usage in said)
    assert value(text, "draftsmith_generation_tokens_total") == generated
    assert value(text, "draftsmith_time_to_first_token_seconds_count") == 12
    assert value(text, "draftsmith_e2e_request_latency_seconds_count") == 12
    assert value(text, "draftsmith_num_requests_running") == 0
    assert value(text, 'draftsmith_requests_refused_total{status="400"}') == 1
    first = re.findall(r"num_accepted_tokens_per_pos_total\{.*position=\"0\"\} (\d+)", text)
    last = re.findall(r"num_draft_tokens_per_pos_total\{.*position=\"2\"\} (\d+)", text)
    assert int(first[0]) > 0
    assert int(last[0]) > 0


def test_the_monitor_reads_the_running_server(counted_server, project, pair):
    server, _, _ = counted_server
    snapshot = scrape(f"{server.url}/metrics", pair_digest=pair.record.digest)
    assert snapshot.notes == ()
    window, restarts = counted([snapshot.engines])
    assert restarts == 0
    assert window["num_drafts"] > 0
    arguments = ["--metrics", f"{server.url}/metrics", "--version", "1", "--json", "--no-tag"]
    done = CliRunner().invoke(app, ["monitor", *arguments, "--root", str(project.root)])
    assert done.exit_code == 0, done.output
    judged = json.loads(done.stdout)
    assert judged["metrics"]["window"]["num_drafts"] == window["num_drafts"]


def test_a_server_that_has_answered_nobody_can_be_read(project, pair):
    with serving(project.root) as server:
        snapshot = scrape(f"{server.url}/metrics", pair_digest=pair.record.digest)
    window, _ = counted([snapshot.engines])
    assert window["num_drafts"] == 0


def test_telemetry_has_a_line_a_sample(counted_server, pair):
    _, said, file = counted_server
    found = read_telemetry(file)
    assert found.torn == []
    assert len(found.requests) == 12
    assert {line.domain for line in found.requests} == {"walk"}
    assert not any(line.shaped_by for line in found.requests)
    assert {line.pair_digest for line in found.requests} == {pair.record.digest}
    assert sum(line.committed for line in found.requests) == sum(u.completion_tokens for u in said)


def test_a_disk_that_refuses_telemetry_costs_no_answer(project, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with serving(project.root, telemetry=tmp_path / "file" / "lines.jsonl") as server:
        assert post(server, chat(QUESTIONS[0])).status_code == 200
    assert "event=telemetry_lost" in caplog.text


def test_a_histogram_counts_up_to_each_bound():
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(1.5, count=3)
    histogram.observe(9.0)
    assert histogram.lines("x", "Text.")[2:] == [
        'x_bucket{le="1"} 1',
        'x_bucket{le="2"} 4',
        'x_bucket{le="+Inf"} 5',
        "x_sum 14.5",
        "x_count 5",
    ]


def test_the_dashboard_asks_for_metrics_that_there_are(counted_server):
    server, _, _ = counted_server
    text = requests.get(f"{server.url}/metrics", timeout=9).text
    shown = set(re.findall(r"draftsmith_\w+", DASHBOARD.read_text(encoding="utf-8")))
    exported = set(re.findall(r"^(draftsmith_\w+)", text, flags=re.MULTILINE))
    assert len(shown) > 8
    assert shown - exported == set()
