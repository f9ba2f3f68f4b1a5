from __future__ import annotations

import pytest

from draftsmith.decoding import attention
from draftsmith.evaluation.arms import Contestants, forward_costs, round_costs, twin
from draftsmith.evaluation.losslessness import SelfTest, transformers_greedy

MAX_NEW_TOKENS = 10


@pytest.fixture(scope="module")
def contestants(target, drafts, stop_ids):
    return Contestants(target, drafts["trimmed"], stop_ids)


@pytest.fixture(scope="module")
def arms(contestants):
    make = contestants
    return {
        "engine-0": make.engine(0, max_new_tokens=MAX_NEW_TOKENS),
        "engine-2": make.engine(2, max_new_tokens=MAX_NEW_TOKENS),
        "engine-2-batch": make.engine(2, max_new_tokens=MAX_NEW_TOKENS, batch_size=3),
        "lookup": make.prompt_lookup(2, max_new_tokens=MAX_NEW_TOKENS),
        "transformers": make.transformers(max_new_tokens=MAX_NEW_TOKENS),
        "assisted": make.assisted(2, max_new_tokens=MAX_NEW_TOKENS),
    }


@pytest.mark.parametrize("lengths", [slice(0, 1), slice(0, 4)])
def test_every_arm_commits_the_targets_greedy_tokens(arms, prompts, target, stop_ids, lengths):
    group = [ids for _, ids in prompts[lengths]]
    test = SelfTest(0, 0, MAX_NEW_TOKENS, stop_ids)
    expected = sum(len(transformers_greedy(target, ids, test)) for ids in group)
    assert {name: arm(group) for name, arm in arms.items()} == dict.fromkeys(arms, expected)


def test_an_arm_stops_at_a_stop_id(contestants, prompts, target, stop_ids):
    _, prompt_ids = prompts[0]
    whole = transformers_greedy(target, prompt_ids, SelfTest(0, 0, 60, stop_ids))
    assert whole[-1] in stop_ids
    assert len(whole) < 60
    for arm in (
        contestants.engine(3, max_new_tokens=60),
        contestants.transformers(max_new_tokens=60),
        contestants.assisted(2, max_new_tokens=60),
    ):
        assert arm([prompt_ids]) == len(whole)


def test_a_twin_has_the_same_weights_and_an_attention_of_its_own(target, contestants):
    other = twin(target)
    contestants.engine(0, max_new_tokens=1)
    assert other.config._attn_implementation == "sdpa"
    assert target.config._attn_implementation == attention.NAME
    pairs = zip(target.parameters(), other.parameters(), strict=True)
    assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in pairs)


def test_a_sampling_arm_commits_tokens(target, drafts, stop_ids, prompts):
    warm = Contestants(target, drafts["student"], stop_ids, temperature=0.7)
    group = [ids for _, ids in prompts[:2]]
    for arm in (
        warm.engine(2, max_new_tokens=MAX_NEW_TOKENS),
        warm.transformers(max_new_tokens=MAX_NEW_TOKENS),
        warm.assisted(2, max_new_tokens=MAX_NEW_TOKENS),
    ):
        assert 2 <= arm(group) <= 2 * MAX_NEW_TOKENS


@pytest.mark.parametrize("batch_size", [1, 3])
def test_costs_cover_every_width_and_the_plain_step(contestants, batch_size):
    costs = forward_costs(contestants, [3, 2], batch_size=batch_size, repeats=1)
    assert sorted(costs.verify_ms) == [1, 2, 3]
    assert costs.verify_ms[1] == costs.target_step_ms
    assert costs.cost_ratio == costs.draft_step_ms / costs.target_step_ms


def test_round_costs_cover_every_batch_and_context(contestants):
    costs = round_costs(contestants, 2, rows=[3, 1], contexts=[40, 16], repeats=1)
    cells = {(1, 16), (1, 40), (3, 16), (3, 40)}
    assert (costs.rows, costs.contexts) == ((1, 3), (16, 40))
    assert set(costs.verify) == set(costs.draft) == cells
    assert all(len(times) == 3 and min(times) > 0 for times in costs.verify.values())
    assert costs.round_cost(2, rows=2, context=30) > 0
