from __future__ import annotations

import dataclasses

import pytest

from draftsmith.decoding import Tree
from draftsmith.errors import EvidenceError
from draftsmith.evaluation.cost_model import (
    ForwardCosts,
    RoundCosts,
    Rounds,
    Survival,
    best_lengths,
    break_even_tokens,
    conditional_acceptance,
    expected_accepted,
    expected_tokens,
    iid_speedup,
    predicted_speedup,
    speedup_of,
    survival,
)

# A draft step costs a tenth of a target step; verifying more positions costs a little more.
COSTS = ForwardCosts(target_step_ms=20.0, draft_step_ms=2.0, verify_ms={1: 20.0, 2: 21.0, 3: 22.0})
SURVIVAL = Survival([0.5, 0.2])


def test_tau_is_one_token_and_the_survival_of_each_position():
    assert expected_tokens(SURVIVAL, 0) == 1.0
    assert expected_tokens(SURVIVAL, 1) == 1.5
    assert expected_tokens(SURVIVAL, 2) == pytest.approx(1.7)


def test_tau_of_full_survival_is_the_length_and_the_bonus_token():
    assert expected_tokens(Survival([1.0] * 5), 5) == 6.0


def test_a_speedup_is_tokens_over_what_the_round_costs_in_target_steps():
    assert predicted_speedup(SURVIVAL, 1, COSTS) == pytest.approx(1.5 * 20 / (2 + 21))
    assert predicted_speedup(SURVIVAL, 2, COSTS) == pytest.approx(1.7 * 20 / (4 + 22))


def test_no_drafts_neither_gain_nor_lose():
    assert predicted_speedup(SURVIVAL, 0, COSTS) == 1.0
    assert break_even_tokens(0, COSTS) == 1.0


def test_at_the_break_even_tau_the_speedup_is_one():
    needed = break_even_tokens(2, COSTS)
    assert needed == pytest.approx(26 / 20)
    assert predicted_speedup(Survival([needed - 1, 0.0]), 2, COSTS) == pytest.approx(1.0)
    assert predicted_speedup(Survival([needed - 0.9, 0.0]), 2, COSTS) > 1
    assert predicted_speedup(Survival([needed - 1.1, 0.0]), 2, COSTS) < 1


def test_a_high_acceptance_of_a_dear_draft_is_still_a_slowdown():
    dear = ForwardCosts(20.0, 30.0, {2: 21.0})
    assert dear.cost_ratio == 1.5
    assert predicted_speedup(Survival([0.81]), 1, dear) < 1


def test_costs_in_another_unit_predict_the_same():
    micro = ForwardCosts(20e3, 2e3, {width: ms * 1e3 for width, ms in COSTS.verify_ms.items()})
    assert predicted_speedup(SURVIVAL, 2, micro) == pytest.approx(
        predicted_speedup(SURVIVAL, 2, COSTS)
    )


def test_survival_that_was_not_measured_that_far_is_refused():
    with pytest.raises(EvidenceError) as caught:
        predicted_speedup(SURVIVAL, 3, ForwardCosts(1.0, 1.0, {4: 1.0}))
    assert caught.value.found == "survival of 2 positions"
    assert "evaluation.draft_length" in caught.value.remedy


def test_copied_rounds_count_by_their_share_and_need_no_draft_step():
    mixed = Survival([0.5, 0.2], copied_share=0.25, copied=[0.8, 0.6])
    assert expected_tokens(mixed, 1) == pytest.approx(0.75 * 1.5 + 0.25 * 2.4)
    round_ms = 0.75 * (2 + 21) + 0.25 * 22
    assert predicted_speedup(mixed, 1, COSTS) == pytest.approx(
        expected_tokens(mixed, 1) * 20 / round_ms
    )


def test_a_round_of_a_batch_is_as_wide_as_its_longest_row():
    mixed = Survival([0.5], copied_share=0.25, copied=[0.8, 0.6])
    nobody, everybody = 0.75**4, 0.25**4
    round_ms = nobody * 23 + everybody * 22 + (1 - nobody - everybody) * 24
    tokens = expected_tokens(mixed, 1)
    assert predicted_speedup(mixed, 1, COSTS, rows=4) == pytest.approx(tokens * 20 / round_ms)


def test_copies_of_a_batch_that_never_copies_cost_nothing():
    alone = Survival([0.5], copied_share=0.0, copied=[0.8, 0.6])
    assert predicted_speedup(alone, 1, COSTS, rows=16) == predicted_speedup(SURVIVAL, 1, COSTS)


def batch_costs(rows):
    """A verification that is paid by position, as on a machine that is busy with few of them."""
    verify = {width: 15.0 + rows * width for width in range(1, 8)}
    return ForwardCosts(verify[1], 2.0 + 0.2 * rows, verify)


def test_lengths_that_promise_most_fall_with_the_batch_to_none():
    survived = Survival([0.5, 0.25, 0.12], copied_share=0.2, copied=[0.8, 0.6, 0.5, 0.3, 0.2])
    found = [
        best_lengths(survived, batch_costs(rows), (3, 5), rows=rows) for rows in (1, 4, 16, 64)
    ]
    assert found[0] == (1, 5)
    assert found[-1] == (0, 0)
    drafts, copies = zip(*found, strict=True)
    assert sorted(drafts, reverse=True) == list(drafts)
    assert sorted(copies, reverse=True) == list(copies)
    assert len(set(copies)) > 2


def test_lengths_that_promise_hardly_anything_are_none():
    costs = ForwardCosts(20.0, 0.0, {1: 20.0, 2: 29.6})
    assert best_lengths(Survival([0.5]), costs, (1, 0), rows=4) == (0, 0)
    cheaper = ForwardCosts(20.0, 0.0, {1: 20.0, 2: 29.0})
    assert best_lengths(Survival([0.5]), cheaper, (1, 0), rows=4) == (1, 0)


@pytest.mark.parametrize(
    ("rows", "context", "expected"),
    [(1, 10, 1.0), (3, 10, 2.0), (2, 10, 1.5), (1, 30, 5.0), (2, 20, 4.0), (9, 99, 8.0)],
)
def test_costs_are_interpolated_between_measured_cells_and_constant_beyond(rows, context, expected):
    steps = {(1, 10): 1.0, (3, 10): 2.0, (1, 30): 5.0, (3, 30): 8.0}
    cells = {cell: ForwardCosts(ms, ms / 2, {1: ms, 2: 2 * ms}) for cell, ms in steps.items()}
    found = RoundCosts((1, 3), (10, 30), cells).at(rows=rows, context=context)
    assert found.target_step_ms == found.verify_ms[1] == pytest.approx(expected)
    assert found.draft_step_ms == pytest.approx(expected / 2)
    assert found.verify_ms[2] == pytest.approx(2 * expected)


def test_a_round_pays_its_draft_steps_and_the_wider_of_drafts_and_copies():
    assert COSTS.round_ms(0) == 20.0
    assert COSTS.round_ms(1) == 2 + 21
    assert COSTS.round_ms(1, 2) == 2 + 22
    assert COSTS.round_ms(0, 2) == 22.0


def test_survival_is_the_product_of_conditional_acceptance_and_back():
    conditional = [0.8, 0.5, 0.25]
    assert survival(conditional) == pytest.approx([0.8, 0.4, 0.1])
    assert conditional_acceptance(survival(conditional)) == pytest.approx(conditional)


def test_nothing_is_known_behind_a_position_that_was_never_accepted():
    assert conditional_acceptance([0.5, 0.0, 0.0]) == [0.5, 0.0, 0.0]


def test_a_batch_is_expected_to_accept_what_its_rows_are_each_up_to_its_cap():
    rows = [[0.5, 0.2, 0.1], [0.9, 0.8, 0.7]]
    assert expected_accepted(rows, [3, 3], 3) == pytest.approx([0.0, 1.4, 2.4, 3.2])
    assert expected_accepted(rows, [0, 2], 3) == pytest.approx([0.0, 0.9, 1.7, 1.7])
    assert expected_accepted(rows, [3, 3], 0) == [0.0]


def test_the_record_of_an_evaluation_is_read_by_temperature():
    copied = {"0.7": {"share": 0.25, "survival": [0.8, 0.6]}}
    evaluated = {"survival": {"0.7": [0.5, 0.2]}, "copied": copied}
    assert Survival.recorded(evaluated, 0.7) == Survival([0.5, 0.2], 0.25, [0.8, 0.6])
    with pytest.raises(KeyError):
        Survival.recorded(evaluated, 0)


def test_a_tree_beside_longer_copies_is_priced_with_its_nodes_and_theirs():
    """The spine is lengthened to the copy, and all other nodes stay: 3 + 5 nodes and the root."""
    verify = {width: 20.0 + width**2 for width in range(1, 10)}
    costs = ForwardCosts(20.0, 2.0, verify)
    tree = Tree.comb([3, 2])
    assert costs.round_ms(2, tree=tree) == 4 + verify[6]
    assert costs.round_ms(2, 2, tree=tree) == 4 + verify[6]
    assert costs.round_ms(2, 5, tree=tree) == 4 + verify[9]
    survived = Survival([], copied_share=0.25, copied=[0.8, 0.6, 0.4, 0.3, 0.2])
    nobody, everybody = 0.75**4, 0.25**4
    round_ms = nobody * (4 + verify[6]) + everybody * verify[6]
    round_ms += (1 - nobody - everybody) * (4 + verify[9])
    tokens = 0.75 * 1.9 + 0.25 * (1 + 2.3)
    found = speedup_of(Rounds(1.9, 2, tree), survived, costs, rows=4)
    assert found == pytest.approx(tokens * 20 / round_ms)


def test_mean_and_variance_of_a_round_are_those_of_its_outcomes():
    survived = Survival([0.5, 0.2], copied_share=0.25, copied=[0.8, 0.6])
    # Of guesses 1, 2, 3 tokens with shares 0.5, 0.3, 0.2; of copies with 0.2, 0.2, 0.6.
    shares = [0.75 * 0.5 + 0.25 * 0.2, 0.75 * 0.3 + 0.25 * 0.2, 0.75 * 0.2 + 0.25 * 0.6]
    mean = sum(share * tokens for tokens, share in enumerate(shares, start=1))
    second = sum(share * tokens**2 for tokens, share in enumerate(shares, start=1))
    assert survived.tokens(2, 2) == pytest.approx((mean, second - mean**2))
    assert survived.tokens(1, 0) == pytest.approx((1.5, 0.25))
    assert survived.tokens(0, 0) == (1.0, 0.0)


def evaluated_texts(taus, num_tokens):
    prompts = [{"tau": {"0.0": tau}, "num_rounds": {"0.0": num_tokens / tau}} for tau in taus]
    copied = {"0.0": {"share": 0.0, "survival": []}}
    return {"survival": {"0.0": [0.6]}, "copied": copied, "prompts": [*prompts, {"tau": {}}]}


def test_texts_spread_as_far_as_their_rounds_do_not_explain():
    apart = Survival.recorded(evaluated_texts([1.3, 1.6, 1.9], 10**6), 0)
    assert apart.spread == pytest.approx(0.3 / 0.6, rel=1e-3)
    short = Survival.recorded(evaluated_texts([1.3, 1.6, 1.9], 20), 0)
    assert 0 < short.spread < apart.spread
    assert Survival.recorded(evaluated_texts([1.55, 1.6, 1.65], 20), 0).spread == 0
    assert Survival.recorded(evaluated_texts([1.3, 1.9], 10**6), 0).spread == 0
    assert apart.copying(0).spread == apart.spread


def test_the_textbooks_formula_knows_one_rate_and_one_cost_ratio():
    costs = ForwardCosts(10.0, 1.0, {1: 10.0, 2: 50.0, 3: 90.0})
    assert iid_speedup(0.5, 2, costs) == pytest.approx(1.75 / 1.2)
    assert iid_speedup(0.5, 0, costs) == 1.0
    at_once = dataclasses.replace(costs, drafts_at_once=True)
    assert iid_speedup(0.5, 2, at_once) == pytest.approx(1.75 / 1.1)
    rate = Survival.recorded(
        {
            "survival": {"0.0": [0.4]},
            "copied": {"0.0": {"share": 0.0, "survival": []}},
            "alpha": {"0.0": {"mean": 0.35}},
        },
        0.0,
    ).alpha
    assert rate == 0.35
