from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from draftsmith.corpus.prompts import user_prompt
from draftsmith.corpus.rollouts import Limits, Rollout, RolloutJob, ShardStore, roll_out
from draftsmith.decoding import Engine, NoProposer
from tests.tiny_target import conversations

MAX_NEW_TOKENS = 12
SHARD_SIZE = 3
NUM_JOBS = 11


class Killed(BaseException):  # nothing may notice it
    """What a test raises where a real run would be killed."""


@pytest.fixture(scope="module")
def jobs(chat):
    prompts = [user_prompt(text, domain) for domain, text, _ in conversations("home")[:NUM_JOBS]]
    return [
        RolloutJob(p.prompt_id, p.domain, (0.0, 0.7)[index % 2], chat.prompt_ids(p))
        for index, p in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def make(target, chat):
    """`make(jobs, folder)` -> rollouts and the requests that were decoded for them."""

    def run(jobs, folder, *, rows=4, seed=0, stop_after=None, max_new_tokens=MAX_NEW_TOKENS):
        decoded = []

        def on_event(event):
            if event.result is not None:
                decoded.append(event.request_id)
                if len(decoded) == stop_after:
                    raise Killed

        rollouts = roll_out(
            Engine(target, NoProposer(), max_rows=rows, draft_length=0),
            jobs,
            limits=Limits(max_new_tokens, chat.stop_ids, seed),
            store=ShardStore(folder, SHARD_SIZE),
            on_start=lambda _missing: on_event,
        )
        return rollouts, decoded

    return run


@pytest.fixture(scope="module")
def unbroken(make, jobs, tmp_path_factory):
    return make(jobs, tmp_path_factory.mktemp("unbroken"))[0]


def stored(folder):
    return ShardStore(folder, SHARD_SIZE).read()


def test_rollouts_come_in_the_order_of_their_jobs_and_carry_what_was_asked(jobs, unbroken):
    for job, rollout in zip(jobs, unbroken, strict=True):
        carried = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(job)}
        assert carried == dataclasses.asdict(job)
        assert rollout.key == job.key
    assert {rollout.temperature for rollout in unbroken} == {0.0, 0.7}


@torch.inference_mode()
def test_a_greedy_rollout_is_the_targets_argmax_token_for_token(target, chat, unbroken):
    for rollout in unbroken:
        ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
        logits = target(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
        same = logits.argmax(-1).tolist() == rollout.response_ids
        assert same or rollout.temperature > 0
        assert rollout.finished == (rollout.response_ids[-1] in chat.stop_ids)
        assert rollout.finished or len(rollout.response_ids) == MAX_NEW_TOKENS


def test_a_sampled_rollout_is_not_the_greedy_one(make, jobs, unbroken, tmp_path):
    cold = [dataclasses.replace(job, temperature=0.0) for job in jobs if job.temperature > 0]
    greedy, _ = make(cold, tmp_path)
    sampled = [rollout for rollout in unbroken if rollout.temperature > 0]
    pairs = zip(greedy, sampled, strict=True)
    assert any(one.response_ids != other.response_ids for one, other in pairs)


def test_a_rollout_depends_on_its_key_and_not_on_its_neighbours(make, jobs, unbroken, tmp_path):
    by_key = {rollout.key: rollout for rollout in unbroken}
    alone, _ = make(jobs[3:4], tmp_path / "alone")
    reversed_jobs, _ = make(jobs[::-1], tmp_path / "reversed", rows=7)
    for rollout in [*alone, *reversed_jobs]:
        assert rollout == by_key[rollout.key]


def test_another_seed_samples_other_responses_and_leaves_greedy_ones(
    make, jobs, unbroken, tmp_path
):
    other, _ = make(jobs, tmp_path, seed=1)
    changed = {
        one.temperature
        for one, two in zip(unbroken, other, strict=True)
        if one.response_ids != two.response_ids
    }
    assert changed == {0.7}


def test_a_killed_run_is_taken_up_where_its_last_full_shard_ended(make, jobs, unbroken, tmp_path):
    with pytest.raises(Killed):
        make(jobs, tmp_path, stop_after=8)
    kept = [rollout.key for rollout in stored(tmp_path)]
    assert len(kept) == 2 * SHARD_SIZE  # 7 were finished; the open shard is lost
    rollouts, decoded = make(jobs, tmp_path)
    assert sorted(kept + decoded) == sorted(job.key for job in jobs)
    assert rollouts == unbroken


def test_a_finished_run_decodes_nothing_again(make, jobs, unbroken, tmp_path):
    make(jobs, tmp_path)
    rollouts, decoded = make(jobs, tmp_path)
    assert decoded == []
    assert rollouts == unbroken


def test_jobs_that_are_added_are_the_only_ones_decoded(make, jobs, unbroken, tmp_path):
    make(jobs[:5], tmp_path)
    rollouts, decoded = make(jobs, tmp_path)
    assert sorted(decoded) == sorted(job.key for job in jobs[5:])
    assert rollouts == unbroken


def test_a_kept_rollout_has_the_domain_that_its_prompt_has_now(make, jobs, unbroken, tmp_path):
    make(jobs, tmp_path)
    renamed = [dataclasses.replace(job, domain=f"{job.domain} anew") for job in jobs]
    rollouts, decoded = make(renamed, tmp_path)
    assert decoded == []
    assert rollouts == [
        dataclasses.replace(rollout, domain=job.domain)
        for rollout, job in zip(unbroken, renamed, strict=True)
    ]


def test_kept_rollouts_that_nobody_asks_for_are_left_out(make, jobs, unbroken, tmp_path):
    make(jobs, tmp_path)
    assert make(jobs[:2], tmp_path) == (unbroken[:2], [])


def change_a_token(path):
    data = json.loads(path.read_text())
    data["rows"][0]["response_ids"][0] += 1
    path.write_text(json.dumps(data))


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_text("")


def other_json(path):
    path.write_text("[1, 2, 3]")


@pytest.mark.parametrize("damage", [change_a_token, cut_in_half, empty, other_json])
def test_a_damaged_shard_is_dropped_and_decoded_again(make, jobs, unbroken, tmp_path, damage):
    make(jobs, tmp_path)
    path = sorted(tmp_path.glob("shard-*.json"))[1]
    lost = [Rollout(**row).key for row in json.loads(path.read_text())["rows"]]
    damage(path)
    rollouts, decoded = make(jobs, tmp_path)
    assert sorted(decoded) == sorted(lost)
    assert rollouts == unbroken
    assert sorted(rollout.key for rollout in stored(tmp_path)) == sorted(job.key for job in jobs)
