"""Log-probabilities and logit bias: exact at every draft position, whoever drafts."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, SequenceBiasLogitsProcessor, TemperatureLogitsWarper

from draftsmith.decoding import DraftModelProposer, Engine, NoProposer, Request, SamplingParams
from draftsmith.decoding.trace import accepted_fraction
from draftsmith.errors import DecodingError
from tests.decoding.laws import build_proposer, exact_law, p_value

NUM_NEW = 16
PROMPT = [6, 7, 7, 4, 7]
BIAS = ((1, 1.5), (3, -2.0), (6, 0.7))


def events_of(models, requests, *, draft_length, verify="rejection", max_rows=5):
    proposer = DraftModelProposer(models.draft) if draft_length else NoProposer()
    engine = Engine(
        models.target, proposer, max_rows=max_rows, draft_length=draft_length, verify=verify
    )
    return list(engine.stream(requests))


@torch.inference_mode()
def reference_of(model, prompt, answer):
    logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


@pytest.mark.parametrize("verify", ["rejection", "match"])
@pytest.mark.parametrize("draft_length", [0, 1, 4])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 1.1, "top_k": 9},
        {"temperature": 0.7, "repetition_penalty": 1.4, "logit_bias": ((5, 3.0), (9, -9.0))},
        {"stop_token_ids": tuple(range(30, 64))},
    ],
)
def test_log_probabilities_are_those_of_a_full_forward(
    llama, ragged_prompts, verify, draft_length, given
):
    params = SamplingParams(max_new_tokens=NUM_NEW, **given)
    # Every second request asks, among others that do not.
    requests = [
        Request(str(i), prompt, params, num_top=(3, None)[i % 2])
        for i, prompt in enumerate(ragged_prompts)
    ]
    found = {request.request_id: ([], []) for request in requests}
    for event in events_of(llama, requests, draft_length=draft_length, verify=verify):
        found[event.request_id][0].extend(event.token_ids)
        found[event.request_id][1].extend(event.logprobs)
    for request in requests:
        answer, logprobs = found[request.request_id]
        if request.num_top is None:
            assert logprobs == []
            continue
        expected = reference_of(llama.reference, request.prompt_ids, answer)
        chosen = expected.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)
        assert [one.logprob for one in logprobs] == pytest.approx(chosen.tolist(), abs=1e-4)
        top = expected.topk(3)
        assert [[i for i, _ in one.top] for one in logprobs] == top.indices.tolist()
        values = [value for one in logprobs for _, value in one.top]
        assert values == pytest.approx(top.values.flatten().tolist(), abs=1e-4)


def test_asking_for_log_probabilities_changes_no_token(llama, ragged_prompts):
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.9)
    runs = [
        [
            (event.request_id, event.token_ids)
            for event in events_of(
                llama,
                [Request(str(i), p, params, num_top=wanted) for i, p in enumerate(ragged_prompts)],
                draft_length=3,
            )
        ]
        for wanted in (None, 0, 20)
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.fixture(scope="module")
def small(family):
    return family("llama", vocab_size=8, noise=0.3)


@pytest.fixture(scope="module")
def biased_law(small):
    """Probabilities of all answers of three tokens, by Transformers' own processors."""
    bias = SequenceBiasLogitsProcessor({(token,): value for token, value in BIAS})
    warpers = LogitsProcessorList([bias, TemperatureLogitsWarper(0.8)])
    return exact_law(small.reference, PROMPT, 3, warpers)


@pytest.mark.parametrize("verify", ["rejection", "match"])
@pytest.mark.parametrize(
    ("kind", "draft_length"),
    [("none", 0), ("draft", 1), ("draft", 3), ("trimmed", 2), ("lookup_first", 2)],
)
def test_biased_answers_follow_the_targets_exact_law(small, biased_law, kind, draft_length, verify):
    proposer = build_proposer(kind, small)
    params = SamplingParams(max_new_tokens=3, temperature=0.8, logit_bias=BIAS)
    engine = Engine(small.target, proposer, max_rows=2000, draft_length=draft_length, verify=verify)
    results = engine.generate([Request(str(i), PROMPT, params) for i in range(8000)])
    if draft_length:
        assert 0.1 < accepted_fraction([r.trace for r in results]) < 0.95
    assert p_value(results, biased_law) > 1e-3
    without = [
        Request(str(i), PROMPT, SamplingParams(max_new_tokens=3, temperature=0.8))
        for i in range(8000)
    ]
    assert p_value(engine.generate(without), biased_law) < 1e-9


def test_a_bias_is_added_before_penalties_as_transformers_does(llama):
    params = {"repetition_penalty": 1.3, "logit_bias": ((5, 2.0), (11, -4.0))}
    request = Request("a", PROMPT, SamplingParams(max_new_tokens=NUM_NEW, **params))
    (result,) = Engine(
        llama.target, DraftModelProposer(llama.draft), max_rows=1, draft_length=3
    ).generate([request])
    inputs = torch.tensor([PROMPT])
    expected = llama.reference.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        repetition_penalty=1.3,
        sequence_bias={(5,): 2.0, (11,): -4.0},
        pad_token_id=0,
    )
    assert result.token_ids == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("bias", [((-1, 1.0),), ((1, 100.5),), ((1, float("nan")),)])
def test_a_bias_out_of_range_is_refused_by_name(bias):
    with pytest.raises(DecodingError, match="sampling parameter logit_bias"):
        SamplingParams(max_new_tokens=1, logit_bias=bias)


def test_a_bias_outside_the_vocabulary_is_refused(llama):
    params = SamplingParams(max_new_tokens=1, logit_bias=((64, 1.0),))
    engine = Engine(llama.target, NoProposer(), max_rows=1, draft_length=0)
    with pytest.raises(DecodingError, match=r"a bias of ids outside 0\.\.63"):
        engine.generate([Request("a", [1], params)])


def test_the_same_key_gives_the_same_tokens_under_any_id(llama):
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=1.0, seed=5)
    requests = [
        Request("a", PROMPT, params, draw_key="0"),
        Request("b", PROMPT, params, draw_key="0"),
        Request("0", PROMPT, params),
        Request("c", PROMPT, params, draw_key="1"),
    ]
    engine = Engine(llama.target, DraftModelProposer(llama.draft), max_rows=4, draft_length=3)
    tokens = [result.token_ids for result in engine.generate(requests)]
    assert tokens[0] == tokens[1] == tokens[2] != tokens[3]
