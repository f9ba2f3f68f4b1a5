"""Takeovers by pairs that differ in more than the draft's weights, or in nothing else.

A registry of its own: version 2 has another draft of the same shape, version 3 another target with
another tokenizer.
"""

from __future__ import annotations

import gc
import itertools
import shutil
import threading
import weakref
from typing import NamedTuple

import pytest

from draftsmith.artifacts import write_json
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts
from draftsmith.evaluation.profiling import kept_costs
from draftsmith.registry.loading import COSTS, load_pair
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.serving.gateway import Call
from tests import tiny_target
from tests.registry.small_pairs import CONFIG, TAGS
from tests.serving.service import (
    CHAMPION,
    QUESTIONS,
    TRAINING_STEPS,
    chat,
    client_of,
    health,
    is_idle,
    make_draft,
    make_target,
    post,
    serving,
    wait_until,
)

POLL_S = 0.05
MAX_ROWS = 4
DRAFT_LENGTH = 3
VERSIONS = {"1": ("target", (0, 3)), "2": ("target", (1, 2)), "3": ("away", (0, 3))}


class Project(NamedTuple):
    """A folder with a registry."""

    root: object
    store: PairStore

    def move(self, server, version):
        """Make a version champion, and wait until it answers."""
        self.store.promote(version, ["next"])
        wait_until(lambda: health(server)["version"] == version)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("others")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        make_target(root / "target")
        tokenizer = tiny_target.make_tokenizer(400)
        model = tiny_target.make_model(tokenizer)
        tiny_target.train(model, tokenizer, "away", TRAINING_STEPS)
        tiny_target.save(model, tokenizer, root / "away")
        store = PairStore(root, CONFIG)
        write_json(root / "benchmark.json", {"draft_length": DRAFT_LENGTH})
        for version, (target, layers) in VERSIONS.items():
            folder = root / f"draft-{version}"
            record = make_draft(root / target, folder, layers=layers)
            store.register(
                record,
                folder,
                evidence={"benchmark.json": root / "benchmark.json"},
                tags=TAGS,
                target_source=str(root / target),
            )
        yield Project(root, store)


@pytest.fixture(scope="module")
def pairs(project):
    """Each version offline."""
    return {v: load_pair(f"models:/{CONFIG.name}/{v}", root=project.root) for v in VERSIONS}


@pytest.fixture
def following(project):
    """A server of @champion, which is version 1."""
    project.store.promote("1", ["as before"])
    limits = {"max_rows": MAX_ROWS}
    with serving(project.root, CHAMPION, poll_s=POLL_S, limits=limits) as server:
        yield server


def fingerprint(pair):
    return f"pair-{pair.record.digest[:16]}"


class Load:
    """Callers that ask on and on; an answer must be that of the pair which it says it is of."""

    def __init__(self, server, pairs):
        self._server, self.seen, self.failures = server, [], []
        self._expected = {
            (fingerprint(pair), question): pair.generate(question, max_new_tokens=24)
            for pair in pairs
            for question in QUESTIONS[:4]
        }
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(4)]

    def _ask(self, place):
        client, question = client_of(self._server), QUESTIONS[place]
        while not self._stop.is_set():
            try:
                done = client.chat.completions.create(**chat(question))
                expected = self._expected[done.system_fingerprint, question]
                assert done.choices[0].message.content == expected.text
                assert done.usage.prompt_tokens == expected.num_prompt_tokens
                self.seen.append(done.system_fingerprint)
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


def freed(reference):
    """Whether nothing holds it any more."""
    gc.collect()
    return reference() is None


def test_a_pair_of_another_target_takes_over_under_load_and_gives_way_again(
    project, pairs, following
):
    gateway = following.state.gateway
    first, third = fingerprint(pairs["1"]), fingerprint(pairs["3"])
    target = weakref.ref(gateway.served.pair.target.model)
    begun = Call(gateway.served, 1, None)
    with Load(following, [pairs["1"], pairs["3"]]) as load:
        wait_until(lambda: first in load.seen)
        gateway._arriving.add(begun)  # keeps the old pair at work
        project.store.promote("3", ["another target"])
        wait_until(lambda: third in load.seen)
        other = weakref.ref(gateway.served.pair.target.model)
        assert target() is not None
        assert target() is not other()
        gateway._arriving.discard(begun)
        del begun
        wait_until(lambda: freed(target))
        project.store.promote("1", ["back"])
        wait_until(lambda: load.seen[-1] == first)
        wait_until(lambda: freed(other))
    assert load.failures == []
    assert set(load.seen) == {first, third}
    wait_until(lambda: is_idle(following))
    assert health(following)["target_digest"] == pairs["1"].record.target_digest
    assert 'swaps_total{outcome="taken over"} 2' in following.state.exposition()


def keep_costs(project, pair, draft_ms):
    """Measured, as it were: a step of the target costs 1 ms, and each further position a little."""
    shutil.rmtree(project.root / COSTS, ignore_errors=True)
    grid = pair._grid(MAX_ROWS)
    cell = ForwardCosts(1.0, draft_ms, {n: 1 + n / 1000 for n in range(1, grid.max_width + 1)})
    cells = dict.fromkeys(itertools.product(grid.rows, grid.contexts), cell)
    costs = RoundCosts(grid.rows, grid.contexts, cells)
    kept_costs(project.root / COSTS, pair._cost_key(MAX_ROWS), lambda: costs)


def num_drafted(server):
    """Of one answer."""
    body = chat(QUESTIONS[0], min_tokens=24, stop=[])
    return post(server, body).json()["usage"]["speculation"]["drafted"]


@pytest.mark.parametrize(("draft_ms", "pays"), [(0.01, True), (50.0, False)])
def test_drafting_is_shed_where_it_costs_too_much_and_adapts_through_a_promotion(
    project, pairs, draft_ms, pays
):
    """Version 2 drafts by the costs that were measured for version 1: its draft is as large."""
    keep_costs(project, pairs["1"], draft_ms)
    project.store.promote("1", ["as before"])
    limits = {"max_rows": MAX_ROWS}
    with serving(project.root, CHAMPION, poll_s=POLL_S, limits=limits) as server:
        for version in ("1", "2"):
            project.move(server, version)
            assert health(server)["draft_length"] == "adaptive"
            assert (num_drafted(server) > 0) == pays
            digest = pairs[version].record.digest
            plain = f'rounds_total{{pair_digest="{digest}",draft_length="0"}} 24'
            assert (plain not in server.state.exposition()) == pays


def test_where_costs_are_not_known_a_fixed_length_follows_and_the_log_says_so(
    project, pairs, caplog
):
    keep_costs(project, pairs["1"], 0.01)
    project.store.promote("1", ["as before"])
    limits = {"max_rows": MAX_ROWS}
    with serving(project.root, CHAMPION, poll_s=POLL_S, limits=limits) as server:
        project.move(server, "3")
        assert health(server)["draft_length"] == DRAFT_LENGTH
        assert "event=lengths_fixed version=3" in caplog.text
        project.move(server, "1")
        assert health(server)["draft_length"] == "adaptive"
