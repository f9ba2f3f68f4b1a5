from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from draftsmith.decoding.batch import Batch, Row
from draftsmith.decoding.distribution import Dense, OneHot, draw
from draftsmith.decoding.draft_length import FixedLengths, Lengths
from draftsmith.decoding.proposers import (
    DraftModelProposer,
    LookupFirstProposer,
    NoProposer,
    PromptLookupProposer,
    empty_proposal,
)
from draftsmith.decoding.randomness import Purpose, uniform
from draftsmith.decoding.request import Request, SamplingParams

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def inference():
    with torch.inference_mode():
        yield


def batch_of(*prompts: list[int], temperature: float = 0.0) -> Batch:
    batch = Batch(torch.device("cpu"), vocab_size=64)
    params = SamplingParams(max_new_tokens=40, temperature=temperature)
    for index, prompt in enumerate(prompts):
        batch.append(Row(Request(str(index), list(prompt), params), list(prompt)))
    return batch


def admitted(proposer: DraftModelProposer, batch: Batch) -> DraftModelProposer:
    proposer.reserve(rows=len(batch), slots=64)
    proposer.admit([row.request.prompt_ids for row in batch.rows], first_row=0)
    return proposer


def teacher_forced(model, token_ids: list[int], drafts: list[int]) -> torch.Tensor:
    """Logits `[drafts, vocab]` at the drafted positions by one plain forward."""
    logits = model(torch.tensor([token_ids + drafts]), use_cache=False).logits[0]
    return logits[len(token_ids) - 1 : -1]


class TestPromptLookup:
    def test_what_followed_the_last_occurrence_of_the_longest_suffix_is_proposed(self):
        #                 the suffix 1 2 occurred twice; the later one was followed by 7 8
        proposal = PromptLookupProposer().propose(batch_of([1, 2, 5, 6, 1, 2, 7, 8, 1, 2]), [3])
        assert proposal.tokens.tolist() == [[7, 8, 1]]
        assert proposal.counts.tolist() == [3]

    def test_a_longer_suffix_wins_over_a_later_occurrence_of_a_shorter_one(self):
        proposal = PromptLookupProposer().propose(batch_of([9, 1, 2, 4, 2, 3, 9, 1, 2]), [1])
        assert proposal.tokens.tolist() == [[4]]

    def test_rows_propose_fewer_where_the_text_ends_and_none_without_a_match(self):
        batch = batch_of([5, 6, 5], [1, 2, 3], [4, 4])
        proposal = PromptLookupProposer().propose(batch, [4, 4, 0])
        assert proposal.counts.tolist() == [2, 0, 0]
        assert proposal.tokens[0].tolist() == [6, 5]

    def test_drafts_are_one_hot(self):
        proposal = PromptLookupProposer().propose(batch_of([5, 6, 5], temperature=0.8), [2])
        assert isinstance(proposal.drawn_from, OneHot)
        assert proposal.drawn_from.ids.equal(proposal.tokens)

    @pytest.mark.parametrize("prompt", [[3], [1, 2, 3]])
    def test_nothing_is_proposed_without_any_match(self, prompt):
        proposal = PromptLookupProposer().propose(batch_of(prompt), [4])
        assert proposal.tokens.shape == (1, 0)
        assert proposal.counts.tolist() == [0]

    def test_suffixes_shorter_than_the_smallest_are_not_looked_up(self):
        proposal = PromptLookupProposer(min_ngram=2).propose(batch_of([5, 6, 5]), [2])
        assert proposal.counts.tolist() == [0]


@pytest.mark.parametrize("propose", [lambda b: NoProposer().propose(b, [3, 3]), empty_proposal])
def test_nobody_proposes_nothing(propose):
    proposal = propose(batch_of([1, 2], [3]))
    assert proposal.tokens.shape == (2, 0)
    assert proposal.counts.tolist() == [0, 0]


def test_greedy_drafts_are_the_drafts_own_continuation(family, continue_greedily, ragged_prompts):
    draft = family("mistral").reference
    batch = batch_of(*ragged_prompts)
    proposer = admitted(DraftModelProposer(copy.deepcopy(draft)), batch)
    proposal = proposer.propose(batch, [4] * 5)
    want = [continue_greedily(draft, prompt, 4) for prompt in ragged_prompts]
    assert proposal.tokens.tolist() == want


def test_the_law_that_is_handed_on_is_the_one_that_was_drawn_from(llama, ragged_prompts):
    batch = batch_of(*ragged_prompts, temperature=0.8)
    proposer = admitted(DraftModelProposer(copy.deepcopy(llama.reference)), batch)
    proposal = proposer.propose(batch, [4, 2, 4, 1, 4])
    assert isinstance(proposal.drawn_from, Dense)
    assert proposal.counts.tolist() == [4, 2, 4, 1, 4]
    for row, prompt in enumerate(ragged_prompts):
        logits = teacher_forced(llama.reference, prompt, proposal.tokens[row].tolist())
        want = (logits / 0.8).softmax(-1)
        torch.testing.assert_close(proposal.drawn_from.probs[row], want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_are_drawn_from_the_very_numbers_that_are_handed_on(llama, ragged_prompts, dtype):
    """Not from a copy of another dtype: the ratio would be one of two laws."""
    batch = batch_of(*ragged_prompts, temperature=0.8)
    proposer = admitted(DraftModelProposer(copy.deepcopy(llama.reference).to(dtype)), batch)
    proposal = proposer.propose(batch, [3] * 5)
    assert isinstance(proposal.drawn_from, Dense)
    assert proposal.drawn_from.probs.dtype == torch.float32
    positions = batch.lengths()[:, None] + torch.arange(3)
    uniforms = uniform(batch.keys[:, None], positions, Purpose.DRAFT)
    assert proposal.tokens.equal(draw(proposal.drawn_from, uniforms))


@pytest.mark.parametrize("num_committed", [1, 2, 3, 4])
def test_drafting_goes_on_rightly_after_any_number_of_commits(
    llama, continue_greedily, num_committed
):
    # Of three drafts: 1 is a rejection at once, 4 is a full accept with a bonus token.
    draft = llama.reference
    prompt = [3, 9, 4, 1]
    batch = batch_of(prompt)
    proposer = admitted(DraftModelProposer(copy.deepcopy(draft)), batch)
    row = batch.rows[0]
    for _ in range(3):
        drafts = proposer.propose(batch, [3]).tokens[0].tolist()
        assert drafts == continue_greedily(draft, row.token_ids, 3)
        row.token_ids += [*drafts[: num_committed - 1], (7 * len(row.token_ids)) % 60]
        proposer.observe(batch)


def commit_undrafted(proposer: DraftModelProposer, batch: Batch, index: int) -> None:
    """Rounds that nobody drafted in."""
    for token in (8, 2, 6, 11, 30):
        batch.rows[index].token_ids.append(token)
        proposer.observe(batch)


def assert_drafts_right(proposer: DraftModelProposer, batch: Batch, follow) -> None:
    proposal = proposer.propose(batch, [3] * len(batch))
    assert proposal.tokens.tolist() == [follow(row.token_ids) for row in batch.rows]


@pytest.fixture
def follow(llama, continue_greedily):
    """The three tokens that the draft itself would add."""
    return lambda token_ids: continue_greedily(llama.reference, token_ids, 3)


def test_rounds_without_drafts_are_caught_up_with(llama, follow):
    batch = batch_of([3, 9, 4, 1], [5])
    proposer = admitted(DraftModelProposer(copy.deepcopy(llama.reference)), batch)
    proposer.propose(batch, [6, 6])  # all of them rejected
    commit_undrafted(proposer, batch, 0)
    assert_drafts_right(proposer, batch, follow)


@pytest.mark.parametrize("piece", [1, 2, 3, 8])
def test_a_prompt_may_be_read_in_pieces(llama, follow, piece):
    prompt = [3, 9, 4, 1, 7, 7, 2, 50, 12]
    batch = batch_of([5, 6], prompt)
    draft = DraftModelProposer(copy.deepcopy(llama.reference))
    proposer = admitted(copying(draft, 3), batch_of([5, 6], [9] * 20))
    for start in range(0, len(prompt) - 1, piece):
        end = min(start + piece, len(prompt) - 1)
        proposer.admit([prompt[: end + 1]], first_row=1, start=start)
    assert_drafts_right(proposer, batch, follow)


def test_a_moved_row_goes_on_in_its_new_place(llama, follow):
    batch = batch_of([3, 9, 4, 1, 7, 7, 2, 50, 12], [5, 6], [8, 8, 2])
    proposer = admitted(DraftModelProposer(copy.deepcopy(llama.reference)), batch)
    proposer.propose(batch, [2, 2, 2])
    commit_undrafted(proposer, batch, 2)
    proposer.move_row(batch.remove(0), 0)
    assert_drafts_right(proposer, batch, follow)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_trimmed_draft_proposes_ids_of_the_target(llama, temperature):
    token_ids = torch.tensor([40, 3, 17, 8, 60])
    draft = copy.deepcopy(llama.reference)
    full = draft.lm_head.weight[token_ids].clone()
    draft.lm_head = nn.Linear(32, len(token_ids), bias=False)
    draft.lm_head.weight = nn.Parameter(full)
    prompt = [3, 9, 4, 1]
    batch = batch_of(prompt, temperature=temperature)
    proposer = admitted(DraftModelProposer(draft, token_ids), batch)
    proposal = proposer.propose(batch, [4])
    drafts = proposal.tokens[0]
    logits = teacher_forced(llama.reference, prompt, drafts.tolist())[:, token_ids]
    if temperature == 0:
        assert drafts.equal(token_ids[logits.argmax(-1)])
    else:
        assert drafts.equal(token_ids[proposal.entries[0]])
        want = (logits / temperature).softmax(-1)
        torch.testing.assert_close(proposal.drawn_from.probs[0], want, rtol=1e-3, atol=1e-5)
        assert proposal.drawn_from.token_ids.equal(token_ids)


REPEATING = [3, 9, 4, 1, 50, 3, 9]  # "3 9" went on with 4 1 50
PLAIN = [5, 6, 11]


def copying(draft: DraftModelProposer, draft_length: int) -> LookupFirstProposer:
    return LookupFirstProposer(draft, FixedLengths(Lengths(draft_length, copy=5)))


def test_who_decides_the_lengths_hears_of_committed_rounds_only(llama):
    """A round that the fault of one row undid leaves nobody a new round."""
    heard = []

    class Hearing(FixedLengths):
        def observe(self, batch):
            heard.append([row.trace.num_rounds for row in batch.rows])

    batch = batch_of(REPEATING, PLAIN)
    lengths = Hearing(Lengths(2, copy=5))
    draft = DraftModelProposer(copy.deepcopy(llama.reference))
    proposer = admitted(LookupFirstProposer(draft, lengths), batch)
    proposer.propose(batch, [5, 5])
    proposer.observe(batch)
    assert heard == []
    proposer.propose(batch, [5, 5])
    for row in batch.rows:
        row.token_ids.append(7)
        row.trace.record(drafted=2, accepted=0, committed=1, from_text=False)
    proposer.observe(batch)
    assert heard == [[1, 1]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_repeat_themselves_copy_and_the_others_ask_the_draft(llama, temperature):
    draft = DraftModelProposer(copy.deepcopy(llama.reference))
    batch = batch_of(REPEATING, PLAIN, temperature=temperature)
    proposal = admitted(copying(draft, 2), batch).propose(batch, [5, 5])
    assert proposal.from_text == {0}
    assert proposal.counts.tolist() == [5, 2]
    assert proposal.tokens[0].tolist() == [4, 1, 50, 3, 9]
    logits = teacher_forced(llama.reference, PLAIN, proposal.tokens[1, :2].tolist())
    if temperature == 0:
        assert proposal.tokens[1, :2].equal(logits.argmax(-1))
        return
    probs = proposal.drawn_from.probs
    assert probs[0].gather(-1, proposal.tokens[0, :, None]).tolist() == [[1.0]] * 5
    torch.testing.assert_close(probs[1, :2], (logits / 0.8).softmax(-1), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("num_accepted", [0, 2, 5])
def test_the_draft_catches_up_with_what_was_copied(llama, follow, num_accepted):
    draft = DraftModelProposer(copy.deepcopy(llama.reference))
    batch = batch_of(REPEATING, PLAIN)
    proposer = admitted(copying(draft, 3), batch)
    proposal = proposer.propose(batch, [5, 5])
    batch.rows[0].token_ids += [*proposal.tokens[0, :num_accepted].tolist(), 60]
    batch.rows[1].token_ids += [int(proposal.tokens[1, 0]), 61]
    proposer.observe(batch)
    again = proposer.propose(batch, [3, 3])
    assert again.from_text == frozenset()
    assert again.tokens.tolist() == [follow(row.token_ids) for row in batch.rows]


def test_a_batch_of_repetitions_asks_no_draft(llama):
    batch = batch_of(REPEATING, [8, 7, 2, 8, 7], temperature=0.8)
    proposer = admitted(copying(DraftModelProposer(llama.draft), 2), batch)
    proposal = proposer.propose(batch, [4, 4])
    assert isinstance(proposal.drawn_from, OneHot)
    assert (proposal.from_text, proposal.counts.tolist()) == ({0, 1}, [4, 3])
