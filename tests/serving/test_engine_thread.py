"""The thread that drives engines: faults, order, and nobody who waits for ever."""

from __future__ import annotations

import copy
import queue
import threading
import time
from concurrent.futures import CancelledError

import pytest
import torch

from draftsmith.decoding import Engine, NoProposer, Request, SamplingParams
from draftsmith.serving.engine_thread import EngineThread

BAD_TOKEN = 2
PARAMS = SamplingParams(max_new_tokens=6)


@pytest.fixture
def running():
    """A thread, and the updates that it delivers."""
    updates = queue.Queue()

    def deliver(delivered):
        for update in delivered:
            updates.put(update)

    thread = EngineThread(deliver)
    thread.start()
    yield thread, updates
    if thread.is_alive:
        thread.close()


def last_updates(updates, count):
    """The last update of so many requests, by their ids."""
    found = {}
    while len(found) < count:
        update = updates.get(timeout=60)
        if update.is_last:
            found[update.request_id] = update
    return found


@pytest.fixture
def engine(pair):
    engine = Engine(pair.target.model, NoProposer(), max_rows=2, draft_length=0)
    engine.open(64)
    return engine


def test_a_fault_fails_its_request_and_no_other(running, pair):
    thread, updates = running
    broken = copy.deepcopy(pair.target.model)
    broken.set_output_embeddings(copy.deepcopy(broken.get_output_embeddings()))
    with torch.no_grad():
        embedding = torch.nn.Embedding.from_pretrained(
            broken.get_input_embeddings().weight.detach().clone()
        )
        embedding.weight[BAD_TOKEN] = torch.nan
    broken.set_input_embeddings(embedding)
    engine = Engine(broken, NoProposer(), max_rows=2, draft_length=0)
    engine.open(64)
    params = SamplingParams(max_new_tokens=6, logit_bias=[(BAD_TOKEN, -100)])
    requests = [Request("bad", [7, BAD_TOKEN, 9], params), Request("good", [7, 8, 9], params)]
    thread.submit(engine, requests)
    found = last_updates(updates, 2)
    assert "NaN" in str(found["bad"].fault)
    assert found["good"].fault is None
    assert len(found["good"].result.token_ids) == 6


def test_an_engine_that_breaks_fails_what_is_in_it_and_serves_on(running, engine, monkeypatch):
    thread, updates = running
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: 1 // 0)
    thread.submit(engine, [Request("a", [7], PARAMS), Request("b", [8], PARAMS)])
    found = last_updates(updates, 2)
    assert {type(update.fault) for update in found.values()} == {ZeroDivisionError}
    monkeypatch.setattr(engine, "step", step)
    thread.submit(engine, [Request("a", [7], PARAMS)])
    assert len(last_updates(updates, 1)["a"].result.token_ids) == 6


def test_what_the_engine_refuses_comes_back_as_a_fault(running, engine):
    thread, updates = running
    thread.submit(engine, [Request("long", [7] * 70, PARAMS)])
    update = last_updates(updates, 1)["long"]
    assert "76 tokens" in str(update.fault)
    assert update.is_refused


def broken(*_):
    raise ZeroDivisionError


def test_an_engine_that_cannot_even_end_a_request_fails_it_and_the_others_serve_on(
    running, engine, pair, monkeypatch
):
    thread, updates = running
    other = Engine(pair.target.model, NoProposer(), max_rows=1, draft_length=0)
    other.open(64)
    for name in ("abort", "open"):
        monkeypatch.setattr(engine, name, broken)
    long = SamplingParams(max_new_tokens=60, min_new_tokens=60, stop_token_ids=(1,))
    thread.submit(engine, [Request("a", [7], long)])
    thread.abort(["a"])
    assert type(last_updates(updates, 1)["a"].fault) is ZeroDivisionError
    thread.submit(other, [Request("b", [7], PARAMS)])
    assert len(last_updates(updates, 1)["b"].result.token_ids) == 6


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_ended(running, engine, monkeypatch):
    thread, updates = running
    begun, held = threading.Event(), threading.Event()

    def chore():
        begun.set()
        held.wait(60)
        yield

    thread.run(chore())
    assert begun.wait(60)
    thread.submit(engine, [Request("a", [7], PARAMS)])
    monkeypatch.setattr(thread, "_decode", broken)
    held.set()
    assert "has ended" in str(last_updates(updates, 1)["a"].fault)
    thread.submit(engine, [Request("b", [7], PARAMS)])
    assert "has ended" in str(last_updates(updates, 1)["b"].fault)
    with pytest.raises(CancelledError):
        thread.run(chore()).result(60)


def test_two_engines_take_turns_and_give_what_each_gives_alone(running, engine, pair):
    thread, updates = running
    other = Engine(pair.target.model, NoProposer(), max_rows=1, draft_length=0)
    other.open(64)
    alone = Engine(pair.target.model, NoProposer(), max_rows=1, draft_length=0)
    expected = [alone.generate([Request("x", [i], PARAMS)])[0].token_ids for i in (7, 8)]
    thread.submit(engine, [Request("a", [7], PARAMS)])
    thread.submit(other, [Request("b", [8], PARAMS)])
    found = last_updates(updates, 2)
    assert [found[name].result.token_ids for name in "ab"] == expected


def test_a_chore_goes_on_between_rounds_and_its_error_is_its_callers(running, engine):
    thread, updates = running

    def chore():
        for _ in range(3):
            yield
        return "done"

    def broken():
        yield
        raise ValueError("broken")

    thread.submit(engine, [Request("a", [7], PARAMS)])
    done, failed = thread.run(chore()), thread.run(broken())
    assert done.result(60) == "done"
    with pytest.raises(ValueError, match="broken"):
        failed.result(60)
    assert last_updates(updates, 1)["a"].result is not None


def test_a_chore_gets_as_much_time_as_the_rounds_beside_it(running, engine, monkeypatch):
    """Its steps are quick and the rounds are slow, so it needs few of them."""
    thread, updates = running
    steps, rounds = 200, []
    step = engine.step

    def slow_step():
        rounds.append(None)
        time.sleep(0.05)
        return step()

    def chore():
        begun.set()
        for _ in range(steps):
            yield

    begun = threading.Event()
    monkeypatch.setattr(engine, "step", slow_step)
    long = SamplingParams(max_new_tokens=60, min_new_tokens=60, stop_token_ids=(1,))
    thread.submit(engine, [Request("a", [7], long)])
    done = thread.run(chore())
    assert begun.wait(60)
    before = len(rounds)
    done.result(60)
    assert len(rounds) - before < steps / 4
    assert last_updates(updates, 1)["a"].result is not None


def test_closing_ends_what_is_unfinished(running, engine):
    thread, updates = running
    long = SamplingParams(max_new_tokens=60, min_new_tokens=60, stop_token_ids=(1,))
    thread.submit(engine, [Request(name, [7], long) for name in "abc"])
    thread.abort(["a", "nobody"])
    assert last_updates(updates, 1)["a"].result.finish_reason == "abort"
    thread.close()
    assert set(last_updates(updates, 2)) == {"b", "c"}
    assert not thread.is_alive
