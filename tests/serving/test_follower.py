"""What a follower does at each look, without pairs and by a clock that the test sets."""

from __future__ import annotations

import itertools
import weakref
from types import SimpleNamespace

import pytest

from draftsmith.errors import DamagedPairError, RegistryError
from draftsmith.serving import follower as module
from draftsmith.serving.follower import Follower, FollowOptions
from draftsmith.serving.served_pair import EngineOptions
from draftsmith.serving.settings import Limits
from draftsmith.serving.state import ServerState

FACTS = {"found": "a broken connection", "expected": "a whole file", "remedy": "wait"}


class Served:
    """A pair that answers."""

    pair, name, digest, draft_length = None, "demo", "digest", 3

    def __init__(self, version):
        self.version = version


class Source:
    """Names a version whose download fails unless told otherwise, and notes when it was tried."""

    uri = "models:/demo@champion"

    def __init__(self, clock):
        self.named, self.error = "2", RegistryError("fetching", **FACTS)
        self.tries, self.on_load = [], lambda: None
        self._clock = clock

    def version(self):
        return self.named

    def load(self, version, *, beside):
        self.tries.append(self._clock.now)
        self.on_load()
        if self.error is not None:
            raise self.error


class Gateway:
    """Version 1 answers; `num_left` samples are left of any pair that was replaced."""

    def __init__(self, metrics):
        self.served, self.num_left = Served("1"), 0
        self.records = SimpleNamespace(metrics=metrics)
        self.thread = SimpleNamespace(run=lambda chore: SimpleNamespace(result=lambda: chore))

    def replace(self, served):
        self.served = served

    def num_of(self, served):
        return self.num_left


class Watch:
    """A follower that looks once a second, while a service of version 1 goes on."""

    def __init__(self, monkeypatch):
        self.now, self.outcomes = 0.0, []
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(module, "_free_memory", lambda: None)
        self.source = Source(self)
        monkeypatch.setattr(module, "prepare", lambda pair, name, version, **_: Served(version))
        monkeypatch.setattr(module, "self_test", lambda served: None)
        self.gateway = Gateway(SimpleNamespace(swapped=self.outcomes.append))
        state = ServerState(self.gateway, None)
        self.swap = state.swap
        options = FollowOptions(self.source, EngineOptions(), Limits(), poll_s=1.0)
        self._follower = Follower(state, options, lambda call: call())

    def look(self, *, seconds):
        for _ in range(seconds):
            self._follower.look()
            self.now += 1

    @property
    def waits(self):
        return [later - earlier for earlier, later in itertools.pairwise(self.source.tries)]


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def test_a_download_that_breaks_off_is_tried_again_less_and_less_often(watch):
    watch.look(seconds=2000)
    doubled = [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
    assert watch.waits == doubled + [300.0] * (len(watch.waits) - len(doubled))
    assert len(watch.waits) > len(doubled)


def test_it_is_told_as_a_registry_that_is_away_and_not_as_a_fault_of_the_pair(watch):
    watch.look(seconds=5)
    assert "a broken connection" in watch.swap.unreachable
    assert watch.swap.refused is None
    assert watch.outcomes == []


def test_another_version_is_tried_at_once_and_as_often_as_the_first_was(watch):
    watch.look(seconds=100)
    watch.source.named, watch.source.tries = "3", []
    watch.look(seconds=20)
    assert watch.source.tries[0] == 100
    assert watch.waits == [2.0, 4.0, 8.0]


def test_when_the_alias_comes_back_nothing_is_away_any_more(watch):
    watch.look(seconds=5)
    watch.source.named = "1"
    watch.look(seconds=1)
    assert watch.swap.unreachable is None


def test_a_damaged_pair_is_refused_once_and_not_tried_again(watch):
    watch.source.error = DamagedPairError("fetching", **FACTS)
    watch.look(seconds=1000)
    assert len(watch.source.tries) == 1
    assert watch.swap.refused.is_final
    assert watch.outcomes == ["refused"]


@pytest.fixture
def loading(watch):
    """The same watch; what is named can be loaded."""
    watch.source.error = None
    return watch


def test_a_move_back_while_a_pair_is_loaded_is_not_overtaken_by_it(loading):
    first = loading.gateway.served
    loading.source.on_load = lambda: setattr(loading.source, "named", "1")
    loading.look(seconds=5)
    assert loading.gateway.served is first
    assert (loading.source.tries, loading.outcomes) == ([0.0], [])
    assert (loading.swap.refused, loading.swap.unreachable) == (None, None)


def test_a_third_version_that_is_named_meanwhile_is_loaded_next(loading):
    loading.source.on_load = lambda: setattr(loading.source, "named", "3")
    loading.look(seconds=2)
    assert loading.gateway.served.version == "3"
    assert (loading.source.tries, loading.outcomes) == ([0.0, 1.0], ["taken over"])


def test_a_pair_is_not_taken_where_nobody_can_say_whether_it_is_named_yet(loading, monkeypatch):
    first = loading.gateway.served

    def away():
        raise RegistryError("asking", **FACTS)

    loading.source.on_load = lambda: monkeypatch.setattr(loading.source, "version", away)
    loading.look(seconds=1)
    assert loading.gateway.served is first
    assert "a broken connection" in loading.swap.unreachable


@pytest.mark.parametrize("num_left", [0, 1])
def test_the_pair_that_was_replaced_comes_back_without_a_load(loading, num_left):
    first = loading.gateway.served
    loading.look(seconds=1)
    assert loading.gateway.served.version == "2"
    loading.source.named, loading.gateway.num_left = "1", num_left
    loading.look(seconds=1)
    assert loading.gateway.served is first
    assert (len(loading.source.tries), loading.outcomes) == (1, ["taken over"] * 2)


@pytest.mark.parametrize("is_away", [False, True])
def test_the_pair_that_was_replaced_is_let_go_once_it_has_ended_what_it_began(
    loading, monkeypatch, is_away
):
    def away():
        raise RegistryError("asking", **FACTS)

    first = weakref.ref(loading.gateway.served)
    loading.gateway.num_left = 1
    loading.look(seconds=3)
    assert first() is not None
    loading.gateway.num_left = 0
    if is_away:
        monkeypatch.setattr(loading.source, "version", away)
    loading.look(seconds=1)
    assert first() is None
