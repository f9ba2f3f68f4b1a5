"""Bad words: exact at every draft position, in chains and trees, whoever drafts."""

from __future__ import annotations

import pytest
import torch

from draftsmith.decoding import (
    DraftModelProposer,
    Engine,
    NoProposer,
    Request,
    SamplingParams,
    Tree,
)
from draftsmith.decoding import batch as batch_module
from draftsmith.decoding.bad_words import ANY, NOTHING, BadWords, aligned, forbid
from draftsmith.decoding.trace import accepted_fraction
from draftsmith.decoding.tree_choice import NO_TREES, TreesByRows
from draftsmith.errors import DecodingError
from tests.decoding.laws import build_proposer, exact_law, p_value

NUM_NEW = 24
COMB = Tree.comb([3, 2, 2, 1])
BUSHY = Tree((0, 0, 1, 1, 2, 3, 3))


def without(scores, answer, words):
    """Scores `[vocab]` behind an answer, by the definition: a loop over words."""
    for word in words:
        *before, last = word
        if not before or (len(answer) >= len(before) and answer[-len(before) :] == before):
            scores[last] = -torch.inf
    return scores


@torch.inference_mode()
def plainly(model, prompt, words):
    answer = []
    for _ in range(NUM_NEW):
        logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, -1]
        answer.append(int(without(logits, answer, words).argmax()))
    return answer


def words_in(answer):
    """A token, a pair and a triple of an answer, so that forbidding them changes it."""
    return (answer[9:10], answer[2:4], answer[5:8])


@pytest.fixture(scope="module")
def forbidden(llama, ragged_prompts):
    """By prompt the words, and the answers without them."""
    words = [words_in(plainly(llama.reference, prompt, ())) for prompt in ragged_prompts]
    pairs = zip(ragged_prompts, words, strict=True)
    return words, [plainly(llama.reference, prompt, given) for prompt, given in pairs]


@pytest.mark.parametrize("max_rows", [1, 5])
@pytest.mark.parametrize(
    ("kind", "tree"),
    [("none", None), ("draft", None), ("lookup_first", None), ("draft", COMB), ("draft", BUSHY)],
    ids=["none", "chain", "copies", "comb", "bushy"],
)
def test_greedy_answers_are_those_of_a_plain_loop(
    llama, ragged_prompts, forbidden, kind, tree, max_rows
):
    words, expected = forbidden
    proposer = build_proposer(kind, llama)
    if tree is not None:
        proposer = DraftModelProposer(llama.draft, trees=TreesByRows({10**6: tree}))
    engine = Engine(
        llama.target, proposer, max_rows=max_rows, draft_length=0 if kind == "none" else 4
    )
    requests = [
        Request(str(i), prompt, SamplingParams(max_new_tokens=NUM_NEW, bad_words_ids=given))
        for i, (prompt, given) in enumerate(zip(ragged_prompts, words, strict=True))
    ]
    results = engine.generate(requests)
    assert [result.token_ids for result in results] == expected
    if kind != "none":
        assert accepted_fraction([r.trace for r in results]) > 0.05


def test_the_words_change_the_answers(llama, ragged_prompts, forbidden):
    for prompt, (words, answer) in zip(ragged_prompts, zip(*forbidden, strict=True), strict=True):
        assert answer != plainly(llama.reference, prompt, ())
        for word in words:
            size = len(word)
            assert word not in [answer[i : i + size] for i in range(NUM_NEW - size + 1)]


# ------------------------------------------------------------------------------------- sampling

PROMPT = [6, 7, 7, 4, 7]  # ends in the first half of a word, which counts for nothing
WORDS = (
    *((token, token) for token in range(8)),
    *((token, (token + 1) % 8) for token in range(8)),
    *((token, (token + 3) % 8, (token + 6) % 8) for token in range(8)),
    (5,),
)
PARAMS = SamplingParams(max_new_tokens=4, temperature=0.9, bad_words_ids=WORDS)


@pytest.fixture(scope="module")
def small(family):
    return family("llama", vocab_size=8, noise=0.3)


@pytest.fixture(scope="module")
def law(small):
    """Probabilities of all answers of four tokens."""

    def warp(inputs, logits):
        scores = logits.clone()
        for row, token_ids in enumerate(inputs.tolist()):
            without(scores[row], token_ids[len(PROMPT) :], [list(word) for word in WORDS])
        return scores / PARAMS.temperature

    return exact_law(small.reference, PROMPT, PARAMS.max_new_tokens, warp)


def sampled(engine, count=8000):
    return engine.generate([Request(str(i), PROMPT, PARAMS) for i in range(count)])


@pytest.mark.parametrize("verify", ["rejection", "match"])
@pytest.mark.parametrize(
    ("kind", "draft_length"),
    [("none", 0), ("draft", 1), ("draft", 3), ("trimmed", 2), ("lookup", 2), ("lookup_first", 2)],
)
def test_answers_follow_the_targets_exact_law(small, law, kind, draft_length, verify):
    proposer = build_proposer(kind, small)
    engine = Engine(small.target, proposer, max_rows=2000, draft_length=draft_length, verify=verify)
    assert p_value(sampled(engine), law) > 1e-3


@pytest.mark.parametrize("is_sampled", [False, True], ids=["certain", "sampled"])
@pytest.mark.parametrize("tree", [COMB, BUSHY], ids=["comb", "bushy"])
def test_answers_along_trees_follow_it_too(small, law, tree, is_sampled):
    proposer = DraftModelProposer(small.draft, trees=TreesByRows({10**6: tree}, is_sampled))
    engine = Engine(small.target, proposer, max_rows=2000, draft_length=4)
    results = sampled(engine)
    assert 0.1 < accepted_fraction([r.trace for r in results]) < 0.95
    assert p_value(results, law) > 1e-3


@pytest.mark.parametrize("trees", [NO_TREES, TreesByRows({10**6: BUSHY})], ids=["chain", "tree"])
def test_the_law_sees_words_that_forget_the_drafts(small, law, monkeypatch, trees):
    def forgetful(logits, words, tails, drafts, token_ids=None, _prefixes=()):
        places = [
            forbid(logits[:, i : i + 1], words, tails, drafts[:, :0], token_ids)
            for i in range(logits.shape[1])
        ]
        return torch.cat(places, 1)

    monkeypatch.setattr(batch_module, "forbid", forgetful)
    proposer = DraftModelProposer(small.draft, trees=trees)
    results = sampled(Engine(small.target, proposer, max_rows=2000, draft_length=3))
    is_possible = {tuple(result.token_ids) for result in results} <= set(law)
    assert not is_possible or p_value(results, law) < 1e-6


# ----------------------------------------------------------------------------------- small parts


def test_the_last_token_is_forbidden_behind_those_before_it():
    """One row holds the answer (4, 3); its drafts are a chain (3, 1)."""
    inf = torch.inf
    words = BadWords(
        rows=torch.tensor([1, 1, 1]),
        before=torch.tensor([[ANY, 3], [3, 3], [ANY, ANY]]),
        last=torch.tensor([0, 1, 4]),
    )
    tails = torch.tensor([[NOTHING, NOTHING], [4, 3]])
    drafts = torch.tensor([[3, 1], [3, 1]])
    got = forbid(torch.zeros(2, 3, 5), words, tails, drafts)
    expected = [[-inf, 0, 0, 0, -inf], [-inf, -inf, 0, 0, -inf], [0, 0, 0, 0, -inf]]
    assert got[0].tolist() == torch.zeros(3, 5).tolist()
    assert got[1].tolist() == expected
    step = forbid(torch.zeros(2, 1, 2), words, tails, drafts[:, :1], torch.tensor([2, 1]))
    assert step[1].tolist() == [[0, -inf]]
    siblings = forbid(torch.zeros(2, 3, 5), words, tails, drafts, None, Tree((0, 0)).prefixes)
    assert siblings[1].tolist() == [expected[0], expected[1], expected[2]]


def test_tokens_are_aligned_at_their_end():
    assert aligned([1, 2, 3], 2, ANY) == [2, 3]
    assert aligned([1], 3, ANY) == [ANY, ANY, 1]
    assert aligned([1, 2], 0, ANY) == []


@pytest.mark.parametrize("words", [((),), ((-1,),), ((3, -2),)])
def test_what_is_no_word_is_refused_by_name(words):
    with pytest.raises(DecodingError, match="sampling parameter bad_words_ids"):
        SamplingParams(max_new_tokens=1, bad_words_ids=words)


def test_a_word_outside_the_vocabulary_is_refused(llama):
    params = SamplingParams(max_new_tokens=1, bad_words_ids=((3, 64),))
    engine = Engine(llama.target, NoProposer(), max_rows=1, draft_length=0)
    with pytest.raises(DecodingError, match=r"bad words of ids outside 0\.\.63"):
        engine.generate([Request("a", [1], params)])
