"""Penalties and minimum lengths: exact at every draft position, whoever drafts."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from draftsmith.decoding import DraftModelProposer, Engine, NoProposer, Request, SamplingParams
from draftsmith.decoding.penalties import History, Penalties, penalise
from draftsmith.decoding.trace import accepted_fraction
from tests.decoding.laws import build_proposer, exact_law, p_value

NUM_NEW = 16
PROMPT = [6, 7, 7, 4, 7]


def decode(models, prompts, params, *, draft_length):
    proposer = DraftModelProposer(models.draft) if draft_length else NoProposer()
    engine = Engine(models.target, proposer, max_rows=3, draft_length=draft_length)
    results = engine.generate([Request(str(i), p, params) for i, p in enumerate(prompts)])
    return [result.token_ids for result in results]


@pytest.mark.parametrize("draft_length", [0, 3])
def test_presence_and_frequency_count_the_answer_alone(llama, ragged_prompts, draft_length):
    presence, frequency = 3.0, 1.5

    @torch.inference_mode()
    def loop(prompt):
        answer = []
        for _ in range(NUM_NEW):
            logits = llama.reference(torch.tensor([prompt + answer]), use_cache=False).logits[0, -1]
            for token in set(answer):
                logits[token] -= presence + frequency * answer.count(token)
            answer.append(int(logits.argmax()))
        return answer

    params = SamplingParams(
        max_new_tokens=NUM_NEW, presence_penalty=presence, frequency_penalty=frequency
    )
    expected = [loop(prompt) for prompt in ragged_prompts]
    assert decode(llama, ragged_prompts, params, draft_length=draft_length) == expected


@pytest.fixture(scope="module")
def small(family):
    return family("llama", vocab_size=8, noise=0.3)


@pytest.fixture(scope="module")
def penalised_law(small):
    """Probabilities of all answers of three tokens."""
    repetition = RepetitionPenaltyLogitsProcessor(1.3)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.9), MinPLogitsWarper(0.08)])

    def warp(inputs, logits):
        scores = repetition(inputs, logits)
        for row, token_ids in enumerate(inputs.tolist()):
            answer = token_ids[len(PROMPT) :]
            for token in set(answer):
                scores[row, token] -= 0.7 + 0.4 * answer.count(token)
        return warpers(inputs, scores)

    return exact_law(small.reference, PROMPT, 3, warp)


LAW_PARAMS = SamplingParams(
    max_new_tokens=3,
    temperature=0.9,
    min_p=0.08,
    repetition_penalty=1.3,
    presence_penalty=0.7,
    frequency_penalty=0.4,
)


@pytest.mark.parametrize(
    ("kind", "draft_length"),
    [("draft", 1), ("draft", 3), ("trimmed", 2), ("lookup", 2), ("lookup_first", 2)],
)
def test_penalised_answers_follow_the_targets_exact_law(small, penalised_law, kind, draft_length):
    proposer = build_proposer(kind, small)
    engine = Engine(small.target, proposer, max_rows=2000, draft_length=draft_length)
    results = engine.generate([Request(str(i), PROMPT, LAW_PARAMS) for i in range(8000)])
    assert 0.1 < accepted_fraction([r.trace for r in results]) < 0.95
    assert p_value(results, penalised_law) > 1e-3


def test_the_law_sees_a_penalty_that_forgets_the_drafts(small, penalised_law, monkeypatch):
    from draftsmith.decoding import batch

    def forgetful(logits, penalties, history, drafts, token_ids=None, _prefixes=()):
        blank = History(history.used, history.new, history.num_new)
        positions = [
            penalise(logits[:, i : i + 1], penalties, blank, drafts[:, :0], token_ids)
            for i in range(logits.shape[1])
        ]
        return torch.cat(positions, 1)

    monkeypatch.setattr(batch, "penalise", forgetful)
    engine = Engine(small.target, DraftModelProposer(small.draft), max_rows=2000, draft_length=3)
    results = engine.generate([Request(str(i), PROMPT, LAW_PARAMS) for i in range(8000)])
    is_possible = {tuple(result.token_ids) for result in results} <= set(penalised_law)
    assert not is_possible or p_value(results, penalised_law) < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalised_rows_and_plain_rows_do_not_change_each_other(llama, ragged_prompts, temperature):
    plain = SamplingParams(max_new_tokens=NUM_NEW, temperature=temperature)
    penalised = SamplingParams(
        max_new_tokens=NUM_NEW,
        temperature=temperature,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        min_p=0.1,
    )
    requests = [
        Request(str(i), prompt, (plain, penalised)[i % 2])
        for i, prompt in enumerate(ragged_prompts)
    ]

    def run(chosen):
        proposer = DraftModelProposer(llama.draft)
        engine = Engine(llama.target, proposer, max_rows=5, draft_length=3)
        return [result.token_ids for result in engine.generate(chosen)]

    assert run(requests) == [run([request])[0] for request in requests]


def test_each_position_is_penalised_for_the_drafts_before_it():
    off = torch.zeros(1)
    penalties = Penalties(
        repetition=torch.ones(1),
        presence=off,
        frequency=torch.ones(1),
        min_new=torch.tensor([2]),
        stops=torch.tensor([[False, False, False, True]]),
    )
    none = torch.zeros(1, 4, dtype=torch.int32)
    history = History(none, none, torch.tensor([0]))
    drafts = torch.tensor([[1, 1]])
    got = penalise(torch.zeros(1, 3, 4), penalties, history, drafts)
    inf = torch.inf
    expected = [[0.0, 0.0, 0.0, -inf], [0.0, -1.0, 0.0, -inf], [0.0, -2.0, 0.0, 0.0]]
    assert got[0].tolist() == expected
    last = penalise(torch.zeros(1, 1, 2), penalties, history, drafts, torch.tensor([3, 1]))
    assert last[0].tolist() == [[0.0, -2.0]]
    assert history.used.sum() == 0
