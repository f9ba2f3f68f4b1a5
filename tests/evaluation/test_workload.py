"""Whether speculation pays: prefill, rounds, growing context, batches."""

from __future__ import annotations

import pytest

from draftsmith.decoding import Lengths, Tree
from draftsmith.evaluation.best_choice import advise, break_even_alpha, choices, free_positions
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts, Survival, predicted_speedup
from draftsmith.evaluation.guesses import NO_GUESSES, Guesses, with_trees
from draftsmith.evaluation.workload import (
    NOTHING,
    Choice,
    DeviceCosts,
    JudgingMs,
    PrefillMs,
    Workload,
    expected_ms,
    expected_speedup,
    round_ms,
    tokens_a_round,
)

LONGEST = Lengths(3, 4)


def costs_of(slope, *, step=10.0, draft=1.0, prefill=0.0):
    """A device on which a further position costs `slope` ms in every row."""

    def cell(rows, context):
        base = step + context / 100
        verify = {width: base + slope * (width - 1) * rows for width in range(1, 6)}
        return ForwardCosts(base, draft, verify)

    grid = [(rows, context) for rows in (1, 8) for context in (0, 1000)]
    return DeviceCosts(
        RoundCosts((1, 8), (0, 1000), {place: cell(*place) for place in grid}),
        {(r, c): PrefillMs(prefill * r * c, prefill * r * c / 10) for r, c in grid},
    )


def test_without_prefill_context_or_neighbours_it_is_the_speedup_of_the_rounds():
    survived = Survival([0.5, 0.2, 0.1], copied_share=0.25, copied=[0.8, 0.6, 0.5, 0.4])
    costs = costs_of(0.5)
    flat = DeviceCosts(RoundCosts((1,), (0,), {(1, 0): costs.rounds.cells[1, 0]}), costs.prefill)
    for draft_length in (1, 2, 3):
        found = expected_speedup(
            Workload(1, 0, 10**6, 0.0), Choice(draft_length, 4), flat, survived
        )
        cell = flat.rounds.cells[1, 0]
        assert found == pytest.approx(predicted_speedup(survived, draft_length, cell), rel=1e-4)


def test_rows_that_could_copy_draft_where_no_copies_are_wanted():
    survived = Survival([0.5, 0.2], copied_share=0.5, copied=[0.9, 0.9])
    assert tokens_a_round(survived, Choice(2, 0)) == pytest.approx(1.7)
    assert tokens_a_round(survived, Choice(2, 1)) == pytest.approx(1 + 0.5 * 0.7 + 0.5 * 0.9)


def test_a_round_of_many_rows_pays_for_drafts_and_for_copies():
    survived = Survival([0.5], copied_share=0.5, copied=[0.9, 0.9, 0.9, 0.9])
    cell = costs_of(1.0).rounds.at(rows=8, context=0)
    both = cell.round_ms(1, 4)
    assert round_ms(survived, Choice(1, 4), cell, rows=8) == pytest.approx(both, rel=0.02)
    one = round_ms(survived, Choice(1, 4), cell, rows=1)
    assert one == pytest.approx((cell.round_ms(1) + cell.round_ms(0, 4)) / 2)


def test_an_engine_without_a_draft_pays_for_no_features():
    cell = ForwardCosts(20.0, 2.0, {1: 21.0, 2: 22.0, 3: 23.0})
    survived = Survival([0.5], copied_share=0.5, copied=[0.9])
    assert round_ms(survived, NOTHING, cell, rows=3) == 20.0
    assert round_ms(survived, NOTHING, cell, rows=3, position_ms=0.5) == 21.5
    assert round_ms(survived, Choice(1, 1), cell, rows=1) == pytest.approx((24 + 22) / 2)


def test_a_context_that_grows_costs_what_its_middle_does_where_costs_are_linear():
    workload = Workload(1, 100, 400, 0.0)
    alone = expected_ms(workload, NOTHING, costs_of(0.5), Survival([]))
    assert alone == pytest.approx(400 * (10 + 300 / 100))


def test_prefill_of_the_draft_makes_short_answers_lose():
    survived, costs = Survival([0.5]), costs_of(0.1, prefill=0.1)
    short, long = (
        expected_speedup(Workload(1, 1000, tokens, 0.0), Choice(1, 0), costs, survived)
        for tokens in (1, 400)
    )
    assert short < 1 < long


def test_prefill_beyond_the_grid_grows_with_the_tokens():
    costs = costs_of(0.1, prefill=0.1)
    inside, outside = (costs.prefill_at(rows=8, context=c).target for c in (1000, 2000))
    assert outside == pytest.approx(2 * inside)
    assert costs.prefill_at(rows=8, context=500).target == pytest.approx(inside / 2)


def test_advice_is_the_best_of_all_lengths_and_none_where_speculation_loses():
    survived = Survival([0.6, 0.4, 0.3], copied_share=0.2, copied=[0.8, 0.7, 0.6, 0.5])
    cheap = advise(Workload(1, 0, 64, 0.0), costs_of(0.05), survived, longest=LONGEST)
    assert cheap.choice.draft == 3
    for draft in range(1, 4):
        for copy in range(5):
            found = expected_speedup(cheap.workload, Choice(draft, copy), costs_of(0.05), survived)
            assert found <= cheap.speedup
    dear = advise(Workload(8, 0, 64, 0.0), costs_of(20.0), survived, longest=LONGEST)
    assert (dear.choice, dear.speedup) == (NOTHING, 1.0)
    assert dear.tokens_per_s == dear.plain_tokens_per_s


def test_break_even_is_where_gain_turns_into_loss():
    workload, costs = Workload(1, 0, 64, 0.0), costs_of(1.0)
    alpha = break_even_alpha(workload, costs, longest=3)
    best = {
        rate: max(
            expected_speedup(
                workload, Choice(n, 0), costs, Survival([rate**k for k in range(1, n + 1)])
            )
            for n in (1, 2, 3)
        )
        for rate in (alpha - 0.01, alpha + 0.01)
    }
    assert best[alpha - 0.01] < 1 < best[alpha + 0.01]
    never = costs_of(100.0)
    assert break_even_alpha(Workload(8, 0, 64, 0.0), never, longest=3) is None


@pytest.mark.parametrize(("slope", "free"), [(0.1, 5), (1.0, 3), (5.0, 1)])
def test_free_positions_are_many_where_a_position_costs_little(slope, free):
    assert free_positions(costs_of(slope).rounds.cells[1, 0]) == free


def test_texts_that_differ_keep_a_batch_waiting_for_its_slowest_row():
    costs, lengths = costs_of(0.0), Choice(2, 0)

    def speedup(rows, spread):
        survived = Survival([0.6, 0.4], spread=spread)
        return expected_speedup(Workload(rows, 0, 64, 0.0), lengths, costs, survived)

    assert speedup(1, 0.5) == speedup(1, 0.0)
    assert speedup(8, 0.5) < speedup(8, 0.0) < speedup(1, 0.0)


def test_rows_that_join_later_lengthen_a_batch_with_and_without_drafts():
    survived, cell = Survival([0.5]), ForwardCosts(10.0, 1.0, {1: 10.0, 2: 11.0})
    rounds = RoundCosts((1,), (2000,), {(1, 2000): cell})
    costs = DeviceCosts(rounds, {(1, 2000): PrefillMs(0.0, 0.0)})
    # Prompts of 2,000 tokens are read in four pieces each: the second row joins 4 rounds later.
    together = expected_ms(Workload(1, 2000, 64, 0.0), NOTHING, costs, survived)
    apart = expected_ms(Workload(2, 2000, 64, 0.0), NOTHING, costs, survived)
    assert (together, apart) == (640.0, 680.0)


def test_judging_is_paid_by_position_and_at_a_temperature():
    survived, plain = Survival([0.5, 0.2]), costs_of(0.0)
    costs = DeviceCosts(plain.rounds, plain.prefill, JudgingMs(greedy=0.1, sampled=0.5))
    cell = plain.rounds.at(rows=4, context=0)
    for position_ms in (0.1, 0.5):
        judged = round_ms(survived, Choice(2, 0), cell, rows=4, position_ms=position_ms)
        assert judged == pytest.approx(cell.round_ms(2) + position_ms * 4 * 3)
    cold, warm = (
        expected_speedup(Workload(4, 0, 64, temperature), Choice(2, 0), costs, survived)
        for temperature in (0.0, 0.7)
    )
    assert warm < cold < expected_speedup(Workload(4, 0, 64, 0.0), Choice(2, 0), plain, survived)


BROAD = Tree((0, 0, 1))  # two guesses of the first position, one behind the first of them


def test_a_tree_commits_what_its_nodes_accept_and_pays_for_all_of_them():
    guesses = Guesses([[0.5, 0.25], [0.4]], [100, 50])
    survived = with_trees(Survival([0.5, 0.2]), guesses, [BROAD])
    assert survived.trees[BROAD] == pytest.approx([0.75, 0.2])
    choice, costs = Choice(2, 0, BROAD), costs_of(0.5)
    assert tokens_a_round(survived, choice) == pytest.approx(1.95)
    cell = costs.rounds.at(rows=1, context=0)
    found = round_ms(survived, choice, cell, rows=1, position_ms=0.1)
    assert found == pytest.approx(2 * cell.draft_step_ms + cell.verify_ms[4] + 0.1 * 4)
    flat = DeviceCosts(RoundCosts((1,), (0,), {(1, 0): cell}), costs.prefill)
    gain = expected_speedup(Workload(1, 0, 10**6, 0.0), choice, flat, survived)
    expected = 1.95 * cell.target_step_ms / cell.round_ms(2, tree=BROAD)
    assert gain == pytest.approx(expected, rel=1e-4)


def test_first_guesses_of_a_tree_are_as_right_as_those_of_a_chain():
    guesses = Guesses([[0.8, 0.1], [0.4]], [100, 80])
    survived = with_trees(Survival([0.5, 0.2]), guesses, [BROAD])
    assert survived.trees[BROAD] == pytest.approx([0.5 + 0.5 * 0.1 / 0.2, 0.2])


def test_a_tree_whose_guesses_were_not_counted_is_no_choice():
    chain = Survival([0.5, 0.2])
    assert with_trees(chain, NO_GUESSES, [BROAD]).trees == {}
    assert with_trees(Survival([0.5]), Guesses([[0.5, 0.2], [0.4]], [9, 9]), [BROAD]).trees == {}
    counted = with_trees(chain, Guesses([[0.5, 0.2], [0.4]], [9, 9]), [BROAD])
    assert Choice(2, 0, BROAD) in list(choices(counted, Lengths(2, 0)))
    assert not any(choice.tree for choice in choices(counted, Lengths(1, 0)))


def test_copies_alone_cost_no_draft_and_read_no_prompt_for_it():
    survived = Survival([0.5], copied_share=0.5, copied=[0.9, 0.8])
    costs = costs_of(1.0, draft=5.0, prefill=0.1)
    cell, alone = costs.rounds.at(rows=1, context=0), Choice(0, 2)
    expected = (cell.target_step_ms + cell.round_ms(0, 2)) / 2
    assert round_ms(survived, alone, cell, rows=1) == pytest.approx(expected)
    workload = Workload(1, 1000, 1, 0.0)
    read = costs.prefill_at(rows=1, context=1000)
    both = [expected_ms(workload, choice, costs, survived) for choice in (alone, Choice(1, 2))]
    assert both[1] - both[0] > read.draft


def test_where_the_draft_is_never_right_copies_stand_alone():
    survived = Survival([0.0, 0.0], copied_share=0.5, copied=[0.9, 0.9, 0.9, 0.9])
    found = advise(Workload(1, 0, 64, 0.0), costs_of(0.1), survived, longest=LONGEST)
    assert found.choice == Choice(0, 4)
    assert found.speedup > 1.5
    assert next(choices(survived, LONGEST)) == NOTHING
