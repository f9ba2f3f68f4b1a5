"""Where decoding ends and what it refuses: stop tokens, length limits, bad requests, bad logits."""

from __future__ import annotations

import copy

import pytest
import torch

from draftsmith.decoding import (
    DraftModelProposer,
    Engine,
    NoProposer,
    PromptLookupProposer,
    Request,
    RequestFaultError,
    SamplingParams,
)
from draftsmith.decoding.acceptance import Proposal
from draftsmith.decoding.batch import Batch
from draftsmith.decoding.distribution import OneHot
from draftsmith.decoding.trace import block_efficiency
from draftsmith.errors import DecodingError

PROMPT = [34, 48, 29]  # its greedy continuation keeps changing


class ConstantProposer(NoProposer):
    """Drafts one token over and over."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, batch: Batch, counts: list[int]) -> Proposal:
        tokens = torch.full((len(batch), max(counts)), self.token)
        return Proposal(tokens, OneHot(tokens), torch.tensor(counts))


def run(target, proposer, prompt=PROMPT, *, draft_length=4, **params):
    engine = Engine(target, proposer, max_rows=2, draft_length=draft_length)
    values = SamplingParams(**{"max_new_tokens": 20, **params})
    return engine.generate([Request("a", list(prompt), values)])[0]


@pytest.fixture(scope="module")
def oracle(llama):
    """The target as its own draft: every round is a full accept."""
    return DraftModelProposer(copy.deepcopy(llama.reference))


@pytest.fixture(scope="module")
def greedy(llama, continue_greedily):
    return continue_greedily(llama.reference, PROMPT, 20)


@pytest.mark.parametrize("draft_length", [0, 1, 3, 8])
def test_a_stop_token_ends_the_result_wherever_it_stands_in_a_round(
    llama, oracle, greedy, draft_length
):
    for place, token in enumerate(greedy):
        if token in greedy[:place]:
            continue
        result = run(llama.target, oracle, draft_length=draft_length, stop_token_ids=(token,))
        assert result.token_ids == greedy[: place + 1]
        assert result.finish_reason == "stop"
        assert sum(result.trace.committed) == place + 1


def test_block_efficiency_counts_no_token_behind_a_stop_token(llama, oracle, greedy):
    token = greedy[2]
    assert token not in greedy[:2]
    result = run(llama.target, oracle, draft_length=8, stop_token_ids=(token,))
    assert result.trace.accepted == [8]
    assert block_efficiency([result.trace]) == 3


def test_the_bonus_token_counts(llama, oracle):
    result = run(llama.target, oracle, draft_length=4, max_new_tokens=20)
    assert result.trace.committed == [5, 5, 5, 5]
    assert block_efficiency([result.trace]) == 5


def test_a_drafted_stop_token_that_was_not_verified_does_not_stop(llama, greedy):
    never = next(token for token in range(64) if token not in greedy)
    result = run(llama.target, ConstantProposer(never), stop_token_ids=(never,))
    assert result.token_ids == greedy
    assert result.finish_reason == "length"
    assert sum(result.trace.accepted) == 0


def test_any_of_several_stop_tokens_ends_the_result(llama, oracle, greedy):
    result = run(llama.target, oracle, stop_token_ids=(greedy[6], greedy[1]))
    assert result.token_ids == greedy[:2]


def test_a_stop_token_in_the_prompt_does_not_stop(llama, oracle, greedy):
    absent = next(token for token in PROMPT if token not in greedy)
    result = run(llama.target, oracle, stop_token_ids=(absent,))
    assert result.token_ids == greedy


def test_a_stopped_row_leaves_its_neighbours_alone(llama, oracle, greedy, continue_greedily):
    stop = SamplingParams(max_new_tokens=20, stop_token_ids=(greedy[2],))
    plain = SamplingParams(max_new_tokens=20)
    engine = Engine(llama.target, oracle, max_rows=2, draft_length=4)
    prompts = {"a": PROMPT, "b": [7, 7, 1], "c": [2]}
    params = {"a": stop, "b": plain, "c": plain}
    results = engine.generate([Request(name, prompts[name], params[name]) for name in prompts])
    assert results[0].token_ids == greedy[:3]
    for result in results[1:]:
        want = continue_greedily(llama.reference, prompts[result.request_id], 20)
        assert result.token_ids == want


@pytest.mark.parametrize("max_new_tokens", range(1, 12))
@pytest.mark.parametrize("draft_length", [0, 2, 5])
def test_max_new_tokens_is_met_exactly(llama, oracle, greedy, draft_length, max_new_tokens):
    result = run(llama.target, oracle, draft_length=draft_length, max_new_tokens=max_new_tokens)
    assert result.token_ids == greedy[:max_new_tokens]
    assert result.finish_reason == "length"
    assert sum(result.trace.committed) == max_new_tokens


def test_a_row_drafts_no_further_than_it_may_commit_whatever_its_neighbours_do(llama, oracle):
    engine = Engine(llama.target, oracle, max_rows=2, draft_length=4)
    lengths = {"short": 7, "long": 12}
    results = engine.generate(
        [Request(name, PROMPT, SamplingParams(max_new_tokens=n)) for name, n in lengths.items()]
    )
    assert results[0].trace.drafted == [4, 1]  # 5 committed, then one draft and the bonus token
    assert results[1].trace.drafted == [4, 4, 1]


def test_a_stop_token_as_the_last_allowed_token_counts_as_stop(llama, oracle, greedy):
    result = run(llama.target, oracle, max_new_tokens=3, stop_token_ids=(greedy[2],))
    assert result.token_ids == greedy[:3]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("draft_length", [0, 1, 4])
@pytest.mark.parametrize("token", [0, 1, 63])
def test_prompts_of_one_token_work(llama, oracle, continue_greedily, draft_length, token):
    result = run(llama.target, oracle, [token], draft_length=draft_length)
    assert result.token_ids == continue_greedily(llama.reference, [token], 20)


def test_events_add_up_to_the_results(llama, ragged_prompts):
    engine = Engine(llama.target, DraftModelProposer(llama.draft), max_rows=3, draft_length=4)
    params = SamplingParams(max_new_tokens=15)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(ragged_prompts)]
    streamed: dict[str, list[int]] = {request.request_id: [] for request in requests}
    results = {}
    for event in engine.stream(requests):
        assert event.request_id not in results, "an event behind the last one"
        assert event.token_ids, "every round commits a token"
        streamed[event.request_id] += event.token_ids
        if event.result is not None:
            results[event.request_id] = event.result.token_ids
    assert results == streamed


def test_no_requests_give_no_results(llama, oracle):
    assert Engine(llama.target, oracle, max_rows=2, draft_length=3).generate([]) == []


# -------------------------------------------------------------------------------- the model's limit

LIMIT = 32


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("draft_length", [0, 3, 8])
@pytest.mark.parametrize("prompt_length", [1, 20, LIMIT - 1])
def test_prompt_and_new_tokens_may_fill_the_models_positions(
    family, continue_greedily, kind, draft_length, prompt_length
):
    models = family(kind, max_positions=LIMIT)
    prompt = [(5 * i) % 60 for i in range(prompt_length)]
    num_new = LIMIT - prompt_length
    engine = Engine(
        models.target, DraftModelProposer(models.draft), max_rows=2, draft_length=draft_length
    )
    full = Request("full", prompt, SamplingParams(max_new_tokens=num_new))
    short = Request("short", [7], SamplingParams(max_new_tokens=LIMIT - 1))
    results = engine.generate([full, short])
    assert results[0].token_ids == continue_greedily(models.reference, prompt, num_new)
    assert results[1].token_ids == continue_greedily(models.reference, [7], LIMIT - 1)


@pytest.mark.parametrize("proposer", [NoProposer(), PromptLookupProposer()])
def test_one_token_more_than_the_models_positions_is_refused(family, proposer):
    target = family("llama", max_positions=LIMIT).target
    with pytest.raises(DecodingError, match=f"request a: found {LIMIT + 1} tokens"):
        run(target, proposer, [1] * 10, max_new_tokens=LIMIT - 9)


def test_the_drafts_positions_limit_a_request_too(llama, family):
    draft = DraftModelProposer(family("llama", max_positions=LIMIT).draft)
    assert len(run(llama.target, draft, max_new_tokens=LIMIT - 3).token_ids) == LIMIT - 3
    with pytest.raises(DecodingError, match=f"1 to {LIMIT} tokens"):
        run(llama.target, draft, max_new_tokens=LIMIT - 2)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompt", "found"),
    [([], "an empty prompt"), ([1, 64], "token ids outside 0..63"), ([-1], "token ids outside")],
)
def test_a_prompt_that_the_target_cannot_read_is_refused(llama, prompt, found):
    with pytest.raises(DecodingError, match=found):
        run(llama.target, NoProposer(), prompt)


def test_a_bad_request_is_refused_before_anything_is_decoded(llama):
    engine = Engine(llama.target, NoProposer(), max_rows=2, draft_length=0)
    params = SamplingParams(max_new_tokens=3)
    with pytest.raises(DecodingError, match="request b"):
        next(engine.stream([Request("a", [1], params), Request("b", [], params)]))


def test_an_id_may_not_occur_twice(llama):
    engine = Engine(llama.target, NoProposer(), max_rows=2, draft_length=0)
    request = Request("a", [1], SamplingParams(max_new_tokens=3))
    with pytest.raises(DecodingError, match="an id that another request has"):
        engine.generate([request, request])


@pytest.mark.parametrize(("name", "value"), [("max_rows", 0), ("draft_length", -1)])
def test_engine_parameters_out_of_range_are_refused_by_name(llama, name, value):
    with pytest.raises(DecodingError, match=f"engine parameter {name}: found {value}"):
        Engine(llama.target, NoProposer(), **{"max_rows": 2, "draft_length": 2, name: value})


def with_nan(model, part: str, row: int):
    """A copy whose embedding or output row `row` is NaN."""
    broken = copy.deepcopy(model)
    with torch.no_grad():
        layer = broken.lm_head if part == "output" else broken.model.embed_tokens
        layer.weight[row] = torch.nan
    return broken


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft_length", [0, 3])
def test_nan_logits_of_the_target_raise(llama, temperature, draft_length):
    broken = with_nan(llama.reference, "output", 5)
    draft = DraftModelProposer(llama.draft)
    with pytest.raises(DecodingError, match="request a, token 3: found target logits that are NaN"):
        run(broken, draft, temperature=temperature, draft_length=draft_length)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft_length", [1, 3])
def test_nan_logits_of_the_draft_cost_speed_and_not_correctness(
    llama, greedy, temperature, draft_length
):
    broken = DraftModelProposer(with_nan(llama.reference, "output", 5))
    plain = run(llama.target, NoProposer(), draft_length=0, temperature=temperature)
    result = run(llama.target, broken, draft_length=draft_length, temperature=temperature)
    assert all(0 <= token < 64 for token in result.token_ids)
    assert result.token_ids == plain.token_ids  # every token is the target's own draw
    assert (result.token_ids == greedy) is (temperature == 0)


BAD_TOKEN = 63


@pytest.fixture
def fragile(llama):
    """An engine whose target cannot read one token."""
    broken = with_nan(llama.reference, "embedding", BAD_TOKEN)
    draft = DraftModelProposer(llama.draft)
    engine = Engine(broken, draft, max_rows=3, draft_length=2)
    engine.open(64, prefill_chunk=8)
    return engine


def test_nan_does_not_outlive_the_request_that_caused_it(llama, continue_greedily):
    broken = with_nan(llama.reference, "embedding", BAD_TOKEN)
    engine = Engine(broken, NoProposer(), max_rows=2, draft_length=0)
    params = SamplingParams(max_new_tokens=5)
    with pytest.raises(RequestFaultError, match="NaN"):
        engine.generate([Request("bad", [1] * 20 + [BAD_TOKEN, 1, 1], params)])
    result = engine.generate([Request("good", PROMPT, params)])[0]
    assert result.token_ids == continue_greedily(llama.reference, PROMPT, 5)


@pytest.mark.parametrize("length", [4, 30])  # read whole, and in pieces
@pytest.mark.parametrize("num_bad", [1, 2])
def test_a_fault_takes_out_its_request_and_the_others_go_on(
    llama, continue_greedily, fragile, length, num_bad
):
    params = SamplingParams(max_new_tokens=24)
    bad = [f"bad{index}" for index in range(num_bad)]
    good = {"a": PROMPT, "late": [7, 7, 1], "in line": [2]}
    answers, faulty = {}, []
    fragile.submit([Request("a", good["a"], params)])
    answers |= {event.request_id: event.token_ids for event in fragile.step()}
    fragile.submit([Request(name, [BAD_TOKEN] + [1] * length, params) for name in bad])
    fragile.submit([Request(name, good[name], params) for name in ("late", "in line")])
    while fragile.is_busy:
        try:
            events = fragile.step()
        except RequestFaultError as fault:
            faulty += fault.request_ids
            continue
        for event in events:
            answers[event.request_id] = answers.get(event.request_id, []) + event.token_ids
    assert sorted(faulty) == bad
    assert answers == {
        name: continue_greedily(llama.reference, prompt, 24) for name, prompt in good.items()
    }


@pytest.mark.parametrize("leave", ["abort", "open", "fault"])
def test_nan_does_not_outlive_a_prompt_that_was_read_in_pieces(
    llama, continue_greedily, fragile, leave
):
    params = SamplingParams(max_new_tokens=5)
    fragile.submit([Request("bad", [1] * 8 + [BAD_TOKEN] * 32, params)])
    assert [fragile.step(), fragile.step()] == [[], []]
    if leave == "abort":
        fragile.abort("bad")
    elif leave == "open":
        fragile.open(64, prefill_chunk=8)
    else:
        assert [fragile.step(), fragile.step()] == [[], []]
        with pytest.raises(RequestFaultError, match="request bad, token 40"):
            fragile.step()
    prompt = [(7 * place) % 60 for place in range(12)]
    fragile.submit([Request(str(index), prompt, params) for index in range(3)])
    answers = {}
    while fragile.is_busy:
        answers |= {e.request_id: e.result.token_ids for e in fragile.step() if e.result}
    assert list(answers.values()) == [continue_greedily(llama.reference, prompt, 5)] * 3
