from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.live_service import stream
from draftsmith.decoding import SamplingParams
from draftsmith.decoding.trace import Trace
from draftsmith.drift.telemetry import append_telemetry, describe_request
from draftsmith.drift.telemetry_reading import read_telemetry
from draftsmith.errors import ArtifactError, DecodingError
from tests.full_disk import files_up_to

SOURCES = Path(__file__).resolve().parents[2]


@pytest.fixture
def request_line():
    return json.loads(json.dumps(dataclasses.asdict(stream(1, 0)[0])))


def write(path, *lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def describe(trace, params):
    return describe_request(
        trace,
        params,
        time_utc="2026-03-01T12:00:00+00:00",
        pair_digest="p",
        domain=None,
        prompt_tokens=7,
        latency_s=0.5,
    )


def trace_of(*rounds):
    """A trace of (drafted, accepted, committed, from_text) rounds."""
    trace = Trace()
    for drafted, accepted, committed, from_text in rounds:
        trace.record(drafted=drafted, accepted=accepted, committed=committed, from_text=from_text)
    return trace


def test_what_is_appended_is_what_is_read(tmp_path):
    requests = stream(5, 0)
    path = tmp_path / "new" / "telemetry.jsonl"
    for request in requests:
        append_telemetry(path, request)
    assert read_telemetry(path).requests == requests
    assert len(path.read_text().splitlines()) == 5


def test_a_trace_becomes_counts_by_position():
    trace = trace_of(
        (2, 2, 3, False), (2, 0, 1, False), (4, 3, 4, True), (1, 1, 1, False), (0, 0, 1, False)
    )
    line = describe(trace, SamplingParams(max_new_tokens=8))
    assert (line.drafted, line.accepted) == ((3, 2), (2, 1))
    assert line.draft_lengths == (2, 1, 2)
    assert (line.rounds, line.committed) == (5, 10)
    assert line.shaped_by == ()


def test_a_request_that_a_lossy_engine_decoded_is_no_telemetry():
    trace = trace_of((2, 2, 3, False))
    trace.is_lossy = True
    with pytest.raises(DecodingError, match="lossy engine"):
        describe(trace, SamplingParams(max_new_tokens=8))


def test_parameters_that_shape_the_distribution_are_named_and_no_others():
    trace = trace_of((1, 0, 1, False))
    sampled = SamplingParams(
        max_new_tokens=8, temperature=0.7, top_k=5, seed=3, stop_strings=("a",)
    )
    greedy = SamplingParams(max_new_tokens=8, top_k=5, repetition_penalty=1.2)
    assert describe(trace, sampled).shaped_by == ("top_k",)
    assert describe(trace, greedy).shaped_by == ("repetition_penalty",)


def test_an_answer_without_drafts_has_a_line_too(tmp_path):
    trace = trace_of((0, 0, 1, False), (0, 0, 1, False))
    path = tmp_path / "telemetry.jsonl"
    append_telemetry(path, describe(trace, SamplingParams(max_new_tokens=8)))
    assert read_telemetry(path).requests[0].drafted == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": None}, "a whole number"),
        ({"rounds": True}, "a whole number"),
        ({"temperature": -1}, "0 or more"),
        ({"latency_s": "fast"}, "a number"),
        ({"time_utc": "2026-03-01T12:00:00"}, "with its zone"),
        ({"time_utc": "yesterday"}, "with its zone"),
        ({"domain": ""}, "or null"),
        ({"drafted": [3, 1.5]}, "a list of whole numbers"),
        ({"draft_lengths": []}, "entry k"),
        ({"accepted": []}, "positions"),
        ({"drafted": [1], "accepted": [9]}, "more accepted than drafted"),
        ({"draft_lengths": [0, 1]}, "rounds"),
        ({"gamma": 4}, "unknown key `gamma`"),
    ],
)
def test_a_malformed_line_is_an_error_that_names_file_line_and_remedy(
    tmp_path, request_line, change, words
):
    path = write(tmp_path / "telemetry.jsonl", request_line, request_line | change, request_line)
    with pytest.raises(ArtifactError) as caught:
        read_telemetry(path)
    message = str(caught.value)
    assert f"{path}:2" in message
    assert words in message
    assert "mend or delete that line" in message


@pytest.mark.parametrize("key", ["pair_digest", "drafted", "prompt_tokens"])
def test_a_missing_key_is_named(tmp_path, request_line, key):
    del request_line[key]
    with pytest.raises(ArtifactError, match=f"no key `{key}`"):
        read_telemetry(write(tmp_path / "telemetry.jsonl", request_line))


@pytest.mark.parametrize("text", ["[]\n", "{\n", "3\n", '{"a": 1} {"b": 2}\n'])
def test_a_file_without_any_line_of_telemetry_is_an_error(tmp_path, text):
    path = tmp_path / "telemetry.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match="telemetry.jsonl:1"):
        read_telemetry(path)


def test_a_last_line_that_is_being_written_is_left_out_and_stays_apart(tmp_path):
    first, second = stream(2, 0)
    path = tmp_path / "telemetry.jsonl"
    append_telemetry(path, first)
    whole = path.read_bytes()
    for length in range(1, len(whole) - 1):
        path.write_bytes(whole + whole[:length])
        found = read_telemetry(path)
        assert (found.requests, found.torn) == ([first], [])
    append_telemetry(path, second)
    found = read_telemetry(path)
    assert (found.requests, found.torn) == ([first, second], [2])


def test_a_line_that_was_torn_hides_none_of_the_others(tmp_path, request_line):
    path = write(tmp_path / "telemetry.jsonl", *[request_line] * 40)
    whole = path.read_bytes()
    line = whole.splitlines(keepends=True)[0]
    path.write_bytes(line[:30] + b"\n" + whole + b"\0" * 50 + b"\n" + line[30:] + whole)
    found = read_telemetry(path)
    assert (len(found.requests), found.torn) == (80, [1, 42, 43])


@pytest.mark.parametrize(("num_torn", "is_refused"), [(5, False), (6, True)])
def test_more_than_a_handful_of_torn_lines_is_an_error(
    tmp_path, request_line, num_torn, is_refused
):
    path = write(tmp_path / "telemetry.jsonl", *[request_line] * 99)
    path.write_bytes(b"{\n" * num_torn + path.read_bytes())
    if is_refused:
        with pytest.raises(ArtifactError, match="telemetry.jsonl:1: found 6 of 105 lines"):
            read_telemetry(path)
    else:
        assert len(read_telemetry(path).torn) == num_torn


def test_torn_lines_up_to_one_in_a_hundred_are_passed_over(tmp_path, request_line):
    path = write(tmp_path / "telemetry.jsonl", *[request_line] * 990)
    path.write_bytes(b"{\n" * 10 + path.read_bytes())
    assert len(read_telemetry(path).torn) == 10
    path.write_bytes(b"{\n" + path.read_bytes())
    with pytest.raises(ArtifactError, match="at most 10 torn lines"):
        read_telemetry(path)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((9, 4), 1),
        ((9, 2, 2), 2),
        ((0, 5, 3), 1),
        ((7,), 0),
    ],
)
def test_copied_rounds_do_not_count_for_the_usual_draft_length(lengths, expected):
    (request,) = stream(1, 0)
    assert dataclasses.replace(request, draft_lengths=lengths).usual_draft_length == expected


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path):
    first, second = stream(2, 0)
    path = tmp_path / "telemetry.jsonl"
    append_telemetry(path, first)
    whole = path.read_bytes()
    with files_up_to(len(whole) + 10), pytest.raises(ArtifactError, match="free disk space"):
        append_telemetry(path, second)
    assert path.read_bytes() == whole
    append_telemetry(path, second)
    assert read_telemetry(path).requests == [first, second]


def test_a_missing_file_says_where_telemetry_comes_from(tmp_path):
    with pytest.raises(ArtifactError, match="--telemetry"):
        read_telemetry(tmp_path / "none.jsonl")


CHILD = """
import sys
from pathlib import Path
from draftsmith.drift.telemetry import append_telemetry
from benchmarks.live_service import stream
for request in stream(100, int(sys.argv[2])):
    append_telemetry(Path(sys.argv[1]), request)
"""


def test_processes_that_append_at_once_keep_every_line_whole(tmp_path, monkeypatch):
    path = tmp_path / "telemetry.jsonl"
    monkeypatch.setenv("PYTHONPATH", f"{SOURCES / 'src'}:{SOURCES}")
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(path), str(seed)]) for seed in (0, 1)
    ]
    assert [child.wait(60) for child in children] == [0, 0]
    found = {(r.time_utc, r.committed, r.drafted) for r in read_telemetry(path).requests}
    assert found == {(r.time_utc, r.committed, r.drafted) for s in (0, 1) for r in stream(100, s)}
