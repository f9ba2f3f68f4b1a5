from __future__ import annotations

import pytest

from draftsmith.decoding.trace import (
    Trace,
    accepted_fraction,
    block_efficiency,
    position_counts,
)


def trace(*rounds: tuple[int, int, int]) -> Trace:
    """Rounds of (drafted, accepted, committed)."""
    made = Trace()
    for drafted, accepted, committed in rounds:
        made.record(drafted=drafted, accepted=accepted, committed=committed)
    return made


def test_block_efficiency_counts_the_bonus_token_and_trimmed_rounds_as_trimmed():
    # A full accept with its bonus token, a rejection with its residual, a round that was cut.
    assert block_efficiency([trace((4, 4, 5), (4, 1, 2), (4, 4, 2))]) == 9 / 3


def test_block_efficiency_without_drafts_is_one():
    assert block_efficiency([trace((0, 0, 1), (0, 0, 1))]) == 1


def test_ratios_come_from_sums_and_not_from_ratios_of_traces():
    traces = [trace((4, 4, 5)), trace((4, 0, 1), (4, 0, 1), (4, 0, 1))]
    assert block_efficiency(traces) == 8 / 4  # the mean of the traces' own ratios would be 3
    assert accepted_fraction(traces) == 4 / 16


@pytest.mark.parametrize("traces", [[], [Trace()]])
def test_ratios_of_nothing_are_zero(traces):
    assert block_efficiency(traces) == 0
    assert accepted_fraction(traces) == 0
    assert position_counts(traces, 2).survival == [0.0, 0.0]
    assert position_counts(traces, 2).conditional_acceptance == [0.0, 0.0]


def test_a_rejection_ends_the_positions_that_were_reached():
    counts = position_counts([trace((4, 2, 3))], 4)
    assert counts.drafted == [1, 1, 1, 1]
    assert counts.reached == [1, 1, 1, 0]
    assert counts.accepted == [1, 1, 0, 0]


def test_a_full_accept_counts_every_position():
    counts = position_counts([trace((3, 3, 4))], 3)
    assert counts.drafted == counts.reached == counts.accepted == [1, 1, 1]


def test_positions_behind_a_trimmed_round_are_not_counted():
    counts = position_counts([trace((4, 4, 2))], 4)
    assert counts.drafted == counts.reached == counts.accepted == [1, 1, 0, 0]


def test_a_stop_token_as_the_last_accepted_draft_hides_what_follows():
    counts = position_counts([trace((4, 2, 2))], 4)
    assert counts.drafted == counts.reached == counts.accepted == [1, 1, 0, 0]


def test_shorter_rounds_have_denominators_of_their_own():
    # Position 0 was drafted twice and accepted once; position 1 was drafted and accepted once.
    counts = position_counts([trace((1, 0, 1), (2, 2, 3))], 2)
    assert counts.drafted == [2, 1]
    assert counts.survival == [0.5, 1.0]


def test_survival_is_unconditional_and_conditional_acceptance_is_not():
    counts = position_counts([trace((2, 0, 1), (2, 1, 2), (2, 2, 3), (2, 2, 3))], 2)
    assert counts.survival == [3 / 4, 2 / 4]
    assert counts.conditional_acceptance == [3 / 4, 2 / 3]


def test_rounds_without_drafts_count_no_position():
    assert position_counts([trace((0, 0, 1))], 2).drafted == [0, 0]


def test_positions_beyond_those_asked_for_are_left_out():
    assert position_counts([trace((4, 4, 5))], 2).accepted == [1, 1]


def test_a_round_is_a_target_forward():
    assert trace((2, 1, 2), (0, 0, 1)).num_rounds == 2


def test_rounds_that_were_copied_from_the_text_are_counted_apart():
    trace = Trace()
    trace.record(drafted=2, accepted=1, committed=2)
    trace.record(drafted=3, accepted=3, committed=4, from_text=True)
    assert position_counts([trace], 3).accepted == [1, 0, 0]
    assert position_counts([trace], 3, from_text=True).accepted == [1, 1, 1]
    assert block_efficiency([trace]) == 3
