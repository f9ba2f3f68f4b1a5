"""Trees through the whole engine: lossless, whoever drafts them and whatever else is decoded."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from draftsmith.decoding import (
    DraftModelProposer,
    Engine,
    FixedLengths,
    Lengths,
    LookupFirstProposer,
    NoProposer,
    Request,
    SamplingParams,
)
from draftsmith.decoding import acceptance as rule_module
from draftsmith.decoding.acceptance import Verdict, verify
from draftsmith.decoding.distribution import sample
from draftsmith.decoding.drafting import Drafts
from draftsmith.decoding.features import FeatureStore
from draftsmith.decoding.trace import accepted_fraction, position_counts
from draftsmith.decoding.tree import Tree
from draftsmith.decoding.tree_choice import TreesByRows
from tests.decoding.arrivals import CONTEXT, live_through, random_requests
from tests.decoding.heads import fitted_head, fitted_heads, head_proposer
from tests.decoding.laws import exact_law, p_value
from tests.decoding.test_engine_greedy import KINDS, greedy_requests

NUM_NEW = 20
COMB = Tree.comb([3, 2, 2, 1])
BUSHY = Tree((0, 0, 1, 1, 2, 3, 3))  # nodes beside the spine have children of their own
DEEP = Tree((0, 0, 2, 3))  # and here they go deeper than it
SIGNIFICANCE = 1e-3


def trees(tree: Tree, *, is_sampled: bool = False) -> TreesByRows:
    return TreesByRows({10**6: tree}, is_sampled)


def engine_with(models, tree, *, rows, is_sampled=False, **options):
    proposer = DraftModelProposer(models.draft, trees=trees(tree, is_sampled=is_sampled))
    return Engine(models.target, proposer, max_rows=rows, draft_length=4, **options)


@pytest.fixture(scope="module")
def expected(family, continue_greedily, ragged_prompts):
    @functools.cache
    def tokens(kind):
        model = family(kind).reference
        return [continue_greedily(model, prompt, NUM_NEW) for prompt in ragged_prompts]

    return tokens


@pytest.mark.parametrize("tree", [COMB, BUSHY], ids=["comb", "bushy"])
@pytest.mark.parametrize("max_rows", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_output_equals_the_targets_argmax_loop(  # noqa: PLR0917  fixtures are arguments
    family, expected, ragged_prompts, kind, max_rows, tree
):
    results = engine_with(family(kind), tree, rows=max_rows).generate(
        greedy_requests(ragged_prompts)
    )
    assert [r.token_ids for r in results] == expected(kind)
    assert 0.05 < accepted_fraction([r.trace for r in results]) < 0.95


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_more_is_accepted_than_of_the_chain_alone(family, ragged_prompts, kind):
    requests = greedy_requests(ragged_prompts, num_new=40)
    accepted = []
    for tree in (Tree.chain(3), Tree.comb([4, 4, 4])):
        results = engine_with(family(kind), tree, rows=5).generate(requests)
        accepted.append(accepted_fraction([r.trace for r in results]))
    assert accepted[1] > accepted[0] + 0.02


def test_first_guesses_go_as_deep_as_the_tree(llama, ragged_prompts):
    """What follows a right first guess is counted as of a chain, not as if it were wrong."""
    requests = greedy_requests([*ragged_prompts, [9, 1, 4], [7] * 6], num_new=60)
    found = []
    for tree in (Tree.chain(3), DEEP):
        results = engine_with(llama, tree, rows=5).generate(requests)
        counts = position_counts([r.trace for r in results], 3)
        assert counts.reached[1] > 20
        found.append(counts.conditional_acceptance[1])
    assert found[1] == pytest.approx(found[0], abs=0.15)
    assert found[0] > 0.2


def test_a_path_beside_the_spine_that_stays_in_its_slots_is_noticed(
    llama, expected, ragged_prompts, monkeypatch
):
    monkeypatch.setattr(Engine, "_keep_paths", lambda _self, _places: None)
    results = engine_with(llama, COMB, rows=5).generate(greedy_requests(ragged_prompts))
    assert [r.token_ids for r in results] != expected("llama")


@pytest.mark.parametrize("kind", ["gemma3", "gpt2", "llama", "mistral"])
def test_the_cache_of_a_tree_is_that_of_the_text(family, kind):
    """After many rounds every slot holds what a prefill of the committed text writes."""
    models = family(kind)
    engine = engine_with(models, BUSHY, rows=2)
    prompts = [[5, 9, 2, 7, 1], [3, 3, 8]]
    engine.open(310)
    engine.submit(greedy_requests(prompts, num_new=300))
    for _ in range(50):
        engine.step()
    texts = [list(row.token_ids) for row in engine._batch.rows]
    assert len(texts) == 2
    held = [(layer.keys.clone(), layer.values.clone()) for layer in engine._target.cache.layers]
    fresh = Engine(models.target, NoProposer(), max_rows=2, draft_length=0)
    fresh.open(310)
    fresh.submit(greedy_requests(texts, num_new=2))
    fresh.step()
    twins = [row.token_ids[:-1] for row in fresh._batch.rows]
    for layer, (keys, values) in zip(fresh._target.cache.layers, held, strict=True):
        for row, text in enumerate(texts):
            read, twin = len(text) - 1, twins.index(text)
            for mine, theirs in ((keys, layer.keys), (values, layer.values)):
                torch.testing.assert_close(
                    mine[row, :, :read], theirs[twin, :, :read], atol=2e-4, rtol=1e-3
                )


# ----------------------------------------------------------------- heads on the target's states


@pytest.fixture(scope="module", params=["eagle", "medusa"])
def head_engine(request, family, expected, ragged_prompts):
    """`head_engine(kind, tree, rows)`: heads that were fitted to the answers."""
    fit = {"eagle": fitted_head, "medusa": fitted_heads}[request.param]

    @functools.cache
    def head(kind):
        return fit(family(kind).reference, list(zip(ragged_prompts, expected(kind), strict=True)))

    def build(kind, tree, rows):
        proposer = head_proposer(head(kind), trees=trees(tree))
        return Engine(family(kind).target, proposer, max_rows=rows, draft_length=4)

    return build


@pytest.mark.parametrize("tree", [COMB, BUSHY], ids=["comb", "bushy"])
@pytest.mark.parametrize("max_rows", [1, 5])
@pytest.mark.parametrize("kind", ["gemma3", "llama", "mistral", "qwen2"])
def test_heads_draft_trees_losslessly(  # noqa: PLR0917  fixtures are arguments
    head_engine, expected, ragged_prompts, kind, max_rows, tree
):
    results = head_engine(kind, tree, max_rows).generate(greedy_requests(ragged_prompts))
    assert [r.token_ids for r in results] == expected(kind)
    assert 0.05 < accepted_fraction([r.trace for r in results]) < 0.99


def test_states_move_with_the_path_that_is_kept(head_engine, ragged_prompts, monkeypatch):
    """Stale ones would change no token, only what is accepted."""
    requests = greedy_requests([*ragged_prompts, [9, 1, 4]], num_new=40)
    engine = head_engine("llama", BUSHY, 1)
    with_moves = [r.trace for r in engine.generate(requests)]
    assert any(rank for trace in with_moves for ranks in trace.ranks for rank in ranks)
    monkeypatch.setattr(FeatureStore, "move_slots", lambda *_: None)
    without = [r.trace for r in engine.generate(requests)]
    assert accepted_fraction(without) < accepted_fraction(with_moves)


# ------------------------------------------------------------------------------------- sampling

VOCAB = 8
PROMPT = [6, 7, 7, 4, 7]
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def small(family):
    return family("llama", vocab_size=VOCAB, noise=0.3)


@pytest.fixture(scope="module")
def far(family):
    """The same target with a draft that is mostly wrong."""
    return family("llama", vocab_size=VOCAB, noise=1.0)


@pytest.fixture(scope="module")
def law(small):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE)])
    return exact_law(small.reference, PROMPT, 3, warpers)


def sampled(engine, count=12000, **options):
    params = SamplingParams(**{"max_new_tokens": 3, "temperature": TEMPERATURE} | options)
    return engine.generate([Request(str(i), PROMPT, params) for i in range(count)])


@pytest.mark.parametrize("is_sampled", [False, True], ids=["certain", "sampled"])
@pytest.mark.parametrize("tree", [COMB, BUSHY], ids=["comb", "bushy"])
def test_continuations_follow_the_targets_exact_law(small, law, tree, is_sampled):
    results = sampled(engine_with(small, tree, rows=2000, is_sampled=is_sampled))
    assert 0.1 < accepted_fraction([r.trace for r in results]) < 0.95
    assert p_value(results, law) > SIGNIFICANCE


TRIMMED = torch.tensor([0, 1, 3, 4, 6])


@pytest.fixture(scope="module")
def longer_law(small):
    return exact_law(small.reference, PROMPT, 4, lambda _, scores: scores / TEMPERATURE)


@pytest.mark.parametrize(
    ("fit", "tree"),
    [
        (fitted_head, Tree.comb([3, 2, 2])),
        (fitted_heads, Tree.comb([3, 2, 2])),
        (fitted_heads, BUSHY),
        (fitted_heads, DEEP),
    ],
    ids=["eagle-comb", "medusa-comb", "medusa-bushy", "medusa-deep"],
)
def test_heads_that_know_a_part_of_the_vocabulary_draw_trees_of_depth_3_by_the_law(
    small, longer_law, fit, tree
):
    head = fit(small.reference, [(PROMPT, [7, 1, 3, 5])], steps=3, token_ids=TRIMMED)
    proposer = head_proposer(head, TRIMMED, trees(tree, is_sampled=True))
    engine = Engine(small.target, proposer, max_rows=2000, draft_length=4)
    results = sampled(engine, max_new_tokens=4)
    assert max(len(path) for r in results for path in r.trace.ranks) == 3
    assert 0.1 < accepted_fraction([r.trace for r in results]) < 0.95
    assert p_value(results, longer_law) > SIGNIFICANCE


@pytest.mark.parametrize("tree", [COMB, BUSHY], ids=["comb", "bushy"])
def test_penalties_count_the_guesses_on_the_path_of_every_place(small, law, tree):
    repetition = RepetitionPenaltyLogitsProcessor(1.5)
    warpers = LogitsProcessorList([repetition, TemperatureLogitsWarper(TEMPERATURE)])
    penalised = exact_law(small.reference, PROMPT, 3, warpers)
    engine = engine_with(small, tree, rows=2000, is_sampled=True)
    results = sampled(engine, repetition_penalty=1.5)
    assert 0.1 < accepted_fraction([r.trace for r in results]) < 0.95
    assert p_value(results, penalised) > SIGNIFICANCE
    assert p_value(results, law) < 1e-6


def greedy_or_sampled(index):
    return SamplingParams(max_new_tokens=3, temperature=TEMPERATURE if index % 4 else 0.0)


@pytest.mark.parametrize("tree", [COMB, BUSHY], ids=["comb", "bushy"])
def test_rows_beside_greedy_ones_follow_the_targets_exact_law(small, law, continue_greedily, tree):
    requests = [Request(str(i), PROMPT, greedy_or_sampled(i)) for i in range(12000)]
    results = engine_with(small, tree, rows=2000, is_sampled=True).generate(requests)
    assert p_value([r for i, r in enumerate(results) if i % 4], law) > SIGNIFICANCE
    assert {tuple(r.token_ids) for r in results[::4]} == {
        tuple(continue_greedily(small.reference, PROMPT, 3))
    }


def test_the_test_has_the_power_to_see_a_law_that_keeps_its_tried_tokens(far, law, monkeypatch):
    def results():
        return sampled(engine_with(far, Tree.comb([4, 4]), rows=2000, is_sampled=True))

    assert p_value(results(), law) > SIGNIFICANCE
    monkeypatch.setattr(rule_module, "_without", lambda q, _token: q)
    assert p_value(results(), law) < 1e-6


def test_the_test_has_the_power_to_see_best_guesses_that_are_judged_as_if_they_were_drawn(
    far, law, monkeypatch
):
    siblings = Drafts._siblings

    def best(drafts, logits, positions, wanted):
        siblings(drafts, logits, positions, wanted)  # keeps the law that they are not drawn from
        return logits[:, -1].topk(wanted).indices

    monkeypatch.setattr(Drafts, "_siblings", best)
    engine = engine_with(far, Tree.comb([4, 4]), rows=2000, is_sampled=True)
    assert p_value(sampled(engine), law) < 1e-6


def each_path_alone(p, proposal, accept, draw):
    """Siblings that are compared with draws of their own, as if each path were a chain."""
    tree = proposal.tree
    if tree is None:  # a last token is not drafted
        return verify(p, proposal, accept, draw)
    place, num_accepted, path = torch.zeros_like(proposal.counts), proposal.counts * 0, []
    rows = torch.arange(len(place))
    for depth in range(1, tree.depth + 1):
        moved = place.clone()
        for node, parent in enumerate(tree.parents):
            own_draw = sample(p.probs[:, parent], accept[:, node])
            is_hit = (own_draw == proposal.tokens[:, node]) & (place == parent) & (moved == place)
            is_hit &= proposal.counts >= depth
            moved = torch.where(is_hit, torch.full_like(place, node + 1), moved)
        num_accepted, place = num_accepted + (moved != place), moved
        path.append(place)
    return Verdict(
        num_accepted, sample(p.probs[rows, place], draw[rows, place]), torch.stack(path, 1)
    )


def test_the_test_has_the_power_to_see_paths_that_are_verified_each_alone(small, law):
    engine = engine_with(small, Tree.comb([4, 4]), rows=2000, is_sampled=True)
    engine.verify = each_path_alone
    assert p_value(sampled(engine), law) < 1e-6


@pytest.mark.parametrize("tree", [COMB, BUSHY, Tree.chain(2)])
def test_certain_guesses_give_the_tokens_that_the_target_draws_without_them(llama, tree):
    requests = random_requests(30, seed=5)
    alone = Engine(llama.target, NoProposer(), max_rows=4, draft_length=0, verify="match")
    expected = [r.token_ids for r in alone.generate(requests)]
    for mode in ("rejection", "match"):
        found = engine_with(llama, tree, rows=4, verify=mode).generate(requests)
        assert [r.token_ids for r in found] == expected


# ------------------------------------------ neighbours, arrivals, copies, processors, log-probs


@pytest.mark.parametrize("is_sampled", [False, True], ids=["certain", "sampled"])
@pytest.mark.parametrize("seed", range(3))
def test_requests_decode_as_each_would_alone(llama, seed, is_sampled):
    chance = random.Random(seed)
    engine = engine_with(
        llama, chance.choice([COMB, BUSHY]), rows=chance.randint(1, 6), is_sampled=is_sampled
    )
    requests = random_requests(40, seed=300 + seed)
    alone = {r.request_id: engine.generate([r])[0].token_ids for r in requests}
    engine.open(CONTEXT, prefill_chunk=chance.choice([1, 3, 16, None]))
    day = live_through(engine, requests, chance, preempt=0.3)
    assert day.answers == {name: alone[name] for name in alone if name not in day.aborted}
    for name, tokens in day.aborted.items():
        assert alone[name][: len(tokens)] == tokens


@pytest.mark.parametrize("tree", [COMB, BUSHY], ids=["comb", "bushy"])
@pytest.mark.parametrize("kind", ["gemma3", "llama", "mistral"])
def test_greedy_rows_beside_sampled_ones_are_exact_and_keep_what_each_keeps_alone(  # noqa: PLR0917
    family, expected, ragged_prompts, kind, tree
):
    greedy = greedy_requests(ragged_prompts)
    warm = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.9)
    sampled_ones = [Request(f"s{i}", prompt, warm) for i, prompt in enumerate(ragged_prompts)]
    mixed = [request for both in zip(greedy, sampled_ones, strict=True) for request in both]
    engine = engine_with(family(kind), tree, rows=10, is_sampled=True)
    results = engine.generate(mixed)
    assert [r.token_ids for r in results[::2]] == expected(kind)
    assert results == [engine.generate([request])[0] for request in mixed]
    for rows in (results[::2], results[1::2]):
        assert any(rank for r in rows for path in r.trace.ranks for rank in path)


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_any_mix_keep_in_every_round_what_each_keeps_alone(llama, seed):
    requests = random_requests(40, seed=70 + seed)
    engine = engine_with(llama, BUSHY, rows=6, is_sampled=True)
    alone = [engine.generate([request])[0] for request in requests]
    assert engine.generate(requests) == alone


@pytest.mark.parametrize("max_rows", [1, 5])
def test_copies_stand_in_for_guesses_and_change_no_token(llama, max_rows):
    requests = random_requests(30, seed=9)
    alone = Engine(llama.target, NoProposer(), max_rows=4, draft_length=0, verify="match")
    expected = [r.token_ids for r in alone.generate(requests)]
    draft = DraftModelProposer(llama.draft, trees=trees(COMB))
    lengths = FixedLengths(Lengths(3, copy=6))
    proposer = LookupFirstProposer(draft, lengths, min_ngram=1)
    engine = Engine(llama.target, proposer, max_rows=max_rows, draft_length=6)
    found = engine.generate(requests)
    assert [r.token_ids for r in found] == expected
    copied = [sum(r.trace.from_text) for r in found]
    assert any(copied)
    assert not all(all(r.trace.from_text) for r in found)


def rounds_of(result):
    """What was proposed and kept; a copy's ranks are known of trees alone."""
    trace = result.trace
    return trace.drafted, trace.accepted, trace.committed, trace.from_text


@pytest.mark.parametrize("tree", [COMB, DEEP], ids=["comb", "deep"])
@pytest.mark.parametrize("is_sampled", [False, True], ids=["certain", "sampled"])
@pytest.mark.parametrize("max_rows", [3, 5])
def test_sampled_requests_are_as_alone_whoever_copies_beside_them(
    llama, max_rows, is_sampled, tree
):
    requests = random_requests(40, seed=21)
    draft = DraftModelProposer(llama.draft, trees=trees(tree, is_sampled=is_sampled))
    lengths = FixedLengths(Lengths(4, copy=6))
    proposer = LookupFirstProposer(draft, lengths, min_ngram=1)
    engine = Engine(llama.target, proposer, max_rows=max_rows, draft_length=6)
    alone = [engine.generate([r])[0] for r in requests]
    together = engine.generate(requests)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [rounds_of(r) for r in together] == [rounds_of(r) for r in alone]
    ranks = [rank for r in together for path in r.trace.ranks for rank in path]
    assert any(ranks), "no guess beside a spine was ever right"
    assert any(any(r.trace.from_text) for r in together)


@pytest.mark.parametrize("name", ["draft", "eagle", "medusa"])
def test_copies_beside_a_tree_have_room_at_the_end_of_the_longest_row(
    family, expected, ragged_prompts, name
):
    """The one whose last token is being verified, with neighbours that copy and draft."""
    models = family("llama")
    alone = Engine(models.target, NoProposer(), max_rows=1, draft_length=0)
    texts = list(zip(ragged_prompts, expected("llama"), strict=True))
    for longest in range(57, 66):  # across the rounding of slots
        repeated = [7, 8, 9, 10, 11, 12] * 4
        requests = [
            Request("long", list(range(1, longest - 8)), SamplingParams(max_new_tokens=9)),
            Request("copies", repeated, SamplingParams(max_new_tokens=30)),
            Request("drafts", [5, 9, 2], SamplingParams(max_new_tokens=30)),
        ]
        shape = trees(Tree.comb([8]))
        if name == "draft":
            draft = DraftModelProposer(models.draft, trees=shape)
        else:
            fit = {"eagle": fitted_head, "medusa": fitted_heads}[name]
            draft = head_proposer(fit(models.reference, texts, steps=1), trees=shape)
        lengths = FixedLengths(Lengths(1, copy=5))
        proposer = LookupFirstProposer(draft, lengths, min_ngram=1)
        engine = Engine(models.target, proposer, max_rows=3, draft_length=5)
        expected_tokens = [alone.generate([r])[0].token_ids for r in requests]
        assert [r.token_ids for r in engine.generate(requests)] == expected_tokens


class Forbid:
    """A processor that forbids one token behind another."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, (int(input_ids[0, -1]) * 7 + 3) % scores.shape[1]] = -torch.inf
        return scores


def test_processed_requests_take_the_same_path_with_and_without_a_tree(llama):
    plain = random_requests(20, seed=11)
    requests = [
        Request(r.request_id, r.prompt_ids, r.params, (Forbid(),) if i % 2 else ())
        for i, r in enumerate(plain)
    ]
    alone = Engine(llama.target, NoProposer(), max_rows=4, draft_length=0, verify="match")
    expected = [r.token_ids for r in alone.generate(requests)]
    results = engine_with(llama, BUSHY, rows=4, verify="match").generate(requests)
    assert [r.token_ids for r in results] == expected
    assert accepted_fraction([r.trace for r in results]) > 0.05


def test_log_probabilities_are_those_of_the_place_that_decided(llama):
    params = SamplingParams(max_new_tokens=24)
    request = Request("r", [4, 8, 15, 16], params, num_top=2)

    def shown(engine):
        return [one for event in engine.stream([request]) for one in event.logprobs]

    plain = Engine(llama.target, NoProposer(), max_rows=1, draft_length=0)
    expected, found = shown(plain), shown(engine_with(llama, COMB, rows=1))
    assert [round(one.logprob, 4) for one in found] == [round(one.logprob, 4) for one in expected]
    assert [[i for i, _ in one.top] for one in found] == [[i for i, _ in o.top] for o in expected]


def test_an_answer_that_ends_at_the_models_limit_has_room_for_its_last_tree(family):
    models = family("gpt2", max_positions=64)
    prompt = list(range(1, 41))
    request = Request("r", prompt, SamplingParams(max_new_tokens=24))
    plain = Engine(models.target, NoProposer(), max_rows=1, draft_length=0)
    expected = plain.generate([request])[0].token_ids
    assert engine_with(models, BUSHY, rows=1).generate([request])[0].token_ids == expected
