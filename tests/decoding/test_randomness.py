from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats

from draftsmith.decoding.randomness import Purpose, request_key, uniform

NUM_DRAWS = 20_000
_WORD = 1 << 64


def splitmix64(state: int) -> int:
    """The published mixer in unbounded integers (Steele, Lea, Flood 2014)."""
    x = (state + 0x9E3779B97F4A7C15) % _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _WORD
    return x ^ (x >> 31)


def keys(count: int) -> torch.Tensor:
    return torch.tensor([request_key(0, str(i)) for i in range(count)])


def streams() -> dict[str, torch.Tensor]:
    """Long series that differ in one argument each."""
    positions = torch.arange(NUM_DRAWS)
    key = torch.tensor(request_key(0, "a"))
    series = {f"{p.name}": uniform(key, positions, p) for p in Purpose}
    series["next position"] = uniform(key, positions + 1, Purpose.DRAFT)
    series["next key"] = uniform(key + 1, positions, Purpose.DRAFT)
    series["other seed"] = uniform(torch.tensor(request_key(1, "a")), positions, Purpose.DRAFT)
    series["over keys"] = uniform(keys(NUM_DRAWS), torch.tensor(5), Purpose.DRAFT)
    return series


def test_the_mixer_is_splitmix64():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the published first output for seed 0
    for key, position, purpose in itertools.product([0, -1, 2**63 - 1, -(2**63)], [0, 9], Purpose):
        word = splitmix64(splitmix64(splitmix64(key % _WORD) ^ position) ^ purpose)
        got = uniform(torch.tensor([key]), torch.tensor([position]), purpose)
        assert got.item() == (word >> 11) / 2**53


def test_draws_lie_in_the_half_open_unit_interval():
    for series in streams().values():
        assert series.dtype == torch.float64
        assert series.min() >= 0
        assert series.max() < 1


@pytest.mark.parametrize("name", streams())
def test_draws_are_flat(name):
    counts = torch.histc(streams()[name], bins=64, min=0, max=1)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_purposes_positions_keys_and_seeds_are_uncorrelated():
    series = streams()
    for (_, one), (_, other) in itertools.combinations(series.items(), 2):
        correlation = torch.corrcoef(torch.stack([one, other]))[0, 1]
        assert abs(float(correlation)) < 4.5 / NUM_DRAWS**0.5


def test_pairs_of_draws_fill_the_square_evenly():
    series = streams()
    for one, other in (("DRAFT", "ACCEPT"), ("ACCEPT", "SAMPLE"), ("DRAFT", "next position")):
        cells = (series[one] * 8).long() * 8 + (series[other] * 8).long()
        counts = torch.bincount(cells, minlength=64)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_a_draw_depends_on_its_own_key_and_position_only():
    some = keys(3)
    positions = torch.tensor([[4, 5], [9, 10], [4, 5]])
    together = uniform(some[:, None], positions, Purpose.ACCEPT)
    for row in range(3):
        assert uniform(some[row], positions[row], Purpose.ACCEPT).equal(together[row])


def test_request_keys_repeat_and_differ_by_seed_and_id():
    names = [(seed, name) for seed in range(20) for name in ("1", "2", "11", "1/1", "")]
    found = [request_key(*pair) for pair in names]
    assert found == [request_key(*pair) for pair in names]
    assert len(set(found)) == len(names)
    assert all(-(2**63) <= key < 2**63 for key in found)
