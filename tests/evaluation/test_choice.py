from __future__ import annotations

import pytest

from draftsmith.errors import EvidenceError
from draftsmith.evaluation.choice import best_recipe, losers, served_lengths, unusable_recipes


def benchmark(**speedups):
    return {"recipes": {name: {"speedup": {"mean": mean}} for name, mean in speedups.items()}}


def evaluation(**holds):
    return {
        "recipes": {
            name: {"pair_digest": f"pair of {name}", "losslessness": {"holds": value}}
            for name, value in holds.items()
        }
    }


def test_the_fastest_recipe_is_chosen_and_the_others_hear_why():
    report = benchmark(a=1.2, b=1.4, c=0.9)
    assert best_recipe(report, {}) == "b"
    assert losers(report, {}) == {
        "a": "measured speedup 1.200, below 1.400 of b",
        "c": "measured speedup 0.900, below 1.400 of b",
    }


def test_a_tie_goes_to_the_first_name_whatever_the_order():
    for report in (benchmark(b=1.3, a=1.3), benchmark(a=1.3, b=1.3)):
        assert best_recipe(report, {}) == "a"


def test_a_slowdown_is_chosen_when_there_is_nothing_better():
    assert best_recipe(benchmark(a=0.8), {}) == "a"
    assert losers(benchmark(a=0.8), {}) == {}


def test_a_pair_in_quarantine_or_that_changes_the_output_is_not_usable():
    report = evaluation(a=True, b=False, c=True, d=False)
    found = unusable_recipes(report, {"pair of a": "3", "pair of d": "5", "pair of e": "7"})
    assert found == {
        "a": "its pair is in quarantine, as version 3",
        "b": "its losslessness self-test fails",
        "d": "its pair is in quarantine, as version 5",
    }


def test_the_fastest_of_the_usable_recipes_is_chosen_and_the_others_hear_why():
    report, unusable = benchmark(a=1.2, b=1.4, c=0.9), {"b": "barred"}
    assert best_recipe(report, unusable) == "a"
    assert losers(report, unusable) == {
        "b": "barred",
        "c": "measured speedup 0.900, below 1.200 of a",
    }


def test_where_none_is_usable_the_fastest_is_proposed_all_the_same():
    report, unusable = benchmark(a=1.2, b=1.4), {"a": "barred", "b": "lossy"}
    assert best_recipe(report, unusable) == "b"
    assert losers(report, unusable) == {"a": "measured speedup 1.200, below 1.400 of b"}


def test_a_benchmark_without_recipes_is_refused():
    with pytest.raises(EvidenceError, match="recipes"):
        best_recipe(benchmark(), {})


MEASURED = {
    "draft_length": 3,
    "lookup_length": 5,
    "batch": [
        {"batch_size": 16, "draft_length": 0, "lookup_length": 0},
        {"batch_size": 4, "draft_length": 2, "lookup_length": 1},
    ],
}


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [(1, (3, 5)), (2, (2, 1)), (4, (2, 1)), (5, (0, 0)), (16, (0, 0)), (64, (0, 0))],
)
def test_a_pair_is_served_at_the_lengths_of_its_batch_size(rows, lengths):
    assert served_lengths(MEASURED, rows=rows) == lengths


def test_a_batch_that_was_not_measured_is_served_as_one_request_is():
    assert served_lengths({**MEASURED, "batch": []}, rows=8) == (3, 5)
    assert served_lengths({}, rows=8) == (2, 0)


def test_records_that_say_nothing_of_copies_in_a_batch_hold_for_those_at_one():
    old = {"draft_length": 1, "lookup_length": 5, "batch": [{"batch_size": 4, "draft_length": 1}]}
    assert served_lengths(old, rows=4) == (1, 5)


def test_a_batch_that_lost_is_served_without_drafts():
    entry = {"batch_size": 4, "draft_length": 1, "lookup_length": 2}
    for speedup, lengths in ((1.1, (1, 2)), (0.9, (0, 0))):
        record = {"draft_length": 3, "batch": [entry | {"speedup": speedup}]}
        assert served_lengths(record, rows=4) == lengths
