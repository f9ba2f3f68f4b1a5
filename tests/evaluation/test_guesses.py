"""Which guess of a position is right how often, and the tree that is grown from that."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from draftsmith.decoding import Trace, Tree
from draftsmith.evaluation.cost_model import (
    LEAST_GAIN,
    ForwardCosts,
    Survival,
    best_lengths,
    predicted_speedup,
)
from draftsmith.evaluation.guesses import (
    NOTHING,
    Drafting,
    Guesses,
    TreeLimits,
    best_tree,
    tree_beside,
)

COMB = Tree.comb([3, 2])
SHARES = Guesses([[0.5, 0.2, 0.1], [0.4, 0.3]], [100, 50])
FLAT = ForwardCosts(20.0, 2.0, {width: 20.0 + 0.1 * width for width in range(1, 18)})


def trace_of(*rounds):
    """Rounds of (drafted, ranks of the accepted, committed, copied)."""
    made = Trace()
    for drafted, ranks, committed, copied in rounds:
        made.record(
            drafted=drafted,
            accepted=len(ranks),
            committed=committed,
            from_text=copied,
            ranks=ranks,
        )
    return made


def test_shares_are_of_the_rounds_whose_first_guesses_were_right():
    made = trace_of(
        (2, (0, 1), 3, False),
        (2, (0,), 2, False),
        (2, (2,), 2, False),  # beside the chain: says nothing of the second position
        (2, (), 1, False),
        (2, (0, 0), 3, True),  # copied
    )
    found = Guesses.counted([made], COMB)
    assert found.reached == [4, 2]
    assert found.shares == [[0.5, 0.0, 0.25], [0.0, 0.5]]


def test_a_round_that_was_cut_off_says_nothing_of_what_lies_behind():
    """A stop token was committed in the place of the second accepted draft."""
    found = Guesses.counted([trace_of((2, (0, 0), 1, False))], COMB)
    assert found.reached == [1, 0]
    assert found.shares == [[1.0, 0.0, 0.0], [0.0, 0.0]]


def test_rows_near_their_end_draft_less_and_are_counted_as_far():
    found = Guesses.counted([trace_of((1, (1,), 2, False), (0, (), 1, False))], COMB)
    assert found.reached == [1, 0]
    assert found.shares[0] == [0.0, 1.0, 0.0]


def test_rounds_of_chains_are_left_out():
    chain = Trace()
    chain.record(drafted=2, accepted=2, committed=3)
    assert Guesses.counted([chain], COMB).reached == [0, 0]


def test_a_longer_chain_is_no_tree():
    """Calibration has measured the lengths of chains; a promise does not overrule it."""
    certain = Guesses([[0.9], [0.9]], [9, 9])
    tree, promised = best_tree(certain, Survival([]), FLAT, TreeLimits(9), rows=1, beat=1.1)
    assert (tree, promised) == (None, 1.1)


def test_what_was_recorded_comes_back():
    entry = {"shares": [[0.5, 0.2]], "reached": [9]}
    assert Guesses.recorded(entry) == Guesses([[0.5, 0.2]], [9])
    assert list(Guesses.recorded(None).grown(5, is_comb=True)) == []


def all_trees(nodes, guesses):
    """Every tree of so many nodes that the guesses allow."""
    for parents in itertools.product(*(range(node + 1) for node in range(nodes))):
        tree = Tree(tuple(parents))
        if tree.depth <= len(guesses) and all(
            needed <= len(allowed) for needed, allowed in zip(tree.guesses, guesses, strict=False)
        ):
            yield tree


@pytest.mark.parametrize("is_comb", [True, False])
def test_each_size_holds_the_most_tokens_that_a_tree_of_it_can(is_comb):
    for tree in SHARES.grown(5, is_comb=is_comb):
        others = [
            other
            for other in all_trees(tree.num_nodes, SHARES.shares)
            if not is_comb or is_a_comb(other)
        ]
        best = max(map(SHARES.expected_tokens, others))
        assert SHARES.expected_tokens(tree) == pytest.approx(best)
    assert not is_comb or is_a_comb(tree)


def is_a_comb(tree):
    return all(parent == 0 or parent - 1 in tree.spine for parent in tree.parents)


def test_trees_grow_by_one_node_until_nothing_is_left():
    sizes = [tree.num_nodes for tree in SHARES.grown(99, is_comb=True)]
    assert sizes == [1, 2, 3, 4, 5]  # three guesses, and two behind the first
    assert len(list(SHARES.grown(99, is_comb=False))) == 3 + 3 * 2


def test_guesses_that_were_never_right_get_no_node():
    never = Guesses([[0.5, 0.0, 0.3]], [10])
    assert [tree.num_nodes for tree in never.grown(9, is_comb=True)] == [1]


def test_tokens_of_a_tree_are_one_and_the_chances_of_its_nodes():
    assert SHARES.expected_tokens(Tree.chain(2)) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    assert SHARES.expected_tokens(Tree.comb([2, 2])) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.7)
    assert SHARES.expected_tokens(Tree((0, 0, 2))) == pytest.approx(1 + 0.5 + 0.2 + 0.2 * 0.4)


def chain_speedup(survived, costs, rows=1):
    return max(predicted_speedup(survived, n, costs, rows) for n in (1, 2))


@pytest.mark.parametrize("copied", [0.0, 0.3])
def test_cheap_nodes_make_a_tree_and_its_promise_is_that_of_its_tokens(copied):
    survived = Survival([0.5, 0.2], copied, [0.8] if copied else ())
    chain = chain_speedup(survived, FLAT)
    tree, promised = best_tree(SHARES, survived, FLAT, TreeLimits(16), rows=1, beat=chain)
    assert is_a_comb(tree)
    assert tree.num_nodes > 2
    assert promised > chain * LEAST_GAIN
    if not copied:
        tokens = SHARES.expected_tokens(tree)
        cost = tree.depth * 2.0 + FLAT.verify_ms[tree.num_nodes + 1]
        assert promised == pytest.approx(tokens * 20.0 / cost)


def test_dear_nodes_leave_the_chain():
    dear = ForwardCosts(20.0, 2.0, {width: 20.0 * width for width in range(1, 18)})
    chain = chain_speedup(Survival([0.5, 0.2]), dear)
    tree, promised = best_tree(SHARES, Survival([]), dear, TreeLimits(16), rows=1, beat=chain)
    assert tree is None
    assert promised == chain


def test_no_nodes_are_no_tree():
    tree, _ = best_tree(SHARES, Survival([]), FLAT, TreeLimits(0), rows=1, beat=0.1)
    assert tree is None


def test_heads_that_guess_at_once_pay_one_step():
    deep = Guesses([[0.6, 0.4], [0.6], [0.6]], [9, 9, 9])
    slow = ForwardCosts(20.0, 12.0, dict.fromkeys(range(1, 18), 20.0))
    one_by_one, _ = best_tree(deep, Survival([]), slow, TreeLimits(4), rows=1, beat=0.1)
    heads = dataclasses.replace(slow, drafts_at_once=True)
    at_once, _ = best_tree(deep, Survival([]), heads, TreeLimits(4), rows=1, beat=0.1)
    assert one_by_one.depth < at_once.depth == 3


def beside(chain, survivals, guesses, costs, rows):
    limits = TreeLimits(8)
    return tree_beside(chain, survivals, guesses=guesses, costs=costs, limits=limits, rows=rows)


def test_a_tree_may_pay_beside_copies_that_do_not_pay_beside_the_chain():
    """From three positions on a verification costs 26: of a tree the copies come along."""
    costs = ForwardCosts(20.0, 0.01, {1: 20.0, 2: 20.0, **dict.fromkeys(range(3, 18), 26.0)})
    survived = Survival([0.35], 0.3, [0.9, 0.2, 0.1])
    guesses = Guesses([[0.35, 0.3, 0.3]], [100])
    length, copies = best_lengths(survived, costs, (1, 3), rows=16)
    assert (length, copies) == (1, 1)
    chain = Drafting.chain(length, survived.copying(copies), costs, rows=16)
    assert beside(chain, [survived.copying(copies)], guesses, costs, 16) is None
    found = beside(chain, map(survived.copying, range(4)), guesses, costs, 16)
    assert (found.copies, found.parents) == (3, [0, 0, 0])
    assert found.predicted_speedup > chain.predicted_speedup * LEAST_GAIN
    assert found.tau == pytest.approx(0.7 * 1.95 + 0.3 * 2.2)


def test_a_tree_that_promises_less_than_no_drafts_is_none():
    """Rounds without drafts cost more than the plain step where features are taken from them."""
    costs = ForwardCosts(20.0, 19.0, dict.fromkeys(range(1, 18), 28.0))
    still = Drafting.chain(0, Survival([0.5]), costs)
    guesses = Guesses([[0.5, 0.3]], [100])
    tree = beside(still, [Survival([])], guesses, costs, 1)
    assert still.predicted_speedup < tree.predicted_speedup < 1
    assert beside(NOTHING, [Survival([])], guesses, costs, 1) is None
