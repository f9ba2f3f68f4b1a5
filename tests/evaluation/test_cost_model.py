from __future__ import annotations

import pytest

from draftsmith.errors import EvidenceError
from draftsmith.evaluation.cost_model import (
    ForwardCosts,
    Survival,
    break_even_tokens,
    expected_tokens,
    predicted_speedup,
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
