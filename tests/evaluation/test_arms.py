from __future__ import annotations

import pytest

from draftsmith.decoding import Lengths, Tree, attention
from draftsmith.evaluation.adaptive import AdaptiveLengths
from draftsmith.evaluation.arms import Contestants, Rival, twin
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts, Survival
from draftsmith.evaluation.guesses import Guesses
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


def test_static_eager_and_batched_rivals_commit_the_same_tokens(
    contestants, prompts, target, stop_ids
):
    group = [ids for _, ids in prompts[:3]]
    test = SelfTest(0, 0, MAX_NEW_TOKENS, stop_ids)
    expected = sum(len(transformers_greedy(target, ids, test)) for ids in group)
    rivals = (
        Rival(attention="eager"),
        Rival(cache="static"),
        Rival(lookup_length=3),
        Rival(is_batched=True),
        Rival(cache="static", is_batched=True, pad_to=40),
    )
    arms = [contestants.transformers(rival, max_new_tokens=MAX_NEW_TOKENS) for rival in rivals]
    assert [arm(group) for arm in arms] == [expected] * len(rivals)


def test_defaults_of_the_checkpoint_do_not_change_the_rivals_task(target, drafts, prompts):
    """No stop ids were asked for, so the checkpoint's own must not end an answer."""
    endless = Contestants(target, drafts["student"], stop_ids=())
    _, prompt_ids = prompts[0]
    assert endless.transformers(max_new_tokens=60)([prompt_ids]) == 60
    assert endless.engine(2, max_new_tokens=60)([prompt_ids]) == 60


@pytest.mark.parametrize("trees", [[], [Tree.comb([3, 2])]], ids=["chains", "trees"])
@pytest.mark.parametrize("lookup_length", [0, 3])
def test_lengths_that_adapt_commit_the_targets_greedy_tokens(  # noqa: PLR0917  fixtures
    target, drafts, stop_ids, prompts, lookup_length, trees
):
    limit = Lengths(draft=3, copy=lookup_length)
    cell = ForwardCosts(1.0, 0.1, {width: 1 + 0.02 * width for width in range(1, 8)})
    costs = RoundCosts((1,), (16,), {(1, 16): cell})
    guesses = Guesses([[0.5, 0.3, 0.1], [0.4, 0.3]], [9, 9])
    policy = AdaptiveLengths(costs, limit, Survival([0.5, 0.25]), trees, guesses)
    pair = Contestants(target, drafts["trimmed"], stop_ids)
    arm = pair.adaptive(policy, max_new_tokens=MAX_NEW_TOKENS, batch_size=3)
    group = [ids for _, ids in prompts[:3]]
    test = SelfTest(0, 0, MAX_NEW_TOKENS, stop_ids)
    expected = sum(len(transformers_greedy(target, ids, test)) for ids in group)
    assert arm(group) == expected
    assert any(any(trace.drafted) for trace in arm.traces)
    assert any(any(trace.ranks) for trace in arm.traces) == bool(trees)


def test_start_and_finish_of_an_engine_are_its_whole_work(contestants, prompts):
    group = [ids for _, ids in prompts[:3]]
    arm = contestants.engine(2, max_new_tokens=MAX_NEW_TOKENS, batch_size=3)
    whole = arm(group)
    started = arm.start(group)
    assert 3 <= started <= 3 * 3
    assert started + arm.finish() == whole
    assert len(arm.traces) == 2 * len(group)
