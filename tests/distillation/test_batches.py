from __future__ import annotations

import pytest
import torch

from draftsmith.distillation.batches import (
    TrainingSequence,
    collate,
    epoch_batches,
    make_sequences,
    places_in_responses,
    step_indices,
    with_prompts,
)
from draftsmith.errors import CorpusError

LENGTHS = [5 + (7 * index) % 23 for index in range(101)]
BATCH_SIZE = 4


def epoch(seed=0, number=0):
    return epoch_batches(LENGTHS, BATCH_SIZE, seed=seed, epoch=number)


def test_the_order_is_a_function_of_seed_and_step():
    steps = [step_indices(LENGTHS, BATCH_SIZE, seed=3, step=step) for step in range(60)]
    again = [step_indices(LENGTHS, BATCH_SIZE, seed=3, step=step) for step in reversed(range(60))]
    assert steps == again[::-1]
    assert steps != [step_indices(LENGTHS, BATCH_SIZE, seed=4, step=step) for step in range(60)]


def test_steps_go_through_the_epochs():
    per_epoch = 26  # 101 sequences in batches of 4
    steps = [step_indices(LENGTHS, BATCH_SIZE, seed=0, step=s) for s in range(2 * per_epoch)]
    assert steps == epoch(number=0) + epoch(number=1)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_every_sequence_comes_once_an_epoch(number):
    batches = epoch(number=number)
    assert sorted(index for batch in batches for index in batch) == list(range(len(LENGTHS)))
    assert sorted(map(len, batches)) == [1] + [BATCH_SIZE] * 25


def test_epochs_and_seeds_differ_in_order():
    orders = [epoch(seed, number) for seed in (0, 1) for number in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_a_batch_holds_sequences_of_similar_length():
    def padding(batches):
        return sum(
            max(LENGTHS[i] for i in batch) * len(batch) - sum(LENGTHS[i] for i in batch)
            for batch in batches
        )

    plain = [list(range(i, min(i + BATCH_SIZE, 101))) for i in range(0, 101, BATCH_SIZE)]
    assert padding(epoch()) < padding(plain) / 3


def test_the_lengths_of_successive_batches_are_mixed():
    widths = [max(LENGTHS[i] for i in batch) for batch in epoch()]
    assert widths != sorted(widths)


def test_a_single_sequence_is_an_epoch():
    assert step_indices([9], BATCH_SIZE, seed=0, step=7) == [0]


def test_sequences_without_a_response_are_left_out():
    sequences = make_sequences([([1, 2], [3]), ([4], []), ([5], [6, 7])])
    assert sequences == [TrainingSequence([1, 2, 3], 1), TrainingSequence([5, 6, 7], 0)]
    assert [sequence.num_predicted for sequence in sequences] == [1, 2]


@pytest.mark.parametrize("rows", [[], [([1, 2], []), ([3], [])]])
def test_nothing_left_to_learn_from_is_an_error(rows):
    with pytest.raises(CorpusError, match=f"{len(rows)} rollouts"):
        make_sequences(rows)


class TestPrompts:
    ROWS = (([1, 2, 3, 4], [5]), ([1, 2, 6], [7, 8]), ([1, 2, 3, 4], [9]), ([1, 2, 8, 8, 8], [5]))

    def test_their_tokens_are_predicted_behind_what_all_begin_with(self):
        sequences = with_prompts(make_sequences(self.ROWS))
        # Position 1 predicts the first token that is not the same everywhere.
        assert [sequence.start for sequence in sequences] == [1, 1, 3, 1]
        assert [sequence.token_ids for sequence in sequences] == [p + r for p, r in self.ROWS]

    def test_a_prompt_that_is_judged_by_its_responses_stays_as_it_is(self):
        sequences = with_prompts(make_sequences(self.ROWS), held_out=[0, 2])
        assert [sequence.start for sequence in sequences] == [3, 1, 3, 1]

    @pytest.mark.parametrize(
        ("rows", "starts"),
        [
            ([([1, 2], [3])], [1]),
            ([([1, 2], [3]), ([1, 2], [4])], [1, 1]),
            ([([1, 2], [3]), ([1, 2, 4], [4])], [1, 1]),
            ([([4, 2], [3]), ([5, 2, 4], [4])], [0, 0]),
        ],
    )
    def test_what_is_the_same_in_all_prompts_may_be_a_whole_one_or_nothing(self, rows, starts):
        assert [sequence.start for sequence in with_prompts(make_sequences(rows))] == starts


def test_the_mask_covers_the_positions_that_predict_the_response():
    sequences = make_sequences([([11, 12, 13], [21, 22]), ([14], [23, 24, 25, 26, 27])])
    batch = collate(sequences, [1, 0])
    assert batch.indices == [1, 0]
    assert batch.token_ids.tolist() == [
        [14, 23, 24, 25, 26, 27],
        [11, 12, 13, 21, 22, 0],
    ]
    # Position 0 of the first row predicts 23, position 4 predicts 27; nothing follows 27.
    # Positions 2 and 3 of the second row predict 21 and 22.
    assert batch.mask.int().tolist() == [
        [1, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 0, 0],
    ]
    assert batch.token_ids.dtype == torch.long
    assert batch.mask.dtype == torch.bool


def test_the_masked_positions_predict_exactly_the_responses():
    rows = [([1] * (2 + i), [30 + i] * (1 + 2 * i)) for i in range(5)]
    batch = collate(make_sequences(rows), [4, 0, 2])
    following = batch.token_ids.roll(-1, dims=1)
    expected = [token for index in (4, 0, 2) for token in rows[index][1]]
    assert following[batch.mask].tolist() == expected


def test_places_are_counted_within_each_response():
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 1, 0]], dtype=torch.bool)
    before, lengths = places_in_responses(mask)
    assert before.tolist() == [0, 1, 0, 1, 2, 0]
    assert lengths.tolist() == [2, 2, 3, 3, 3, 1]
    assert [len(part) for part in places_in_responses(mask & False)] == [0, 0]
