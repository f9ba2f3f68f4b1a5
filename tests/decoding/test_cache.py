from __future__ import annotations

import torch

from draftsmith.decoding.cache import SlotCache

HEADS, DIM, ROWS, SLOTS = 2, 3, 4, 6


def states(rows: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, HEADS, width, DIM, generator=generator)
    return keys, values


def filled() -> SlotCache:
    cache = SlotCache(1, rows=ROWS, slots=SLOTS)
    cache.begin(torch.arange(SLOTS).expand(ROWS, SLOTS), first_row=0, num_slots=SLOTS)
    cache.update(*states(ROWS, SLOTS, 0), 0)
    return cache


def test_every_row_is_written_at_its_own_positions_and_nowhere_else():
    cache = filled()
    before = cache.layers[0].keys.clone(), cache.layers[0].values.clone()
    positions = torch.tensor([[4, 5], [0, 1]])
    cache.begin(positions, first_row=1, num_slots=SLOTS)
    new = states(2, 2, 1)
    cache.update(*new, 0)
    after = cache.layers[0].keys, cache.layers[0].values
    for old, written, store in zip(before, new, after, strict=True):
        want = old.clone()
        for row in range(2):
            want[row + 1, :, positions[row]] = written[row]
        assert store.equal(want)


def test_a_forward_reads_its_own_rows_and_only_the_slots_it_asked_for():
    cache = filled()
    cache.begin(torch.tensor([[3], [2]]), first_row=2, num_slots=4)
    keys, values = cache.update(*states(2, 1, 1), 0)
    assert keys.equal(cache.layers[0].keys[2:4, :, :4])
    assert values.equal(cache.layers[0].values[2:4, :, :4])


def test_a_read_is_a_view_so_that_nothing_is_copied_per_step():
    cache = filled()
    cache.begin(torch.tensor([[3]]), first_row=0, num_slots=5)
    keys, _ = cache.update(*states(1, 1, 1), 0)
    assert keys.data_ptr() == cache.layers[0].keys.data_ptr()


def test_a_moved_row_replaces_another_and_leaves_the_rest():
    cache = filled()
    before = cache.layers[0].keys.clone(), cache.layers[0].values.clone()
    cache.move_row(3, 1)
    after = cache.layers[0].keys, cache.layers[0].values
    for old, new in zip(before, after, strict=True):
        assert new.equal(old[[0, 3, 2, 3]])


def test_a_cleared_row_is_zero_and_leaves_the_rest():
    cache = filled()
    before = cache.layers[0].keys.clone(), cache.layers[0].values.clone()
    cache.layers[0].keys[2] = torch.nan
    cache.clear_row(2)
    after = cache.layers[0].keys, cache.layers[0].values
    for old, new in zip(before, after, strict=True):
        assert new[2].count_nonzero() == 0
        assert new[[0, 1, 3]].equal(old[[0, 1, 3]])


def test_rows_of_a_cache_that_was_never_written_may_be_moved_and_cleared():
    cache = SlotCache(2, rows=2, slots=4)
    cache.move_row(1, 0)
    cache.clear_row(0)


def test_layers_are_written_apart():
    cache = SlotCache(2, rows=1, slots=4)
    cache.begin(torch.tensor([[0, 1]]), first_row=0, num_slots=4)
    first, second = states(1, 2, 1), states(1, 2, 2)
    cache.update(*first, 0)
    cache.update(*second, 1)
    assert cache.layers[0].keys[:, :, :2].equal(first[0])
    assert cache.layers[1].keys[:, :, :2].equal(second[0])
