"""The soak: what goes wrong is found, and on a tiny pair nothing does."""

from __future__ import annotations

import json

import pytest

from benchmarks import soak
from benchmarks.soak_load import (
    DIFFERENT,
    REFUSED,
    Answer,
    Load,
    Wanted,
    WrongAnswerError,
    read_stream,
)
from benchmarks.soak_pairs import PROMOTION, ROLLBACK, Move, folder_of, tiny_folder
from draftsmith.registry.loading import load_directory
from tests.serving.service import NAME, PINNED, QUESTIONS, chat, wait_until
from tests.tiny_target import write_prompts

OVERLONG = chat(QUESTIONS[0], max_tokens=1 << 20)


def chunk(text):
    return {"choices": [{"delta": {"content": text}}], "system_fingerprint": "pair-1"}


def stream(*events):
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def test_a_stream_is_its_pieces():
    usage = {"choices": [], "system_fingerprint": "pair-1"}
    found = read_stream(stream(chunk("a b"), chunk(None), chunk(" c"), usage, "[DONE]"))
    assert found == ("a b c", "pair-1")


@pytest.mark.parametrize(
    "said", [b"", stream(chunk("a")), stream(chunk("a"), {"error": {"code": "server_ending"}})]
)
def test_a_stream_that_breaks_off_is_a_failure(said):
    with pytest.raises(WrongAnswerError, match="a stream that ends with"):
        read_stream(said)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Wanted(chat(QUESTIONS[0]), "another text"), "expected 'another text'"),
        (Wanted(chat(QUESTIONS[0], top_k=-1), "a text"), "status 400"),
        (Wanted(OVERLONG, "a text"), "messages: found"),
        (Wanted(chat(QUESTIONS[0]), None), "status 200 to what asks for too much"),
    ],
    ids=["text", "refusal", "limit", "no limit"],
)
def test_what_was_not_due_is_a_failure(server, wanted, words):
    with Load(server.url, NAME, [wanted], callers=2) as load:
        wait_until(lambda: load.failures)
    assert all(words in reason for reason in load.failures)


@pytest.mark.parametrize(
    ("wanted", "outcome"),
    [
        (Wanted(OVERLONG, None), REFUSED),
        (Wanted(chat(QUESTIONS[0]), "what float32 would say"), DIFFERENT),
    ],
    ids=["limit", "near-tie"],
)
def test_what_may_be_is_counted(server, wanted, outcome):
    with Load(server.url, NAME, [wanted], callers=1, is_exact=False) as load:
        wait_until(lambda: load.counts[outcome])
    assert load.failures == {}


def test_a_server_that_is_not_there_is_a_failure():
    with Load("http://127.0.0.1:9", NAME, [Wanted(OVERLONG, None)], callers=1) as load:
        wait_until(lambda: load.failures)
    assert load.counts == {}


def test_growth_is_that_behind_the_warm_up():
    mib_at = {0.0: 100.0, 9.0: 190.0, 30.0: 200.0, 60.0: 201.0, 90.0: 202.0}
    samples = [soak.Sample(*at, is_other=False) for at in mib_at.items()]
    assert soak.memory(samples) == {
        "start_mib": 100.0,
        "end_mib": 202.0,
        "most_mib": 202.0,
        "growth_a_minute_mib": 2.0,
        "growth_mib": 2.0,
    }


def test_a_move_is_followed_when_the_other_pair_takes_a_request():
    """The longest answer was asked for first."""
    answers = [Answer(12.0, 14.0, "pair-b"), Answer(11.5, 19.0, "pair-b")]
    move = Move(ROLLBACK, "b", since_s=10.0)
    assert soak.first_of(answers, move) == {"s_to_first_request": 1.5, "s_to_first_answer": 4.0}


def report_of(*, swap_s=1.0, growth=0.0, slope=0.0, minutes=15.0):
    swaps = [{"kind": ROLLBACK, "s_to_first_request": seconds} for seconds in (0.5, swap_s)]
    grown = {"growth_mib": growth, "growth_a_minute_mib": slope}
    return {"swaps": swaps, "memory": grown, "minutes": minutes}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"swap_s": 10.01}, "a rollback was followed after 10.01 s, later than 10"),
        ({"growth": 64.5}, "grew by 64.5 MiB, by more than 64"),
        ({"slope": 4.1}, "grew by 4.1 MiB a minute, by more than 4"),
    ],
)
def test_what_is_beyond_a_limit_is_told(given, words):
    (found,) = soak.exceeded(report_of(**given))
    assert words in found


@pytest.mark.parametrize(
    "given",
    [{"swap_s": 10.0}, {"growth": 64.0}, {"slope": 4.0}, {"growth": -80.0}]
    + [{"slope": 40.0, "minutes": 4.9}],
)
def test_what_is_within_the_limits_is_not(given):
    assert soak.exceeded(report_of(**given)) == []


def test_a_pair_that_comes_and_goes_is_no_growth():
    """Every fifth sample is of two pairs, and so is the last."""
    samples = [
        soak.Sample(float(at), 200.0 if at % 5 else 300.0, is_other=False) for at in range(101)
    ]
    found = soak.memory(samples)
    assert (found["end_mib"], found["growth_mib"]) == (300.0, 0.0)


@pytest.mark.parametrize("growth", [0.0, 3.0])
def test_a_pair_that_needs_more_than_the_other_is_no_growth(growth):
    """Seven turns of a minute, four of the smaller pair: a plain line would lean."""
    samples = [
        soak.Sample(at, 900.0 + growth * at / 60 + 80.0 * is_other, is_other=is_other)
        for at in map(float, range(0, 420, 5))
        for is_other in (at // 60 % 2 == 1,)
    ]
    assert soak.memory(samples)["growth_a_minute_mib"] == growth


@pytest.mark.parametrize(
    ("failures", "limits", "status"),
    [({}, [], 0), ({"a text": 1}, [], 1), ({}, ["memory grew"], 1)],
)
def test_the_exit_status_tells_of_failures(monkeypatch, failures, limits, status):
    monkeypatch.setattr(soak, "run", lambda _: {"failures": failures, "exceeded": limits})
    assert soak.main([]) == status


def test_a_tiny_pair_is_made_on_the_spot(tmp_path):
    folder = tiny_folder(tmp_path / "tiny", steps=1)
    pair = load_directory(folder_of(str(folder)))
    assert pair.draft_length == 3
    assert len(pair.generate(QUESTIONS[0], max_new_tokens=4).token_ids) == 4


@pytest.mark.slow
def test_a_server_under_load_follows_every_move_and_drains(project, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(project.root)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(variable, raising=False)  # the soak drops them for good
    before = project.store.champion().version, len(project.store.history())
    write_prompts(tmp_path / "prompts.jsonl")
    out = tmp_path / "soak.json"
    sizes = ["--minutes", "0.33", "--swap-every", "4", "--callers", "4"]
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(out)]
    status = soak.main([PINNED, *sizes, *options])
    report = json.loads(out.read_text())
    assert report["failures"] == {}
    assert status == bool(report["exceeded"])  # a busy machine may be slow
    for outcome in ("answered", "answered in a stream", "cancelled", "refused by its own limit"):
        assert report["requests"][outcome] > 0
    assert DIFFERENT not in report["requests"]
    assert [swap["kind"] for swap in report["swaps"]][:2] == [PROMOTION, ROLLBACK]
    assert 0 < report["memory"]["start_mib"] <= report["memory"]["most_mib"]
    assert "FAILED" not in capsys.readouterr().out
    assert (project.store.champion().version, len(project.store.history())) == before
