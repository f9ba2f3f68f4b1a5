"""Judging where outputs part: the same in one go and with pauses between its forwards."""

from __future__ import annotations

import pytest

from draftsmith.decoding.near_ties import judge_divergences, judging
from draftsmith.decoding.slot_model import SlotModel

NUM_NEW = 6


@pytest.fixture
def parted(llama, ragged_prompts, continue_greedily):
    """Prompts, the answers without drafts, and others of which one differs."""
    prompts = [(str(place), ids) for place, ids in enumerate(ragged_prompts)]
    plain = {name: continue_greedily(llama.reference, ids, NUM_NEW) for name, ids in prompts}
    other = plain | {"1": [*plain["1"][:3], (plain["1"][3] + 1) % 64, 0, 0]}
    return prompts, plain, other


def test_work_of_others_fits_between_any_two_forwards(llama, parted, monkeypatch):
    num_forwards, most, forward = [0], 0, SlotModel.forward

    def counted(*arguments, **options):
        num_forwards[0] += 1
        return forward(*arguments, **options)

    monkeypatch.setattr(SlotModel, "forward", counted)
    steps, judged = judging(llama.target, *parted, width=4), None
    while judged is None:
        before = num_forwards[0]
        try:
            next(steps)
        except StopIteration as end:
            judged = end.value
        most = max(most, num_forwards[0] - before)
    assert most == 1
    assert num_forwards[0] > NUM_NEW
    assert judged == judge_divergences(llama.target, *parted, width=4)
    assert [(found.prompt_id, found.position) for found in judged.divergences] == [("1", 3)]
    assert not judged.holds
