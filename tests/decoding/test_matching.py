"""Verification by comparison: a seed's answer is that of decoding without drafts."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)

from draftsmith.decoding import (
    DraftModelProposer,
    Engine,
    Lengths,
    LookupFirstProposer,
    NoProposer,
    Request,
    SamplingParams,
)
from draftsmith.decoding.acceptance import Proposal
from draftsmith.decoding.distribution import Dense, OneHot
from draftsmith.decoding.matching import match
from draftsmith.decoding.trace import accepted_fraction
from draftsmith.errors import DecodingError
from tests.decoding.laws import build_proposer, exact_law, p_value
from tests.decoding.test_draft_length import Varying

NUM_NEW = 20
PROMPT = [34, 48, 29]
PARAMS = [
    SamplingParams(max_new_tokens=NUM_NEW, temperature=0.8),
    SamplingParams(max_new_tokens=NUM_NEW),
    SamplingParams(max_new_tokens=NUM_NEW, temperature=1.0, top_k=20, top_p=0.9, seed=4),
    SamplingParams(max_new_tokens=NUM_NEW, temperature=0.7, repetition_penalty=1.3, min_p=0.05),
    SamplingParams(max_new_tokens=NUM_NEW, temperature=1.1, frequency_penalty=0.4),
]


def test_drafts_are_kept_up_to_the_first_that_the_target_does_not_draw():
    p = Dense(torch.tensor([[[0.5, 0.5, 0.0], [0.25, 0.25, 0.5], [0.0, 0.0, 1.0]]]).expand(3, 3, 3))
    uniforms = torch.tensor([[0.6, 0.3, 0.0]]).expand(3, 3)  # draws 1, 1, 2
    drafts = torch.tensor([[1, 1], [1, 2], [0, 1]])
    verdict = match(p, Proposal(drafts, OneHot(drafts), torch.tensor([2, 2, 2])), p.probs, uniforms)
    assert verdict.num_accepted.tolist() == [2, 1, 0]
    assert verdict.next_token.tolist() == [2, 1, 1]


def test_padding_behind_a_rows_count_is_never_kept():
    p = OneHot(torch.tensor([[5, 6, 7]]).expand(2, 3))
    drafts = torch.tensor([[5, 6], [5, 6]])
    proposal = Proposal(drafts, OneHot(drafts), torch.tensor([1, 0]))
    verdict = match(p, proposal, torch.zeros(2, 2), torch.zeros(2, 3))
    assert verdict.num_accepted.tolist() == [1, 0]
    assert verdict.next_token.tolist() == [6, 5]


def test_a_mode_that_does_not_exist_is_refused_by_name(llama):
    with pytest.raises(DecodingError, match="parameter verify: found 'typical'; expected 'rej"):
        Engine(llama.target, NoProposer(), max_rows=1, draft_length=0, verify="typical")


# --------------------------------------------------------------------------- equal without drafts


def run(models, requests, *, draft_length, max_rows=5, proposer=None, verify="match"):
    proposer = proposer or DraftModelProposer(models.draft)
    engine = Engine(
        models.target, proposer, max_rows=max_rows, draft_length=draft_length, verify=verify
    )
    return engine.generate(requests)


def tokens(results) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def requests(ragged_prompts):
    return [
        Request(str(i), prompt, params)
        for i, (prompt, params) in enumerate(zip(ragged_prompts, PARAMS, strict=True))
    ]


@pytest.fixture(scope="module")
def alone(family, requests):
    """Every request by itself, without drafts and in the default mode."""

    @functools.cache
    def decode(kind: str) -> list[list[int]]:
        models = family(kind)
        return [
            run(models, [request], draft_length=0, verify="rejection")[0].token_ids
            for request in requests
        ]

    return decode


@pytest.mark.parametrize("draft_length", [0, 1, 4, 8])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_tokens_are_those_without_drafts_at_any_length_and_batch(
    family, requests, alone, kind, draft_length
):
    for max_rows in (2, 5):
        results = run(family(kind), requests, draft_length=draft_length, max_rows=max_rows)
        assert tokens(results) == alone(kind)
        if draft_length:
            assert 0.05 < accepted_fraction([r.trace for r in results]) < 0.95


@pytest.mark.parametrize("who", ["lookup", "lookup_first"])
def test_tokens_do_not_depend_on_who_drafts(llama, requests, alone, who):
    proposer = build_proposer(who, llama)
    assert tokens(run(llama, requests, draft_length=3, proposer=proposer)) == alone("llama")


def test_tokens_do_not_depend_on_a_draft_length_that_varies(llama, requests, alone):
    lengths = Varying(Lengths(draft=4, copy=4))
    proposer = LookupFirstProposer(DraftModelProposer(llama.draft), lengths, min_ngram=1)
    results = run(llama, requests, draft_length=4, proposer=proposer, max_rows=3)
    assert tokens(results) == alone("llama")
    assert len({length for result in results for length in result.trace.drafted}) > 2


def test_rejection_sampling_is_another_draw_of_the_same_law(llama, requests, alone):
    """The comparison above has something to see."""
    assert tokens(run(llama, requests, draft_length=4, verify="rejection")) != alone("llama")


def test_the_target_as_its_own_draft_is_accepted_throughout(llama):
    params = SamplingParams(max_new_tokens=200, temperature=0.8)
    proposer = DraftModelProposer(copy.deepcopy(llama.reference))
    results = run(llama, [Request("a", PROMPT, params)], draft_length=4, proposer=proposer)
    assert accepted_fraction([r.trace for r in results]) >= 0.999


# ------------------------------------------------------------------------------ logits processors


class Diary(LogitsProcessor):
    """Forbids the token after the last one, and remembers every text that it was shown."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, input_ids, scores):
        self.texts.append(input_ids[0].tolist())
        scores[:, (int(input_ids[0, -1]) + 1) % scores.shape[1]] = -torch.inf
        return scores


class Alternating(LogitsProcessor):
    """Keeps a state: every second call bans the even tokens."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        scores[:, self.num_calls % 2 :: 2] = -torch.inf
        return scores


def processors():
    return [
        NoRepeatNGramLogitsProcessor(2),
        SequenceBiasLogitsProcessor({(5,): 4.0, (7, 9): -3.0}),
        SuppressTokensLogitsProcessor([11, 12]),
        Alternating(),
    ]


@pytest.mark.parametrize("draft_length", [0, 1, 4])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_greedy_output_with_processors_is_that_of_transformers(
    family, ragged_prompts, kind, draft_length
):
    models = family(kind)
    params = SamplingParams(max_new_tokens=NUM_NEW, repetition_penalty=1.2)
    expected = [
        models.reference.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            repetition_penalty=1.2,
            logits_processor=LogitsProcessorList(processors()),
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in ragged_prompts
    ]
    found = [Request(str(i), p, params, processors()) for i, p in enumerate(ragged_prompts)]
    assert tokens(run(models, found, draft_length=draft_length, max_rows=3)) == expected
    plain = [Request(str(i), p, params) for i, p in enumerate(ragged_prompts)]
    assert tokens(run(models, plain, draft_length=draft_length)) != expected


@pytest.mark.parametrize("parity", [0, 1])  # whose own parameters are another matter each
def test_processed_requests_among_plain_ones_are_as_alone(llama, requests, parity):
    """At temperatures above 0 and with drafts too."""

    def mixed():
        return [
            Request(r.request_id, r.prompt_ids, r.params, processors() if i % 2 == parity else ())
            for i, r in enumerate(requests)
        ]

    want = [run(llama, [request], draft_length=0)[0].token_ids for request in mixed()]
    for draft_length in (0, 3):
        results = run(llama, mixed(), draft_length=draft_length, max_rows=3)
        assert tokens(results) == want


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_processor_sees_every_committed_text_once_and_no_refused_draft(llama, temperature):
    diary = Diary()
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=temperature)
    result = run(llama, [Request("a", PROMPT, params, [diary])], draft_length=4)[0]
    assert diary.texts == [PROMPT + result.token_ids[:n] for n in range(NUM_NEW)]
    assert 0 < accepted_fraction([result.trace]) < 1
    assert sum(result.trace.committed) == NUM_NEW


def test_no_processor_sees_a_text_behind_a_stop_token(llama):
    params = SamplingParams(max_new_tokens=NUM_NEW)
    proposer = DraftModelProposer(copy.deepcopy(llama.reference))
    free = run(llama, [Request("a", PROMPT, params, [Diary()])], draft_length=0)[0].token_ids
    place = next(n for n in range(2, NUM_NEW) if free[n] not in free[:n])
    params = SamplingParams(max_new_tokens=NUM_NEW, stop_token_ids=(free[place],))
    diary = Diary()
    request = Request("a", PROMPT, params, [diary])
    result = run(llama, [request], draft_length=8, proposer=proposer)[0]
    assert result.token_ids == free[: place + 1]
    assert diary.texts[-1] == PROMPT + free[:place]


def test_sampling_with_a_processor_follows_the_processed_law(family):
    small = family("llama", vocab_size=8, noise=0.3)
    prompt, biased = [6, 7, 4], SequenceBiasLogitsProcessor({(3,): 1.5, (6, 7): -2.0})
    temperature = TemperatureLogitsWarper(0.9)
    law = exact_law(small.reference, prompt, 2, lambda i, s: temperature(i, biased(i, s.clone())))
    params = SamplingParams(max_new_tokens=2, temperature=0.9)
    requests = [Request(str(i), prompt, params, [biased]) for i in range(3000)]
    assert p_value(run(small, requests, draft_length=1, max_rows=1000), law) > 1e-3
    plain = [Request(str(i), prompt, params) for i in range(3000)]
    assert p_value(run(small, plain, draft_length=1, max_rows=1000), law) < 1e-6


def test_the_default_mode_refuses_processors_by_name(llama):
    request = Request("a", PROMPT, PARAMS[0], [SuppressTokensLogitsProcessor([1]), Diary()])
    with pytest.raises(DecodingError, match=r"SuppressTokensLogitsProcessor, Diary.*verify=.match"):
        run(llama, [request], draft_length=2, verify="rejection")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text, scores: scores[:, :3],
        lambda text, scores: scores[0],
        lambda text, scores: scores * torch.nan,
        lambda text, scores: torch.full_like(scores, -torch.inf),
    ],
)
def test_scores_that_nothing_can_be_drawn_from_name_their_processor(llama, spoil):
    request = Request("a", PROMPT, PARAMS[0], [SuppressTokensLogitsProcessor([1]), spoil])
    with pytest.raises(DecodingError, match="request a, logits processor function: found scores"):
        run(llama, [request], draft_length=2)


def test_nan_logits_of_the_target_are_not_blamed_on_a_processor(llama):
    broken = copy.deepcopy(llama.reference)
    with torch.no_grad():
        broken.lm_head.weight[5] = torch.nan
    engine = Engine(broken, NoProposer(), max_rows=1, draft_length=0, verify="match")
    with pytest.raises(DecodingError, match="found target logits that are NaN"):
        engine.generate([Request("a", PROMPT, PARAMS[0], processors())])
