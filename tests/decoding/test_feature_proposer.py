"""Heads on the target's states draft losslessly, and these states cost no forward."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random

import pytest
import torch

from draftsmith.decoding import (
    NO_TREES,
    DraftModelProposer,
    Engine,
    FixedLengths,
    Lengths,
    LookupFirstProposer,
    NoProposer,
    Request,
    RequestFaultError,
    SamplingParams,
    Tree,
    TreesByRows,
)
from draftsmith.decoding.trace import accepted_fraction
from tests.decoding.arrivals import CONTEXT, live_through, random_requests
from tests.decoding.heads import SHAPE, fitted_head, fitted_heads, head_proposer
from tests.decoding.laws import exact_law, p_value

KINDS = ["gemma3", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
OTHER_KINDS = [
    "gemma2",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "olmo2",
    "phi3",
    "smollm3",
]
FIT = {"eagle": fitted_head, "medusa": fitted_heads}
NUM_NEW = 20


@pytest.fixture(scope="module")
def answers(family, continue_greedily, ragged_prompts):
    """`answers(kind)`: the argmax continuation of every prompt."""

    @functools.cache
    def of(kind):
        model = family(kind).reference
        return [continue_greedily(model, prompt, NUM_NEW) for prompt in ragged_prompts]

    return of


@pytest.fixture(scope="module", params=sorted(FIT))
def fit(request):
    """What fits a head of a family, or all heads of it."""
    return FIT[request.param]


@pytest.fixture(scope="module")
def head_of(family, answers, ragged_prompts, fit):
    """`head_of(kind)`: fitted to these answers."""

    @functools.cache
    def of(kind):
        texts = list(zip(ragged_prompts, answers(kind), strict=True))
        return fit(family(kind).reference, texts)

    return of


def greedy_requests(prompts, num_new=NUM_NEW):
    params = SamplingParams(max_new_tokens=num_new)
    return [Request(str(i), list(prompt), params) for i, prompt in enumerate(prompts)]


def engine_of(family, head_of, kind="llama", *, rows=3, draft_length=3, **options):
    proposer = head_proposer(head_of(kind))
    return Engine(
        family(kind).target, proposer, max_rows=rows, draft_length=draft_length, **options
    )


@pytest.mark.parametrize("draft_length", range(9))
@pytest.mark.parametrize("max_rows", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_output_equals_the_targets_argmax_loop(  # noqa: PLR0917  fixtures are arguments
    family, head_of, answers, ragged_prompts, kind, max_rows, draft_length
):
    engine = engine_of(family, head_of, kind, rows=max_rows, draft_length=draft_length)
    results = engine.generate(greedy_requests(ragged_prompts))
    assert [r.token_ids for r in results] == answers(kind)
    if draft_length:  # accepting and rejecting both happen
        assert accepted_fraction([r.trace for r in results]) > 0.1
    if draft_length > 3:
        assert accepted_fraction([r.trace for r in results]) < 0.99


@pytest.mark.parametrize("own_heads", [False, True])
@pytest.mark.parametrize("kind", [*OTHER_KINDS, "qwen3", "qwen3_moe"])
def test_heads_on_the_last_state_draft_for_any_target(
    family, answers, ragged_prompts, kind, own_heads
):
    texts = list(zip(ragged_prompts, answers(kind), strict=True))
    shape = dataclasses.replace(SHAPE, own_heads=own_heads)
    heads = fitted_heads(family(kind).reference, texts, shape=shape)
    for trees in (NO_TREES, TreesByRows({3: Tree((0, 0, 1, 1, 2, 3, 3))})):
        proposer = head_proposer(heads, trees=trees)
        engine = Engine(family(kind).target, proposer, max_rows=3, draft_length=4)
        results = engine.generate(greedy_requests(ragged_prompts))
        assert [r.token_ids for r in results] == answers(kind)
        assert accepted_fraction([r.trace for r in results]) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_it_was_not_fitted_to_come_out_right_too(family, head_of, kind):
    requests = greedy_requests([[5, 5, 9, 1], [40] * 12, [7, 3]], num_new=40)
    plain = Engine(family(kind).target, NoProposer(), max_rows=3, draft_length=0)
    expected = [r.token_ids for r in plain.generate(requests)]
    results = engine_of(family, head_of, kind).generate(requests)
    assert [r.token_ids for r in results] == expected


def test_copies_between_its_drafts_change_nothing(family, head_of, answers, ragged_prompts):
    """While texts are copied it is not asked, and reads all that was committed when it is."""
    lengths = FixedLengths(Lengths(2, copy=4))
    proposer = LookupFirstProposer(head_proposer(head_of("llama")), lengths, min_ngram=1)
    engine = Engine(family("llama").target, proposer, max_rows=3, draft_length=4)
    results = engine.generate(greedy_requests(ragged_prompts))
    assert [r.token_ids for r in results] == answers("llama")
    assert any(any(r.trace.from_text) for r in results)
    assert not all(all(r.trace.from_text) for r in results)


def test_penalties_count_the_drafts_before_a_position(family, head_of, ragged_prompts):
    params = SamplingParams(max_new_tokens=NUM_NEW, repetition_penalty=1.2, frequency_penalty=0.3)
    requests = [Request(str(i), list(p), params) for i, p in enumerate(ragged_prompts)]
    plain = Engine(family("llama").target, NoProposer(), max_rows=3, draft_length=0)
    expected = [r.token_ids for r in plain.generate(requests)]
    results = engine_of(family, head_of).generate(requests)
    assert [r.token_ids for r in results] == expected
    assert any(sum(r.trace.accepted) for r in results)


# ------------------------------------------------------------ neighbours, arrivals, chunks, leaving


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_requests_decode_as_each_would_alone(family, head_of, kind, seed):
    chance = random.Random(seed)
    engine = engine_of(
        family, head_of, kind, rows=chance.randint(1, 6), draft_length=chance.randint(1, 5)
    )
    requests = random_requests(20, seed=200 + seed)
    alone = {r.request_id: engine.generate([r])[0].token_ids for r in requests}
    engine.open(CONTEXT, prefill_chunk=chance.choice([1, 2, 3, 7, 16, None]))
    day = live_through(engine, requests, chance, preempt=0.3)
    assert day.answers == {name: alone[name] for name in alone if name not in day.aborted}
    for name, tokens in day.aborted.items():
        assert alone[name][: len(tokens)] == tokens


@pytest.mark.parametrize("chunk", [1, 2, 5, None])
def test_a_prompt_in_pieces_gives_the_drafts_of_a_whole_one(family, head_of, chunk):
    """Not only the same answer: features of every piece are there, so as many are accepted."""
    prompt = [1 + (5 * place) % 60 for place in range(23)]
    (request,) = greedy_requests([prompt])
    engine = engine_of(family, head_of)
    expected = engine.generate([request])[0]
    engine.open(64, prefill_chunk=chunk)
    engine.submit([request])
    events = []
    while engine.is_busy:
        events += engine.step()
    assert events[-1].result.token_ids == expected.token_ids
    assert events[-1].result.trace == expected.trace


def test_a_preempted_request_goes_on_with_the_same_drafts(family, head_of, ragged_prompts):
    engine = engine_of(family, head_of)
    (request,) = greedy_requests(ragged_prompts[3:4])
    expected = engine.generate([request])[0]
    engine.open(64)
    engine.submit([request])
    engine.step()
    engine.preempt("0")
    events = []
    while engine.is_busy:
        events += engine.step()
    assert events[-1].result.token_ids == expected.token_ids
    assert events[-1].result.trace == expected.trace


def test_a_text_of_one_token_has_no_feature_and_drafts_nothing(family, head_of):
    result = engine_of(family, head_of).generate(greedy_requests([[1]]))[0]
    assert result.trace.drafted[0] == 0
    assert all(result.trace.drafted[1:-1])


# ----------------------------------------------------------------------------- laws and repetition


@pytest.fixture(scope="module")
def small(family):
    return family("llama", vocab_size=8, noise=0.3)


@pytest.mark.parametrize(
    ("draft_length", "is_trimmed", "copies"),
    [(1, False, 0), (3, False, 0), (3, True, 0), (2, True, 3)],
)
def test_continuations_follow_the_targets_exact_law(small, fit, draft_length, is_trimmed, copies):
    token_ids = torch.tensor([0, 1, 3, 4, 6]) if is_trimmed else None
    prompt, num_new, temperature = [6, 7, 7, 4, 7], 4, 0.7
    head = fit(small.reference, [(prompt, [7, 1, 3, 5])], steps=3, token_ids=token_ids)
    proposer = head_proposer(head, token_ids)
    if copies:
        lengths = FixedLengths(Lengths(draft_length, copies))
        proposer = LookupFirstProposer(proposer, lengths, min_ngram=1)
    params = SamplingParams(max_new_tokens=num_new, temperature=temperature)
    engine = Engine(small.target, proposer, max_rows=2000, draft_length=max(draft_length, copies))
    results = engine.generate([Request(str(i), prompt, params) for i in range(8000)])
    law = exact_law(small.reference, prompt, num_new, lambda _, scores: scores / temperature)
    assert 0.1 < accepted_fraction([r.trace for r in results]) < 0.9
    assert p_value(results, law) > 1e-3


@pytest.mark.parametrize("verify", ["rejection", "match"])
def test_sampling_repeats_itself_whatever_the_rows(family, head_of, ragged_prompts, verify):
    params = SamplingParams(max_new_tokens=30, temperature=0.9, seed=3)
    requests = [Request(str(i), p, params) for i, p in enumerate(ragged_prompts)]
    found = [
        [
            r.token_ids
            for r in engine_of(family, head_of, rows=rows, verify=verify).generate(requests)
        ]
        for rows in (1, 2, 5)
    ]
    assert found[0] == found[1] == found[2]


# ----------------------------------------------------------------------------------------- features


def test_features_cost_no_forward_of_the_target(family, head_of, ragged_prompts):
    """As many forwards as there are prefills and rounds."""
    target = copy.deepcopy(family("llama").reference)
    calls = []
    target.base_model.register_forward_hook(lambda *_: calls.append(1))
    engine = Engine(target, head_proposer(head_of("llama")), max_rows=1, draft_length=3)
    results = engine.generate(greedy_requests(ragged_prompts))
    num_prefills = sum(len(prompt) > 1 for prompt in ragged_prompts)
    assert len(calls) == num_prefills + sum(r.trace.num_rounds for r in results)


def test_hooks_are_only_there_while_a_forward_runs(family, head_of, ragged_prompts):
    target = copy.deepcopy(family("llama").reference)
    engine = Engine(target, head_proposer(head_of("llama")), max_rows=2, draft_length=3)
    engine.generate(greedy_requests(ragged_prompts))
    assert not [m for m in target.modules() if m._forward_pre_hooks or m._forward_hooks]
    plain = Engine(target, DraftModelProposer(family("llama").draft), max_rows=2, draft_length=3)
    seen = []
    hook = target.base_model.register_forward_hook(
        lambda module, *_: seen.append(len(module.layers[0]._forward_pre_hooks))
    )
    plain.generate(greedy_requests(ragged_prompts))
    hook.remove()
    assert seen
    assert not any(seen), "a proposer without features pays for them"


def test_what_is_not_finite_does_not_outlive_its_request(family, head_of, ragged_prompts, answers):
    """What the head holds stays finite: later requests in the row are drafted for as before."""
    target = copy.deepcopy(family("llama").reference)
    target.get_input_embeddings().weight.data[62] = torch.nan
    proposer = head_proposer(head_of("llama"))
    engine = Engine(target, proposer, max_rows=1, draft_length=3)
    expected = engine.generate(greedy_requests(ragged_prompts[1:2]))[0]
    with pytest.raises(RequestFaultError):
        engine.generate(greedy_requests([[5, 62, 3] * 6]))
    result = engine.generate(greedy_requests(ragged_prompts[1:2]))[0]
    assert result.token_ids == expected.token_ids == answers("llama")[1]
    assert result.trace == expected.trace


# ------------------------------------------------------------------------- heads on the last state


@pytest.fixture(scope="module")
def heads(family, answers, ragged_prompts):
    texts = list(zip(ragged_prompts, answers("llama"), strict=True))
    return fitted_heads(family("llama").reference, texts)


def test_no_more_is_drafted_than_there_are_heads(family, heads, ragged_prompts):
    engine = Engine(family("llama").target, head_proposer(heads), max_rows=3, draft_length=7)
    results = engine.generate(greedy_requests(ragged_prompts))
    assert max(max(r.trace.drafted) for r in results) == SHAPE.num_heads


@pytest.mark.parametrize("length", [2, 3, 9])
def test_drafts_are_the_heads_guesses_from_the_state_before_the_last_token(
    family, heads, ragged_prompts, length
):
    """Head k at h[n - 1] guesses x[n + k], where x[n] is the text's last token."""
    text = ragged_prompts[3][:length]
    with torch.no_grad():
        states = family("llama").reference.base_model(torch.tensor([text])).last_hidden_state
        expected = heads.logits(heads.run(states[:, length - 2], 3)).argmax(-1)
    engine = Engine(family("llama").target, head_proposer(heads), max_rows=1, draft_length=3)
    engine.open(32)
    engine.submit(greedy_requests([text]))
    drafted = []
    propose = engine._proposer.propose

    def keeping(batch, counts):
        drafted.append(propose(batch, counts))
        return drafted[-1]

    engine._proposer.propose = keeping
    engine.step()
    assert drafted[0].tokens.tolist() == expected.tolist()


def test_a_row_that_moves_takes_its_states_along(heads):
    proposer = head_proposer(heads)
    proposer.reserve(rows=3, slots=8)
    states = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(0))
    places = torch.arange(8).expand(3, 8)
    proposer.read(states, places, first_row=0)
    proposer.move_row(2, 0)
    kept = proposer._states.get(places)
    assert torch.equal(kept[0], states[2])
    assert torch.equal(kept[1], states[1])
