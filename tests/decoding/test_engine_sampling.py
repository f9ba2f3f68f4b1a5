"""Sampled decoding follows the target's exact law, through the whole engine, and repeats itself."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.decoding import (
    DraftModelProposer,
    Engine,
    NoProposer,
    Request,
    SamplingParams,
)
from draftsmith.decoding import acceptance as rule_module
from draftsmith.decoding.distribution import Dense
from draftsmith.decoding.trace import accepted_fraction
from tests.decoding.laws import build_proposer, exact_law, p_value

VOCAB = 8
NUM_REQUESTS = 8000
PROMPT = [6, 7, 7, 4, 7]
TEMPERATURE, TOP_K, TOP_P = 0.7, 4, 0.9
SIGNIFICANCE = 1e-3


@pytest.fixture(scope="module")
def small(family):
    """So few tokens that every continuation can be counted; the draft is far from the target."""
    return family("llama", vocab_size=VOCAB, noise=0.3)


@pytest.fixture(scope="module")
def law_of(small):
    """Probabilities of all continuations of a length, by Transformers' own warpers."""
    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)]
    )
    return functools.cache(lambda num_new: exact_law(small.reference, PROMPT, num_new, warpers))


def sampled(
    small, kind: str, draft_length: int, num_new: int, *, count=NUM_REQUESTS, proposer=None
):
    params = SamplingParams(
        max_new_tokens=num_new, temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P
    )
    requests = [Request(str(i), PROMPT, params) for i in range(count)]
    proposer = proposer or build_proposer(kind, small)
    engine = Engine(small.target, proposer, max_rows=2000, draft_length=draft_length)
    return engine.generate(requests)


@pytest.mark.parametrize(
    ("kind", "draft_length", "num_new", "count"),
    [
        ("draft", 1, 3, 30000),
        ("draft", 4, 5, 30000),
        ("trimmed", 3, 3, NUM_REQUESTS),
        ("lookup", 3, 3, NUM_REQUESTS),
        ("lookup_first", 3, 4, NUM_REQUESTS),
        ("lookup_first_trimmed", 3, 3, NUM_REQUESTS),
        ("none", 0, 3, NUM_REQUESTS),
    ],
)
def test_continuations_follow_the_targets_exact_law(
    small, law_of, kind, draft_length, num_new, count
):
    results = sampled(small, kind, draft_length, num_new, count=count)
    if kind != "none":
        assert 0.1 < accepted_fraction([r.trace for r in results]) < 0.9
    assert p_value(results, law_of(num_new)) > SIGNIFICANCE


def _target_as_residual(p, _q):
    return p


def _softmax_residual(p, q):
    return (p - q).clamp(min=0).softmax(-1)


@pytest.mark.parametrize("wrong", [_target_as_residual, _softmax_residual])
def test_the_test_has_the_power_to_see_a_wrong_residual(small, law_of, monkeypatch, wrong):
    monkeypatch.setattr(rule_module, "residual", wrong)
    results = sampled(small, "draft", 3, 3)
    law = law_of(3)
    is_possible = {tuple(result.token_ids) for result in results} <= set(law)
    assert not is_possible or p_value(results, law) < 1e-9


class ArgmaxDraft(DraftModelProposer):
    """Drafts the most likely token and hands on the law that it did not draw from."""

    def propose(self, batch, counts):
        proposal = super().propose(batch, counts)
        tokens = proposal.drawn_from.probs.argmax(-1)
        return dataclasses.replace(proposal, tokens=tokens, entries=tokens)


class WarmLaw(DraftModelProposer):
    """Draws at the temperature and hands on the law before it."""

    def propose(self, batch, counts):
        proposal = super().propose(batch, counts)
        probs = proposal.drawn_from.probs**TEMPERATURE
        return dataclasses.replace(proposal, drawn_from=Dense(probs / probs.sum(-1, keepdim=True)))


class TimidDraft(DraftModelProposer):
    """Draws, then takes back a draft that it thinks unlikely, and all behind it."""

    def propose(self, batch, counts):
        proposal = super().propose(batch, counts)
        likely = proposal.drawn_from.probs.gather(-1, proposal.tokens[..., None])[..., 0] > 0.4
        kept = likely.long().cumprod(-1).sum(-1)
        return dataclasses.replace(proposal, counts=torch.minimum(proposal.counts, kept))


@pytest.mark.parametrize("wrong", [ArgmaxDraft, WarmLaw, TimidDraft])
def test_the_test_has_the_power_to_see_a_draft_that_misstates_its_law(small, law_of, wrong):
    results = sampled(small, "draft", 3, 3, proposer=wrong(small.draft))
    law = law_of(3)
    is_possible = {tuple(result.token_ids) for result in results} <= set(law)
    assert not is_possible or p_value(results, law) < 1e-9


def test_the_test_has_the_power_to_see_an_untruncated_law(small, law_of):
    params = SamplingParams(max_new_tokens=2, temperature=TEMPERATURE)
    requests = [Request(str(i), PROMPT, params) for i in range(NUM_REQUESTS)]
    results = Engine(small.target, NoProposer(), max_rows=2000, draft_length=0).generate(requests)
    assert not {tuple(result.token_ids) for result in results} <= set(law_of(2))


# ------------------------------------------------------------------- neighbours, seeds, ids

MIXED = [
    SamplingParams(max_new_tokens=24, temperature=0.8),
    SamplingParams(max_new_tokens=17),
    SamplingParams(max_new_tokens=30, temperature=1.0, top_k=20, top_p=0.9),
    SamplingParams(max_new_tokens=5, temperature=0.6, seed=7),
    SamplingParams(max_new_tokens=24),
]


def mixed_requests(prompts: list[list[int]]) -> list[Request]:
    return [
        Request(f"request {i}", prompt, params)
        for i, (prompt, params) in enumerate(zip(prompts, MIXED, strict=True))
    ]


def tokens_by_id(models, requests: list[Request], *, max_rows: int, draft_length: int):
    proposer = DraftModelProposer(models.draft)
    engine = Engine(models.target, proposer, max_rows=max_rows, draft_length=draft_length)
    results = engine.generate(requests)
    assert [r.request_id for r in results] == [r.request_id for r in requests]
    return {r.request_id: r.token_ids for r in results}


@pytest.mark.parametrize("draft_length", [0, 1, 4])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_result_does_not_depend_on_neighbours_or_order(
    family, ragged_prompts, kind, draft_length
):
    models = family(kind)
    requests = mixed_requests(ragged_prompts)
    alone = {}
    for request in requests:
        alone |= tokens_by_id(models, [request], max_rows=1, draft_length=draft_length)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        permuted = [requests[i] for i in order]
        for max_rows in (2, 5):
            assert alone == tokens_by_id(
                models, permuted, max_rows=max_rows, draft_length=draft_length
            )


def test_a_greedy_request_among_sampled_ones_stays_greedy(llama, continue_greedily, ragged_prompts):
    found = tokens_by_id(llama, mixed_requests(ragged_prompts), max_rows=5, draft_length=3)
    for index in (1, 4):
        want = continue_greedily(
            llama.reference, ragged_prompts[index], MIXED[index].max_new_tokens
        )
        assert found[f"request {index}"] == want


def test_a_sampled_request_is_not_greedy(llama, continue_greedily):
    prompt = [34, 48, 29]
    params = SamplingParams(max_new_tokens=30, temperature=1.0)
    found = tokens_by_id(llama, [Request("a", prompt, params)], max_rows=1, draft_length=3)
    assert found["a"] != continue_greedily(llama.reference, prompt, 30)


def test_seed_and_id_repeat_a_result_and_other_seeds_or_ids_change_it(llama):
    def run(seed: int, name: str) -> tuple[int, ...]:
        params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=seed)
        request = Request(name, [34, 48, 29], params)
        return tuple(tokens_by_id(llama, [request], max_rows=1, draft_length=3)[name])

    keys = list(itertools.product(range(3), ["a", "b", "c"]))
    first = [run(*key) for key in keys]
    assert first == [run(*key) for key in keys]
    assert len(set(first)) == len(keys)


def test_samples_of_one_prompt_in_one_batch_differ(llama):
    params = SamplingParams(max_new_tokens=12, temperature=1.0)
    requests = [Request(str(i), [34, 48, 29], params) for i in range(16)]
    found = tokens_by_id(llama, requests, max_rows=16, draft_length=3)
    assert len({tuple(tokens) for tokens in found.values()}) > 12


def test_the_smallest_temperature_decodes_as_temperature_zero(llama, continue_greedily):
    params = SamplingParams(max_new_tokens=20, temperature=1e-6)
    found = tokens_by_id(llama, [Request("a", [34, 48, 29], params)], max_rows=1, draft_length=3)
    assert found["a"] == continue_greedily(llama.reference, [34, 48, 29], 20)
