from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from draftsmith.decoding import Engine, NoProposer, Request, SamplingParams
from draftsmith.decoding.trace import position_counts
from draftsmith.errors import DecodingError
from draftsmith.evaluation import acceptance
from draftsmith.evaluation.acceptance import (
    DecodingPlan,
    copied_rounds,
    decode,
    estimate_tau,
    teacher_forced_alpha,
)

TEMPERATURES = [0.0, 0.7]
NUM_ANSWERS = 12  # to a prompt, where chance has to be small


def at(rollouts, temperature):
    return [rollout for rollout in rollouts if rollout.temperature == temperature]


def weighted(alphas):
    total = sum(entry.alpha * entry.num_positions for entry in alphas.values())
    return total / sum(entry.num_positions for entry in alphas.values())


@torch.inference_mode()
def by_hand(target, draft, rollout, temperature):
    """alpha of every response position from plain forwards of both models, float64."""
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    p_logits, q_logits = (
        model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].double()
        for model in (target, draft.model)
    )
    token_ids = draft.token_ids
    if token_ids is None:
        token_ids = torch.arange(p_logits.shape[-1])
    if temperature == 0:
        return (p_logits.argmax(-1) == token_ids[q_logits.argmax(-1)]).double()
    q = torch.zeros_like(p_logits)
    q[:, token_ids] = (q_logits / temperature).softmax(-1)
    return (p_logits / temperature).softmax(-1).minimum(q).sum(-1)


@pytest.mark.parametrize("temperature", TEMPERATURES)
class TestTeacherForced:
    def test_a_draft_with_all_the_targets_layers_is_always_accepted(
        self, target, drafts, rollouts, temperature
    ):
        alphas = teacher_forced_alpha(
            target, drafts["whole"], at(rollouts, temperature), temperature=temperature
        )
        assert [entry.alpha for entry in alphas.values()] == pytest.approx([1.0] * len(alphas))

    def test_a_random_draft_is_hardly_ever_accepted_and_a_student_more_often(
        self, target, drafts, rollouts, temperature
    ):
        chosen = at(rollouts, temperature)
        random, student = (
            weighted(teacher_forced_alpha(target, drafts[name], chosen, temperature=temperature))
            for name in ("random", "student")
        )
        assert random < 0.05
        assert random + 0.15 < student < 0.98

    @pytest.mark.parametrize("name", ["student", "trimmed"])
    def test_it_is_the_overlap_of_both_distributions(
        self, target, drafts, rollouts, temperature, name
    ):
        """With a trimmed vocabulary q is zero outside of it."""
        chosen = at(rollouts, temperature)
        alphas = teacher_forced_alpha(target, drafts[name], chosen, temperature=temperature)
        assert list(alphas) != []
        for rollout in chosen:
            expected = by_hand(target, drafts[name], rollout, temperature)
            entry = alphas[rollout.prompt_id]
            assert entry.alpha == pytest.approx(float(expected.mean()), abs=1e-5)
            assert entry.num_positions == len(rollout.response_ids)

    @pytest.mark.parametrize("name", ["student", "trimmed"])
    def test_batching_does_not_change_it(
        self, target, drafts, rollouts, temperature, name, monkeypatch
    ):
        chosen = at(rollouts, temperature)
        alone = {}
        together = teacher_forced_alpha(target, drafts[name], chosen, temperature=temperature)
        monkeypatch.setattr(acceptance, "_POSITIONS_PER_CHUNK", 3)
        for rollout in chosen:
            alone |= teacher_forced_alpha(target, drafts[name], [rollout], temperature=temperature)
        assert together.keys() == alone.keys()
        for prompt_id, entry in together.items():
            assert entry.alpha == pytest.approx(alone[prompt_id].alpha, abs=1e-5)
            assert entry.num_positions == alone[prompt_id].num_positions

    def test_a_vocabulary_caps_it_at_the_targets_mass_inside(
        self, target, drafts, rollouts, temperature
    ):
        """A draft that knows only tokens which the target never says is never accepted."""
        draft = drafts["trimmed"]
        said = {token for rollout in rollouts for token in rollout.response_ids}
        vocab_size = target.get_output_embeddings().weight.shape[0]
        unsaid = [token for token in range(vocab_size) if token not in said]
        elsewhere = torch.tensor(unsaid[: len(draft.token_ids)])
        deaf = dataclasses.replace(draft, token_ids=elsewhere)
        chosen = at(rollouts, temperature)
        assert weighted(teacher_forced_alpha(target, deaf, chosen, temperature=temperature)) < 0.05


def test_progress_counts_every_rollout_and_empty_responses_are_left_out(
    target, drafts, rollouts, monkeypatch
):
    monkeypatch.setattr(acceptance, "_TOKENS_PER_FORWARD", 200)
    chosen = at(rollouts, 0.0)
    empty = dataclasses.replace(chosen[0], prompt_id="empty", response_ids=[])
    done = []
    alphas = teacher_forced_alpha(
        target, drafts["student"], [*chosen, empty], temperature=0.0, on_batch=done.append
    )
    assert sum(done) == len(alphas) == len(chosen)
    assert len(done) > 1


class TestDecoding:
    def plan(self, stop_ids, *, draft_length=1, lookup_length=0, batch_size=8, seed=0):
        return DecodingPlan(draft_length, lookup_length, 20, batch_size, stop_ids, seed)

    @pytest.mark.parametrize("name", ["student", "trimmed"])
    def test_survival_at_temperature_0_is_the_agreement_where_rounds_begin(
        self, target, drafts, rollouts, prompts, stop_ids, name
    ):
        """Walks the teacher-forced agreement in rounds: an accepted draft skips a position."""
        results = decode(target, drafts[name], prompts, temperature=0.0, plan=self.plan(stop_ids))
        drafted = accepted = 0
        for rollout in at(rollouts, 0.0):
            assert results[rollout.prompt_id].token_ids == rollout.response_ids
            agrees = by_hand(target, drafts[name], rollout, 0.0).bool().tolist()
            place = 0
            while place < min(len(agrees), 20 - 1):  # the last token is never drafted
                drafted += 1
                accepted += agrees[place]
                place += 1 + agrees[place]
        counts = position_counts([result.trace for result in results.values()], 1)
        assert (counts.drafted, counts.accepted) == ([drafted], [accepted])

    @pytest.mark.parametrize("name", ["student", "trimmed"])
    def test_survival_of_the_first_position_is_the_teacher_forced_alpha_where_rounds_begin(
        self, target, drafts, rollouts, stop_ids, name
    ):
        """A draft is kept with the probability alpha of its position, so both means are near."""
        asked = {f"{n}/{r.prompt_id}": r for r in at(rollouts, 0.7) for n in range(NUM_ANSWERS)}
        results = decode(
            target,
            drafts[name],
            [(request_id, rollout.prompt_ids) for request_id, rollout in asked.items()],
            temperature=0.7,
            plan=self.plan(stop_ids, batch_size=64),
        )
        alphas = []
        for request_id, rollout in asked.items():
            result, place = results[request_id], 0
            answer = dataclasses.replace(rollout, response_ids=result.token_ids)
            told = by_hand(target, drafts[name], answer, 0.7).tolist()
            rounds = zip(result.trace.drafted, result.trace.committed, strict=True)
            for num_drafted, num_committed in rounds:
                alphas += told[place : place + num_drafted]
                place += num_committed
        counts = position_counts([result.trace for result in results.values()], 1)
        assert len(alphas) == counts.drafted[0] > 3000
        assert counts.survival[0] == pytest.approx(sum(alphas) / len(alphas), abs=0.02)

    def test_copies_change_no_answer_and_are_counted_apart(
        self, target, drafts, rollouts, stop_ids
    ):
        asked_twice = [
            (r.prompt_id, r.prompt_ids + r.response_ids + r.prompt_ids) for r in at(rollouts, 0.0)
        ]
        plans = [self.plan(stop_ids, draft_length=2, lookup_length=n) for n in (0, 4)]
        decoded = [
            decode(target, drafts["student"], asked_twice, temperature=0.0, plan=plan)
            for plan in plans
        ]
        answers = [{name: r.token_ids for name, r in results.items()} for results in decoded]
        assert answers[0] == answers[1]
        plain, copied = (
            copied_rounds([result.trace for result in results.values()], 4) for results in decoded
        )
        assert plain == {"share": 0.0, "survival": [0.0] * 4}
        assert 0 < copied["share"] < 1
        assert len(copied["survival"]) == 4

    def test_a_perfect_draft_is_accepted_in_every_round(self, target, drafts, prompts, stop_ids):
        plan = self.plan(stop_ids, draft_length=3)
        for temperature in TEMPERATURES:
            results = decode(target, drafts["whole"], prompts, temperature=temperature, plan=plan)
            counts = position_counts([result.trace for result in results.values()], 3)
            assert counts.survival == pytest.approx([1.0] * 3, abs=0.01)

    @pytest.mark.parametrize("temperature", TEMPERATURES)
    def test_results_do_not_depend_on_the_batch(
        self, target, drafts, prompts, stop_ids, temperature
    ):
        small, large = (
            decode(
                target,
                drafts["student"],
                prompts[:8],
                temperature=temperature,
                plan=self.plan(stop_ids, draft_length=2, batch_size=size),
            )
            for size in (1, 8)
        )
        assert small == large

    def test_greedy_output_is_that_of_the_target_alone(self, target, drafts, prompts, stop_ids):
        plan = self.plan(stop_ids, draft_length=3)
        results = decode(target, drafts["random"], prompts[:6], temperature=0.0, plan=plan)
        params = SamplingParams(max_new_tokens=20, stop_token_ids=stop_ids)
        plain = Engine(target, NoProposer(), max_rows=6, draft_length=0).generate(
            [Request(name, ids, params) for name, ids in prompts[:6]]
        )
        assert [results[r.request_id].token_ids for r in plain] == [r.token_ids for r in plain]

    def test_what_a_lossy_engine_decoded_is_no_evidence(
        self, target, drafts, prompts, stop_ids, monkeypatch
    ):
        lossy = partial(Engine, verify="typical_lossy")
        monkeypatch.setattr(acceptance, "Engine", lossy)
        plan = self.plan(stop_ids, draft_length=2)
        results = decode(target, drafts["student"], prompts[:3], temperature=0.7, plan=plan)
        traces = [result.trace for result in results.values()]
        for count in (partial(estimate_tau, seed=0), partial(copied_rounds, lookup_length=2)):
            with pytest.raises(DecodingError, match="3 of 3 requests that a lossy engine decoded"):
                count(traces)
