from __future__ import annotations

import pytest
import torch

from draftsmith.drafts.vocabulary import choose_tokens, count_tokens, coverage, vocabulary_digest


def test_counts_are_by_id():
    counts = count_tokens([[2, 2, 0], [], [2, 4]], 6)
    assert counts.tolist() == [1, 0, 3, 0, 1, 0]
    assert counts.dtype == torch.int64


def test_nothing_counted_gives_zeros():
    assert count_tokens([], 3).tolist() == [0, 0, 0]


def test_the_most_frequent_ids_are_chosen_in_ascending_order():
    counts = torch.tensor([5, 0, 9, 1, 7])
    assert choose_tokens(counts, 3).tolist() == [0, 2, 4]


def test_ties_go_to_the_lower_id():
    counts = torch.tensor([0, 3, 3, 8, 3])
    assert choose_tokens(counts, 2).tolist() == [1, 3]
    assert choose_tokens(torch.zeros(5, dtype=torch.long), 3).tolist() == [0, 1, 2]


def test_many_ties_go_to_the_lower_ids():
    assert choose_tokens(torch.ones(5000, dtype=torch.long), 700).tolist() == list(range(700))


def test_ids_that_must_be_in_displace_the_least_frequent():
    counts = torch.tensor([5, 0, 9, 1, 7])
    assert choose_tokens(counts, 3, always=(1,)).tolist() == [1, 2, 4]
    assert counts.tolist() == [5, 0, 9, 1, 7]


@pytest.mark.parametrize("always", [(), (3,), (3, 0, 3)])
def test_the_size_is_kept_whatever_must_be_in(always):
    chosen = choose_tokens(torch.tensor([5, 0, 9, 1, 7]), 3, always=always)
    assert len(chosen) == 3
    assert set(always) <= set(chosen.tolist())


def test_a_size_above_the_vocabulary_is_the_whole_vocabulary():
    assert choose_tokens(torch.tensor([0, 2, 1]), 9).tolist() == [0, 1, 2]


def test_coverage_of_a_worked_example():
    # 3 + 4 of 10 counted tokens.
    assert coverage(torch.tensor([3, 2, 4, 1]), torch.tensor([0, 2])) == pytest.approx(0.7)


def test_coverage_at_its_limits():
    counts = torch.tensor([3, 2, 0])
    assert coverage(counts, torch.tensor([0, 1])) == 1.0
    assert coverage(counts, torch.tensor([2])) == 0.0
    assert coverage(torch.zeros(3, dtype=torch.long), torch.tensor([0])) == 1.0


def test_the_digest_depends_on_order_and_size_and_on_no_dtype():
    ids = torch.tensor([1, 2, 3])
    assert vocabulary_digest(ids) != vocabulary_digest(torch.tensor([1, 3, 2]))
    assert vocabulary_digest(ids) != vocabulary_digest(torch.tensor([1, 2]))
    assert vocabulary_digest(ids) == vocabulary_digest(ids.to(torch.int32))
