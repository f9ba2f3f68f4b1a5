from __future__ import annotations

import pytest

from draftsmith.errors import EvidenceError
from draftsmith.evaluation.choice import best_recipe, losers


def benchmark(**speedups):
    return {"recipes": {name: {"speedup": {"mean": mean}} for name, mean in speedups.items()}}


def test_the_fastest_recipe_is_chosen_and_the_others_hear_why():
    report = benchmark(a=1.2, b=1.4, c=0.9)
    assert best_recipe(report) == "b"
    assert losers(report) == {
        "a": "measured speedup 1.200, below 1.400 of b",
        "c": "measured speedup 0.900, below 1.400 of b",
    }


def test_a_tie_goes_to_the_first_name_whatever_the_order():
    assert best_recipe(benchmark(b=1.3, a=1.3)) == best_recipe(benchmark(a=1.3, b=1.3)) == "a"


def test_a_slowdown_is_chosen_when_there_is_nothing_better():
    assert best_recipe(benchmark(a=0.8)) == "a"
    assert losers(benchmark(a=0.8)) == {}


def test_a_benchmark_without_recipes_is_refused():
    with pytest.raises(EvidenceError, match="recipes"):
        best_recipe(benchmark())
