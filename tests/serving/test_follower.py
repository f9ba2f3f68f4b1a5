"""How often a version is tried whose download breaks off, by a clock that the test sets."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from draftsmith.errors import DamagedPairError, RegistryError
from draftsmith.serving import follower as module
from draftsmith.serving.follower import Follower, FollowOptions
from draftsmith.serving.served_pair import EngineOptions
from draftsmith.serving.settings import Limits
from draftsmith.serving.state import ServerState

FACTS = {"found": "a broken connection", "expected": "a whole file", "remedy": "wait"}


class Source:
    """Names a version whose download fails, and notes when it was tried."""

    uri = "models:/demo@champion"

    def __init__(self, clock):
        self.named, self.error = "2", RegistryError("fetching", **FACTS)
        self.tries = []
        self._clock = clock

    def version(self):
        return self.named

    def load(self, version, *, beside):
        self.tries.append(self._clock.now)
        raise self.error


class Watch:
    """A follower that looks once a second, while a service of version 1 goes on."""

    def __init__(self, monkeypatch):
        self.now, self.outcomes = 0.0, []
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(module, "_free_memory", lambda: None)
        self.source = Source(self)
        metrics = SimpleNamespace(swapped=self.outcomes.append)
        gateway = SimpleNamespace(
            served=SimpleNamespace(version="1", pair=None, name="demo"),
            records=SimpleNamespace(metrics=metrics),
        )
        state = ServerState(gateway, None)
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
