"""Thousands of requests leave nothing behind: no row, no tensor, no object."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable

import pytest
import torch

from draftsmith.decoding import Engine, Event, Request, SamplingParams
from tests.decoding.arrivals import CONTEXT, live_through, random_requests
from tests.decoding.laws import build_proposer

ROWS = 4
WAVES = 4
# A request and its events, kept, are about 2 KiB of objects; half of 200 are measured.
OBJECT_TOLERANCE = 32 * 1024
TENSOR_TOLERANCE = 4 * 1024  # of a cache of half a megabyte


@pytest.fixture
def engine(llama) -> Engine:
    made = Engine(
        llama.target, build_proposer("lookup_first", llama), max_rows=ROWS, draft_length=3
    )
    made.open(CONTEXT, prefill_chunk=8)
    return made


def tensor_bytes() -> int:
    """Memory of all tensors that something holds on to; a shared one counts once."""
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter):  # a compiler's fakes hold nothing
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def object_bytes() -> int:
    """Memory that lines of the package asked for and something still holds.

    What other threads of the process and late imports keep is not the engine's.
    """
    ours = tracemalloc.Filter(inclusive=True, filename_pattern="*/draftsmith/*")
    traces = tracemalloc.take_snapshot().filter_traces([ours])
    return sum(line.size for line in traces.statistics("filename"))


def growth(wave: Callable[[int], None]) -> tuple[int, int]:
    """Bytes of objects and of tensors that the later half of the waves leaves behind.

    The first half is also the first use of what is made once and kept.
    """
    held = []
    tracemalloc.start()
    try:
        for number in range(WAVES):
            wave(number)
            gc.collect()
            held.append((object_bytes(), tensor_bytes()))
    finally:
        tracemalloc.stop()
    before, after = held[WAVES // 2 - 1], held[-1]
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.soak)])
def test_memory_stays_flat_and_every_row_comes_back(engine, count):
    def wave(number: int) -> None:
        requests = random_requests(count // WAVES, seed=number)
        day = live_through(engine, requests, random.Random(number))
        assert len(day.answers) + len(day.aborted) == len(requests)
        assert day.num_preempted > 5

    objects, tensors = growth(wave)
    assert objects < OBJECT_TOLERANCE
    assert tensors < TENSOR_TOLERANCE
    params = SamplingParams(max_new_tokens=9)
    engine.submit([Request(f"last{index}", [1, 2], params) for index in range(ROWS)])
    assert len(engine.step()) == ROWS


@pytest.mark.parametrize("leak", ["objects", "tensors"])
def test_a_leak_would_be_seen(engine, monkeypatch, leak):
    kept: list[object] = []
    step = engine.step

    def leaking() -> list[Event]:
        events = step()
        kept.extend(events if leak == "objects" else [torch.zeros(16) for _ in events])
        return events

    monkeypatch.setattr(engine, "step", leaking)
    objects, tensors = growth(
        lambda seed: live_through(engine, random_requests(40, seed), random.Random(seed))
    )
    grown, tolerance = {
        "objects": (objects, OBJECT_TOLERANCE),
        "tensors": (tensors, TENSOR_TOLERANCE),
    }[leak]
    assert grown > tolerance
