"""The alias moves: another pair takes over under load, or is refused and the old one stays."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from safetensors.torch import load_file, save_file

from draftsmith.artifacts import short
from draftsmith.errors import RegistryError
from draftsmith.serving import served_pair
from draftsmith.serving.gateway import Call
from draftsmith.serving.source import PairSource
from tests.serving.service import (
    CHAMPION,
    PATIENCE_S,
    QUESTIONS,
    chat,
    client_of,
    health,
    is_idle,
    post,
    serving,
    wait_until,
)

POLL_S = 0.05


@pytest.fixture
def following(project):
    """A server of @champion, which is version 1 before and after."""
    with serving(project.root, CHAMPION, poll_s=POLL_S, limits={"max_rows": 4}) as server:
        assert health(server)["version"] == "1"
        yield server
    if project.store.champion().version != "1":
        project.store.promote("1", ["as before"])


class Load:
    """Callers that ask on and on; greedy answers are all the same target's."""

    def __init__(self, server, pair):
        self._server, self.answers, self.failures = server, [], []
        self._expected = {q: pair.generate(q, max_new_tokens=24).text for q in QUESTIONS[:4]}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(4)]

    def _ask(self, place):
        client, question = client_of(self._server), QUESTIONS[place]
        while not self._stop.is_set():
            try:
                done = client.chat.completions.create(**chat(question))
                text = done.choices[0].message.content
                self.answers.append(done.system_fingerprint)
                assert text == self._expected[question]
            except Exception as error:
                self.failures.append(error)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def test_a_promotion_and_a_rollback_under_load_cost_no_request(project, pair, following):
    gateway = following.state.gateway
    first = weakref.ref(gateway.served)
    target = weakref.ref(gateway.served.pair.target.model)
    fingerprints = {v: f"pair-{project.pair(v).record.digest[:16]}" for v in ("1", "2")}
    with Load(following, pair) as load:
        wait_until(lambda: len(load.answers) > 8)
        project.store.promote("2", ["faster"])
        wait_until(lambda: load.answers[-1] == fingerprints["2"])
        assert gateway.served.pair.target.model is target()
        wait_until(lambda: (gc.collect(), first())[1] is None)
        project.store.rollback(reason="slower after all", is_reachable=lambda item: True)
        wait_until(lambda: load.answers[-1] == fingerprints["1"])
    assert load.failures == []
    assert set(load.answers) == set(fingerprints.values())
    wait_until(lambda: is_idle(following))
    assert health(following)["refused"] is None
    metrics = following.state.exposition()
    assert 'draftsmith_swaps_total{outcome="taken over"} 2' in metrics
    for version in ("1", "2"):
        assert f'num_drafts_total{{pair_digest="{project.pair(version).record.digest}"}}' in metrics


@pytest.fixture
def promoted_again(project):
    """Version 2 without its quarantine."""
    client = project.store.catalog.client
    if "quarantined" in project.store.resolve("2").tags:
        client.delete_model_version_tag("demo", "2", "quarantined")
    return project.store


def test_an_idle_server_frees_the_engine_that_was_replaced(project, following, promoted_again):
    assert post(following, chat(QUESTIONS[0])).status_code == 200
    engine = weakref.ref(following.state.gateway.served.engine)
    promoted_again.promote("2", ["faster"])
    wait_until(lambda: health(following)["version"] == "2")
    wait_until(lambda: (gc.collect(), engine())[1] is None)


def test_the_way_back_is_open_while_the_old_pair_ends_what_it_began(
    project, following, promoted_again
):
    gateway = following.state.gateway
    first = gateway.served
    begun = Call(first, 1, None)
    gateway._arriving.add(begun)
    promoted_again.promote("2", ["faster"])
    wait_until(lambda: health(following)["version"] == "2")
    project.store.promote("1", ["back"])
    wait_until(lambda: health(following)["version"] == "1")
    assert gateway.served is first
    gateway._arriving.discard(begun)


def test_a_rollback_while_a_pair_is_loaded_is_not_overtaken(
    project, following, promoted_again, monkeypatch, caplog
):
    load, begun, released, loaded = PairSource.load, threading.Event(), threading.Event(), []

    def slowly(self, version, **given):
        begun.set()
        assert released.wait(PATIENCE_S)
        pair = load(self, version, **given)
        loaded.append(weakref.ref(pair.draft.model))
        return pair

    caplog.set_level("INFO", "draftsmith")
    monkeypatch.setattr(PairSource, "load", slowly)
    first = following.state.gateway.served
    promoted_again.promote("2", ["faster"])
    assert begun.wait(PATIENCE_S)
    project.store.rollback(reason="slower after all", is_reachable=lambda item: True)
    released.set()
    wait_until(lambda: "event=overtaken version=2" in caplog.text)
    wait_until(lambda: (gc.collect(), loaded[0]())[1] is None)  # nothing of it is kept
    assert following.state.gateway.served is first
    assert post(following, chat(QUESTIONS[0])).status_code == 200
    metrics = following.state.exposition()
    assert 'swaps_total{outcome="taken over"} 0' in metrics
    assert 'swaps_total{outcome="refused"} 0' in metrics


def test_what_failed_by_chance_is_tried_again(following, promoted_again, monkeypatch):
    load, failures = PairSource.load, [MemoryError(), OSError("the disk is away")]

    def by_chance(self, version, **given):
        if failures:
            raise failures.pop()
        return load(self, version, **given)

    monkeypatch.setattr(PairSource, "load", by_chance)
    promoted_again.promote("2", ["faster"])
    wait_until(lambda: health(following)["version"] == "2")
    assert health(following)["refused"] is None
    assert 'swaps_total{outcome="refused"} 1' in following.state.exposition()


def test_a_pair_that_fails_its_test_is_refused_and_the_old_one_stays(
    project, following, promoted_again, monkeypatch, caplog
):
    """The damage is in what is loaded: its answers with drafts are not those without."""
    real, engines = served_pair._greedy, []

    def damaged(engine, prompts):
        engines.append(weakref.ref(engine))
        answers = yield from real(engine, prompts)
        if engine.max_draft_length:
            answers["0"][2] += 1
        return answers

    monkeypatch.setattr(served_pair, "_greedy", damaged)
    promoted_again.promote("2", ["faster"])
    wait_until(lambda: health(following)["refused"])
    found = health(following)
    assert found["version"] == "1"
    assert found["refused"]["version"] == "2"
    assert found["refused"]["is_final"]
    assert "1 of 3 greedy answers that differ" in found["refused"]["reason"]
    assert "event=pair_refused version=2" in caplog.text
    wait_until(lambda: engines[-1]() is None)  # its memory is free at once
    assert post(following, chat(QUESTIONS[0])).status_code == 200
    project.store.promote("1", ["back"])
    wait_until(lambda: health(following)["refused"] is None)
    assert 'swaps_total{outcome="refused"} 1' in following.state.exposition()


def test_a_pair_whose_files_are_damaged_is_refused(project, following, promoted_again, tmp_path):
    pair = promoted_again.resolve("2").pair
    weights = (project.root / "mlartifacts").rglob("*/draft/model.safetensors")
    held = [path for path in weights if is_of(path, project, "2")]
    backup = [(path, path.read_bytes()) for path in held]
    copy = project.root / "models" / "champions" / short(pair.pair_digest)
    try:
        for path in [*held, copy / "draft" / "model.safetensors"]:
            if path.is_file():
                state = load_file(path)
                name = sorted(state)[0]
                save_file({**state, name: state[name] + 1}, path)
        promoted_again.promote("2", ["faster"])
        wait_until(lambda: health(following)["refused"])
        assert health(following)["refused"]["version"] == "2"
        assert post(following, chat(QUESTIONS[0])).status_code == 200
    finally:
        for path, data in backup:
            path.write_bytes(data)


def is_of(path, project, version):
    original = project.root / f"draft-{version}" / "model.safetensors"
    return path.read_bytes() == original.read_bytes()


@pytest.mark.parametrize(
    "error",
    [
        RegistryError("asking", found="nothing", expected="an answer", remedy="wait"),
        ValueError("a bug"),
    ],
)
def test_a_registry_that_is_away_is_said_and_the_pair_stays(following, monkeypatch, error):
    def away(self):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(PairSource, "version", away)
        wait_until(lambda: health(following)["registry"] != "ok")
        assert post(following, chat(QUESTIONS[0])).status_code == 200
    wait_until(lambda: health(following)["registry"] == "ok")


def test_a_version_is_not_followed(project, server):
    assert health(server)["followed"] is None
