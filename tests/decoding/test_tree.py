"""Trees of drafts: their shape, what they see, and the law of what is committed."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict

import pytest
import torch

from draftsmith.decoding import acceptance as rule_module
from draftsmith.decoding.acceptance import Proposal, verify
from draftsmith.decoding.distribution import Dense, OneHot
from draftsmith.decoding.tree import Tree, follow, tensors_of, visible_slots
from draftsmith.decoding.tree_choice import TreesByRows
from draftsmith.errors import DecodingError

EXAMPLE = Tree((0, 0, 1, 1))  # that of the module
VOCAB = 4
TOLERANCE = 1e-12
DETECTED = 1e-3


def random_tree(chance: random.Random, most_nodes: int = 9) -> Tree:
    return Tree(tuple(chance.randint(0, node) for node in range(chance.randint(1, most_nodes))))


# ---------------------------------------------------------------------------------------- shape


def test_the_example_has_the_shape_that_is_drawn_of_it():
    assert EXAMPLE.depths == (0, 1, 1, 2, 2)
    assert EXAMPLE.ranks == (0, 1, 0, 1)
    assert EXAMPLE.guesses == (2, 2)
    assert EXAMPLE.prefixes == ((), (0,), (1,), (0, 2), (0, 3))
    assert EXAMPLE.spine == (0, 2)
    assert (EXAMPLE.depth, EXAMPLE.num_nodes) == (2, 4)


def test_a_chain_is_the_tree_of_one_guess_a_position():
    chain = Tree.chain(3)
    assert chain == Tree.comb([1, 1, 1]) == Tree((0, 1, 2))
    assert (chain.depths, chain.ranks, chain.spine) == ((0, 1, 2, 3), (0, 0, 0), (0, 1, 2))


def test_a_comb_is_a_chain_with_leaves_beside_it():
    comb = Tree.comb([3, 1, 2])
    assert comb.parents == (0, 1, 2, 0, 0, 2)
    assert comb.guesses == (3, 1, 2)
    assert comb.spine == (0, 1, 2)


def test_a_cut_tree_keeps_the_first_positions_and_their_ranks():
    tree = Tree((0, 1, 0, 3, 2))
    assert tree.up_to(2) == Tree((0, 1, 0, 3))
    assert tree.up_to(1) == Tree((0, 0))
    assert tree.up_to(3) is tree


def test_a_longer_spine_leaves_the_other_nodes_where_they_are():
    assert EXAMPLE.with_spine(4) == Tree((0, 0, 1, 1, 3, 5))
    assert EXAMPLE.with_spine(4).spine == (0, 2, 4, 5)
    assert EXAMPLE.with_spine(2) is EXAMPLE


@pytest.mark.parametrize("seed", range(5))
def test_the_nodes_that_a_longer_spine_adds_are_known_without_it(seed):
    tree = random_tree(random.Random(seed))
    for length in range(12):
        assert tree.num_nodes_with(length) == tree.with_spine(length).num_nodes


@pytest.mark.parametrize("parents", [(1,), (0, 2), (0, -1)])
def test_a_parent_behind_its_child_is_refused(parents):
    with pytest.raises(DecodingError, match="parents before their children"):
        Tree(parents)


def test_a_batch_takes_the_tree_of_the_next_number_of_rows():
    trees = TreesByRows({1: Tree.comb([3, 2]), 4: Tree((0, 0))})
    assert [trees.choose(rows, 9) for rows in (1, 2, 4, 5)] == [
        Tree.comb([3, 2]),
        Tree((0, 0)),
        Tree((0, 0)),
        None,
    ]
    assert trees.choose(1, 1) == Tree((0, 0, 0))
    assert trees.max_nodes == 5


# ----------------------------------------------------------------------------------------- mask


@pytest.mark.parametrize("window", [None, 1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_place_sees_its_text_and_its_own_path_within_the_window(seed, window):
    chance = random.Random(seed)
    tree = random_tree(chance)
    starts = [chance.randint(0, 6) for _ in range(3)]
    depths = torch.tensor(tree.depths)
    positions = torch.tensor(starts)[:, None] + depths
    visible = visible_slots(tensors_of(tree, depths.device).sees, positions, 20, window)
    for row, start in enumerate(starts):
        for place, prefix in enumerate(tree.prefixes):
            # Slot -> position of what lies in it.
            seen = {slot: slot for slot in range(start + 1)}
            seen |= {start + node + 1: start + tree.depths[node + 1] for node in prefix}
            own = start + tree.depths[place]
            expected = {s for s, at in seen.items() if window is None or at > own - window}
            found = set(visible[row, 0, place].nonzero().flatten().tolist())
            assert found == expected


# ----------------------------------------------------------------- guesses that are certain


def walked(tree, drawn, drafts, count):
    """Places of the accepted nodes of one row, found node by node."""
    place, path = 0, []
    while len(path) < count:
        hits = [
            node + 1
            for node, parent in enumerate(tree.parents)
            if parent == place and drafts[node] == drawn[place]
        ]
        if not hits:
            break
        place = hits[0]
        path.append(place)
    return path


@pytest.mark.parametrize("seed", range(20))
def test_the_path_holds_what_the_target_draws(seed):
    chance = random.Random(seed)
    tree = random_tree(chance)
    rows = 50
    drawn = torch.tensor([[chance.randrange(3) for _ in tree.depths] for _ in range(rows)])
    drafts = torch.tensor([[chance.randrange(3) for _ in tree.parents] for _ in range(rows)])
    counts = torch.tensor([chance.randint(0, tree.depth + 1) for _ in range(rows)])
    num_accepted, path = follow(drawn, drafts, counts, tree)
    for row in range(rows):
        expected = walked(tree, drawn[row].tolist(), drafts[row].tolist(), int(counts[row]))
        assert path[row, : len(expected)].tolist() == expected
        assert int(num_accepted[row]) == len(expected)
        assert int(path[row, -1]) == (expected[-1] if expected else 0)


# ------------------------------------------------------ guesses drawn without replacement


def law(generator) -> list[float]:
    logits = 1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    return logits.softmax(0).tolist()


def left_over(p, q):
    rest = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    mass = sum(rest)
    return [value / mass for value in rest] if mass > 0 else p


def without(q, token):
    rest = [0.0 if index == token else value for index, value in enumerate(q)]
    mass = sum(rest)
    return [value / mass for value in rest] if mass > 0 else rest


def only(token):
    return [float(index == token) for index in range(VOCAB)]


def outcomes(tree, p_of, q_of, drafts, next_q, reached=(0, ())):
    """(probability, committed tokens, law of the next) of one tree of drafts, by the definition.

    Without `q_of` the guesses are certain.
    """
    place, text = reached
    children = [node + 1 for node, parent in enumerate(tree.parents) if parent == place]
    p, q, reach = p_of(text), q_of(len(text)) if children and q_of else [], 1.0
    for child in children:
        token = drafts[child - 1]
        q = q if q_of else only(token)
        keep = min(1.0, p[token] / q[token]) if q[token] > 0 else 0.0
        behind = outcomes(tree, p_of, q_of, drafts, next_q, (child, (*text, token)))
        for share, tokens, next_law in behind:
            yield reach * keep * share, tokens, next_law
        reach *= 1 - keep
        p, q = left_over(p, q), next_q(q, token)
    yield reach, text, p


def samples(q, number):
    """(probability, tokens) of so many draws without replacement."""
    if number == 0:
        yield 1.0, ()
        return
    for token, share in enumerate(q):
        if share > 0:
            for rest_share, rest in samples(without(q, token), number - 1):
                yield share * rest_share, (token, *rest)


def law_of_a_round(tree, p_of, q_of, horizon, next_q):
    """Probability of every text of `horizon` tokens: a round, then the target alone."""
    found = defaultdict(float)
    draws = [list(samples(q_of(depth), number)) for depth, number in enumerate(tree.guesses)]
    for chosen in itertools.product(*draws):
        weight = 1.0
        for share, _ in chosen:
            weight *= share
        nodes = zip(tree.depths[1:], tree.ranks, strict=True)
        drafts = [chosen[depth - 1][1][rank] for depth, rank in nodes]
        add_texts(found, weight, outcomes(tree, p_of, q_of, drafts, next_q), p_of, horizon)
    return found


def add_texts(found, weight, rounds, p_of, horizon):
    """The texts of `horizon` tokens that the target makes of what rounds committed."""
    for share, text, next_law in rounds:
        for rest in itertools.product(range(VOCAB), repeat=horizon - len(text)):
            mass, so_far = weight * share, text
            for place, token in enumerate(rest):
                mass *= next_law[token] if place == 0 else p_of(so_far)[token]
                so_far = (*so_far, token)
            found[so_far] += mass


SHAPES = [Tree.comb([2, 2, 1]), Tree((0, 0, 1, 1, 3)), Tree((0, 1, 2)), Tree((0, 0, 0, 1, 4))]


def worst_error(tree, next_q, *, is_certain=False):
    """Largest difference of a text's probability from the target's."""
    generator = torch.Generator().manual_seed(tree.num_nodes)
    horizon = tree.depth + 1
    texts = [t for n in range(horizon) for t in itertools.product(range(VOCAB), repeat=n)]
    p = {text: law(generator) for text in texts}
    q = [law(generator) for _ in range(tree.depth)]
    if is_certain:
        found, drafts = defaultdict(float), [3 * node % VOCAB for node in range(tree.num_nodes)]
        rounds = outcomes(tree, p.__getitem__, None, drafts, next_q)
        add_texts(found, 1.0, rounds, p.__getitem__, horizon)
    else:
        found = law_of_a_round(tree, p.__getitem__, q.__getitem__, horizon, next_q)
    worst = 0.0
    for text in itertools.product(range(VOCAB), repeat=horizon):
        expected = 1.0
        for place, token in enumerate(text):
            expected *= p[text[:place]][token]
        worst = max(worst, abs(found[text] - expected))
    return worst


@pytest.mark.parametrize("tree", SHAPES)
def test_the_rule_for_siblings_commits_the_targets_law(tree):
    assert worst_error(tree, without) < TOLERANCE


@pytest.mark.parametrize("tree", SHAPES)
def test_siblings_that_are_certain_commit_it_too(tree):
    assert worst_error(tree, without, is_certain=True) < TOLERANCE


def test_the_enumeration_sees_siblings_that_are_held_to_the_law_of_the_first():
    assert worst_error(Tree.comb([2, 2, 1]), lambda q, _token: q) > DETECTED


def stepwise(tree, p, q, drafts, accept, count, *, is_certain):
    """Path and next law of one row, by the definition."""
    place, path = 0, []
    current = p[0]
    while True:
        children = [node + 1 for node, parent in enumerate(tree.parents) if parent == place]
        left, kept = q[len(path)] if len(path) < tree.depth else None, None
        for child in children if len(path) < count else []:
            token = drafts[child - 1]
            left = only(token) if is_certain else left
            if left[token] > 0 and accept[child - 1] * left[token] < current[token]:
                kept = child
                break
            current, left = left_over(current, left), without(left, token)
        if kept is None:
            return path, current
        place = kept
        path.append(place)
        current = p[place]


@pytest.mark.parametrize("seed", range(12))
def test_verification_of_siblings_is_that_rule(seed, monkeypatch):
    laws = []

    def keep_law(probs, _uniforms):
        laws.append(probs)
        return probs.argmax(-1)

    monkeypatch.setattr(rule_module, "sample", keep_law)
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tree, rows = random_tree(chance), 60
    weights = torch.rand(2, rows, 12, VOCAB, generator=generator, dtype=torch.float64)
    weights[1, ::7, :, 1:] = 0  # runs out of tokens behind the first
    laws_of = weights / weights.sum(-1, keepdim=True)
    p, q = laws_of[0, :, : tree.num_nodes + 1], laws_of[1, :, : tree.depth]
    drafts = torch.randint(VOCAB, (rows, tree.num_nodes), generator=generator)
    accept = torch.rand(rows, tree.num_nodes, generator=generator, dtype=torch.float64)
    counts = torch.randint(tree.depth + 2, (rows,), generator=generator)
    certain = torch.rand(rows, generator=generator) < 0.3
    proposal = Proposal(drafts, Dense(q), counts, tree=tree, certain=certain)
    verdict = verify(Dense(p), proposal, accept, torch.zeros(rows, tree.num_nodes + 1))
    for row in range(rows):
        path, next_law = stepwise(
            tree,
            p[row].tolist(),
            q[row].tolist(),
            drafts[row].tolist(),
            accept[row].tolist(),
            int(counts[row]),
            is_certain=bool(certain[row]),
        )
        assert int(verdict.num_accepted[row]) == len(path)
        assert verdict.path[row, : len(path)].tolist() == path
        assert torch.allclose(laws[0][row], torch.tensor(next_law, dtype=torch.float64))


# ------------------------------------------------------- the law of what `verify` itself commits

MARGIN = 1e-12  # of a uniform from the one at which a guess is refused
SHIPPED = [Tree.comb([2, 2, 1]), Tree((0, 0, 1, 2, 2, 4))]  # one deeper than its spine


def ways(tree, p_of, q_of, drafts, reached=(0, ())):
    """(decisions, accepted tokens) of every way through a tree of drafts, by the definition.

    A decision is a node, the uniform below which it is kept, and whether it is.
    """
    place, text = reached
    children = [node + 1 for node, parent in enumerate(tree.parents) if parent == place]
    p, q, refused = p_of(text), q_of(len(text)) if children else [], ()
    for child in children:
        token = drafts[child - 1]
        keep = min(1.0, p[token] / q[token])
        behind = ways(tree, p_of, q_of, drafts, (child, (*text, token))) if keep > 0 else ()
        for decisions, rest in behind:
            yield (*refused, (child - 1, keep, True), *decisions), rest
        if keep == 1.0:
            return
        refused = (*refused, (child - 1, keep, False))
        p, q = left_over(p, q), without(q, token)
    yield refused, text


def rows_of(tree, p_of, q_of):
    """(probability, drafts, uniforms, accepted tokens) of every tree of drafts and way through it.

    Uniforms lie a hair below the one that refuses, or above.
    """
    draws = [list(samples(q_of(depth), number)) for depth, number in enumerate(tree.guesses)]
    nodes = list(zip(tree.depths[1:], tree.ranks, strict=True))
    for chosen in itertools.product(*draws):
        drafts = [chosen[depth - 1][1][rank] for depth, rank in nodes]
        drawn = math.prod(share for share, _ in chosen)
        for decisions, text in ways(tree, p_of, q_of, drafts):
            accept = [0.0] * tree.num_nodes
            share = drawn
            for node, keep, is_kept in decisions:
                accept[node] = keep * (1 - MARGIN if is_kept else 1 + MARGIN)
                share *= keep if is_kept else 1 - keep
            yield share, drafts, accept, text


def laws_at_places(tree, p_of, drafts):
    return [p_of(tuple(drafts[node] for node in prefix)) for prefix in tree.prefixes]


def error_of(found, p_of, horizon):
    """Largest difference of a text's probability from the target's."""
    worst = 0.0
    for text in itertools.product(range(VOCAB), repeat=horizon):
        expected = math.prod(p_of(text[:place])[token] for place, token in enumerate(text))
        worst = max(worst, abs(found[text] - expected))
    return worst


def random_laws(tree):
    """Of the target behind every text, and of the draft at every depth."""
    generator = torch.Generator().manual_seed(tree.num_nodes)
    texts = [t for n in range(tree.depth + 1) for t in itertools.product(range(VOCAB), repeat=n)]
    p = {text: law(generator) for text in texts}
    return p.__getitem__, [law(generator) for _ in range(tree.depth)].__getitem__


@pytest.mark.parametrize("tree", SHIPPED)
def test_verification_commits_the_targets_law(tree, monkeypatch):
    laws = []

    def keep_law(probs, _uniforms):
        laws.append(probs)
        return probs.argmax(-1)

    monkeypatch.setattr(rule_module, "sample", keep_law)
    p_of, q_of = random_laws(tree)
    rows = list(rows_of(tree, p_of, q_of))
    drafts = torch.tensor([drafts for _, drafts, _, _ in rows])
    p = torch.tensor([laws_at_places(tree, p_of, d) for d in drafts.tolist()], dtype=torch.float64)
    q = torch.tensor([q_of(depth) for depth in range(tree.depth)], dtype=torch.float64)
    counts = torch.full((len(rows),), tree.depth)
    proposal = Proposal(drafts, Dense(q.expand(len(rows), -1, -1)), counts, tree=tree)
    accept = torch.tensor([accept for _, _, accept, _ in rows], dtype=torch.float64)
    verdict = verify(Dense(p), proposal, accept, torch.zeros(len(rows), tree.num_nodes + 1))
    found, next_laws = defaultdict(float), laws[0].tolist()
    for row, (share, guesses, _, text) in enumerate(rows):
        places = verdict.path[row, : int(verdict.num_accepted[row])].tolist()
        assert tuple(guesses[place - 1] for place in places) == text
        add_texts(found, share, [(1.0, text, next_laws[row])], p_of, tree.depth + 1)
    assert error_of(found, p_of, tree.depth + 1) < TOLERANCE


@pytest.mark.parametrize("tree", [Tree.comb([2, 2, 1]), Tree((0, 0, 1, 2, 4))])
def test_verification_of_certain_guesses_commits_it_too(tree, monkeypatch):
    p_of, _ = random_laws(tree)
    drafts = [3 * node % VOCAB for node in range(tree.num_nodes)]
    laws = laws_at_places(tree, p_of, drafts)
    draws = list(itertools.product(range(VOCAB), repeat=tree.num_nodes + 1))
    monkeypatch.setattr(rule_module, "drawn", lambda *_: torch.tensor(draws))
    tokens = torch.tensor(drafts).expand(len(draws), -1)
    laws_of_rows = torch.tensor(laws, dtype=torch.float64).expand(len(draws), -1, -1)
    counts = torch.full((len(draws),), tree.depth)
    unused = torch.zeros(len(draws), tree.num_nodes + 1)
    proposal = Proposal(tokens, OneHot(tokens), counts, tree=tree)
    verdict = verify(Dense(laws_of_rows), proposal, unused[:, 1:], unused)
    committed = defaultdict(float)
    for row, drawn in enumerate(draws):
        places = verdict.path[row, : int(verdict.num_accepted[row])].tolist()
        text = (*(drafts[place - 1] for place in places), int(verdict.next_token[row]))
        committed[text] += math.prod(p[token] for p, token in zip(laws, drawn, strict=True))
    found = defaultdict(float)
    for text, share in committed.items():
        following = [] if len(text) > tree.depth else p_of(text)
        add_texts(found, share, [(1.0, text, following)], p_of, tree.depth + 1)
    assert error_of(found, p_of, tree.depth + 1) < TOLERANCE
