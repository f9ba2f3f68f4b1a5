"""Greedy decoding equals the target's own argmax loop token for token in fp32, whoever drafts."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from draftsmith.decoding import (
    DraftModelProposer,
    Engine,
    FixedLengths,
    Lengths,
    LookupFirstProposer,
    NoProposer,
    PromptLookupProposer,
    Request,
    SamplingParams,
)
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.decoding.trace import accepted_fraction

KINDS = [
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
]
NUM_NEW = 20


@pytest.fixture(scope="module")
def expected(family, continue_greedily, ragged_prompts):
    """The argmax loop's tokens of every ragged prompt, by class."""

    @functools.cache
    def tokens(kind: str) -> list[list[int]]:
        model = family(kind).reference
        return [continue_greedily(model, prompt, NUM_NEW) for prompt in ragged_prompts]

    return tokens


def greedy_requests(prompts: list[list[int]], num_new: int = NUM_NEW) -> list[Request]:
    params = SamplingParams(max_new_tokens=num_new)
    return [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_not_trivial(expected, kind):
    distinct = [len(set(tokens)) for tokens in expected(kind)]
    assert sum(distinct) > 20, "constant generation would hide a broken cache"


@pytest.mark.parametrize("draft_length", range(9))
@pytest.mark.parametrize("kind", KINDS)
def test_output_equals_the_targets_argmax_loop(
    family, expected, ragged_prompts, kind, draft_length
):
    models = family(kind)
    proposer = DraftModelProposer(models.draft)
    engine = Engine(models.target, proposer, max_rows=3, draft_length=draft_length)
    results = engine.generate(greedy_requests(ragged_prompts))
    assert [r.token_ids for r in results] == expected(kind)
    if draft_length:  # accepting and rejecting both happen
        assert 0.05 < accepted_fraction([r.trace for r in results]) < 0.95


@pytest.mark.parametrize("draft_length", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_output_does_not_depend_on_who_drafts(family, expected, ragged_prompts, kind, draft_length):
    models = family(kind)
    mixed = LookupFirstProposer(
        DraftModelProposer(models.draft), FixedLengths(Lengths(2, copy=4)), min_ngram=1
    )
    for proposer in (PromptLookupProposer(), NoProposer(), mixed):
        engine = Engine(models.target, proposer, max_rows=5, draft_length=draft_length)
        results = engine.generate(greedy_requests(ragged_prompts))
        assert [r.token_ids for r in results] == expected(kind)


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_a_draft_of_another_attention_kind_changes_nothing(family, expected, ragged_prompts, kind):
    draft = copy.deepcopy(family("qwen2").reference)  # full attention against a window
    engine = Engine(family(kind).target, DraftModelProposer(draft), max_rows=2, draft_length=3)
    results = engine.generate(greedy_requests(ragged_prompts))
    assert [r.token_ids for r in results] == expected(kind)


@pytest.mark.parametrize("max_rows", [1, 2, 5, 50])
def test_output_does_not_depend_on_the_number_of_rows(llama, expected, ragged_prompts, max_rows):
    proposer = DraftModelProposer(llama.draft)
    engine = Engine(llama.target, proposer, max_rows=max_rows, draft_length=3)
    results = engine.generate(greedy_requests(ragged_prompts))
    assert [r.token_ids for r in results] == expected("llama")


def test_an_engine_that_was_used_before_or_left_in_the_middle_starts_afresh(
    llama, expected, ragged_prompts
):
    engine = Engine(llama.target, DraftModelProposer(llama.draft), max_rows=3, draft_length=3)
    engine.generate(greedy_requests([[9] * 40, [8] * 30, [7] * 20]))
    abandoned = engine.stream(greedy_requests(ragged_prompts))
    next(abandoned)
    abandoned.close()
    results = engine.generate(greedy_requests(ragged_prompts))
    assert [r.token_ids for r in results] == expected("llama")


@pytest.mark.parametrize("draft_length", range(1, 9))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_target_as_its_own_draft_is_accepted_throughout(llama, draft_length, temperature):
    params = SamplingParams(max_new_tokens=220, temperature=temperature)
    draft = copy.deepcopy(llama.reference)
    engine = Engine(llama.target, DraftModelProposer(draft), max_rows=2, draft_length=draft_length)
    results = engine.generate([Request("a", [34, 48, 29], params), Request("b", [1], params)])
    traces = [result.trace for result in results]
    if temperature == 0:
        assert all(trace.accepted == trace.drafted for trace in traces)
    assert accepted_fraction(traces) >= 0.999
    assert all(len(result.token_ids) == 220 for result in results)
    # A full accept commits every draft and the bonus token.
    rounds = -(-220 // (draft_length + 1))
    assert all(rounds <= trace.num_rounds <= rounds + 1 for trace in traces)


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "gpt2"])
def test_the_target_as_its_own_draft_is_accepted_in_every_class(family, kind):
    models = family(kind)
    draft = DraftModelProposer(copy.deepcopy(models.reference))
    engine = Engine(models.target, draft, max_rows=2, draft_length=5)
    params = SamplingParams(max_new_tokens=210)
    results = engine.generate([Request("a", [34, 48, 29], params), Request("b", [1], params)])
    assert all(r.trace.accepted == r.trace.drafted for r in results)


def test_one_model_may_be_target_and_draft(llama, expected, ragged_prompts):
    engine = Engine(llama.target, DraftModelProposer(llama.target), max_rows=3, draft_length=4)
    results = engine.generate(greedy_requests(ragged_prompts))
    assert [r.token_ids for r in results] == expected("llama")
    assert all(r.trace.accepted == r.trace.drafted for r in results)


@torch.inference_mode()
def _prefilled(model, token_ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of a fresh prefill, `[heads, tokens, dim]` a layer."""
    slots = SlotModel(copy.deepcopy(model))
    slots.reserve(rows=1, slots=len(token_ids))
    positions = torch.arange(len(token_ids))[None]
    slots.forward(torch.tensor([token_ids]), positions, span=len(token_ids))
    assert slots.cache is not None
    length = len(token_ids)
    return [(c.keys[0, :, :length], c.values[0, :, :length]) for c in slots.cache.layers]


def _assert_holds(slots: SlotModel, row: int, model, token_ids: list[int]) -> None:
    for layer, want in zip(slots.cache.layers, _prefilled(model, token_ids), strict=True):
        got = (layer.keys[row, :, : len(token_ids)], layer.values[row, :, : len(token_ids)])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rolled_back_caches_equal_a_fresh_prefill(family, ragged_prompts, kind, temperature):
    models = family(kind)
    proposer = DraftModelProposer(models.draft)
    draft_length = 4
    engine = Engine(models.target, proposer, max_rows=3, draft_length=draft_length)
    params = SamplingParams(max_new_tokens=40, temperature=temperature)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(ragged_prompts)]
    engine.open(max(len(prompt) for prompt in ragged_prompts) + 40)
    engine.submit(requests)
    refilled: list = []
    while not any(row.trace.num_rounds >= 3 for row in refilled):
        assert engine.step(), "no row took a retired row's place"
        rows = engine._batch.rows
        refilled = [row for row in rows if row.request.request_id in ("3", "4")]
    for row in rows:
        index = rows.index(row)
        committed = row.token_ids[: -1 - draft_length]  # the draft's may lag by one round
        _assert_holds(engine._target, index, models.reference, row.token_ids[:-1])
        _assert_holds(proposer._slots, index, models.draft, committed)
