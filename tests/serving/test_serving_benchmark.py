"""The service's benchmark on a tiny pair: every figure is there; none of its values is judged."""

from __future__ import annotations

import json

import pytest

from benchmarks import serving
from benchmarks.service_process import running
from draftsmith.errors import ConfigError, DecodingError
from tests.serving.service import PINNED
from tests.tiny_target import write_prompts


def events(*choices, tail=(b"data: [DONE]\n",)):
    lines = [{"choices": [{"text": text}], "usage": None} for text in choices]
    lines.append({"choices": [], "usage": {"completion_tokens": 9}})
    return [*(f"data: {json.dumps(line)}\n".encode() for line in lines), b"\n", *tail]


def test_pieces_without_text_are_no_pieces():
    clock = iter([1.0, 2.0, 3.0])
    found = serving.read_events(events("a", "", "bc"), lambda: next(clock))
    assert found == ([1.0, 2.0], 9)


@pytest.mark.parametrize(
    ("tail", "words"),
    [((), "without an end"), ((b'data: {"error": {"code": "server_ending"}}\n',), "server_ending")],
)
def test_a_stream_that_fails_is_an_error(tail, words):
    with pytest.raises(DecodingError, match=words):
        serving.read_events(events("a", tail=tail))


def test_latencies_are_of_requests_and_of_pieces():
    latencies = serving.Latencies()
    latencies.add(1.0, [1.5, 1.75, 2.5], 5)
    latencies.add(1.0, [2.0], 1)
    found = latencies.described()
    assert found["first_ms"] == {"median": 500.0, "p95": 1000.0}
    assert found["per_token_ms"]["p95"] == 250.0
    assert found["gap_ms"] == {"median": 250.0, "p95": 750.0}


def test_percentiles_of_a_hundred_values():
    values = [float(value) for value in range(101)]
    assert (serving.at(values, 0.5), serving.at(values, 0.95)) == (50.0, 95.0)


def test_a_service_that_does_not_start_says_why(project, monkeypatch):
    monkeypatch.chdir(project.root)
    with (
        pytest.raises(ConfigError, match="resolving 9 of demo"),
        running("models:/demo/9"),
    ):
        pass


@pytest.mark.slow
def test_every_arm_is_measured_at_every_number_of_requests(
    project, pair, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_prompts(tmp_path / "prompts.jsonl")
    out = tmp_path / "serving.json"
    sizes = ["--concurrency", "1", "2", "--num-tokens", "6", "--budget", "0"]
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--draft-length", "2"]
    assert serving.main(["--pair", PINNED, *sizes, *options, "--out", str(out)]) == 0
    report, text = json.loads(out.read_text()), capsys.readouterr().out
    assert report["pair"]["draft"] == pair.draft.manifest.digest
    assert [cell["concurrency"] for cell in report["cells"]] == [1, 2]
    for cell in report["cells"]:
        assert set(cell["arms"]) == {serving.DRAFTS, serving.PLAIN, serving.LOOP}
        for arm in cell["arms"].values():
            assert arm["median_tokens_per_s"] > 0
            assert 0 < arm["first_ms"]["median"] <= arm["first_ms"]["p95"]
            assert arm["per_token_ms"]["median"] > 0
        assert cell["groups"] == 6
        for ratio in cell["ratios"].values():
            assert 0 < ratio["low"] <= ratio["mean"] <= ratio["high"]
    assert report["device"]["name"] in text
