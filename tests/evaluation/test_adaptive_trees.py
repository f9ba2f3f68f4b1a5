"""Trees beside chains: simulated rounds in which it is known how often which guess is right."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from draftsmith.decoding import ChosenTree, Lengths, Tree
from draftsmith.evaluation.adaptive import AdaptiveLengths
from draftsmith.evaluation.adaptive_trees import AdaptiveTrees
from draftsmith.evaluation.cost_model import Survival
from draftsmith.evaluation.guesses import Guesses
from tests.evaluation.test_adaptive import CAP, LIMIT, Simulation, machine, mixed

FIRST = 0.6  # of the first guess at the first position, when that was evaluated
BESIDE = (0.0, 0.4, 0.2, 0.1)  # of the others by rank, where the first is wrong
PRIOR = Survival([FIRST, FIRST**2])
DRAFT_SCALE = 0.1


def evaluated(beside=BESIDE):
    """What the evaluate stage counted."""
    firsts = [FIRST * 0.95**place for place in range(LIMIT.draft)]
    shares = [[first, *((1 - first) * share for share in beside[1:])] for first in firsts]
    return Guesses(shares, [100] * LIMIT.draft)


*_, TREE = evaluated().grown(12, is_comb=True)


def costs():
    return machine(DRAFT_SCALE, longest=TREE.num_nodes)


def policy_with(*trees, guesses=None):
    return AdaptiveLengths(costs(), LIMIT, PRIOR, trees, guesses or evaluated())


@dataclass(frozen=True)
class Always:
    """The same tree in every round."""

    tree: Tree
    limit: Lengths = LIMIT
    trees: ChosenTree = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "trees", ChosenTree(self.tree.num_nodes, self.tree))

    def choose(self, _batch, _copies, _caps):
        return Lengths(self.tree.depth, 0)

    def observe(self, _batch):
        pass


class TreeSimulation(Simulation):
    """Rounds that draft a tree where the policy says so; `beside` is by rank.

    Attributes:
        shapes: How often each tree was drafted; None is a chain, or nothing.
    """

    def __init__(self, acceptances, *, context, beside=BESIDE):
        super().__init__(costs(), acceptances, context=context)
        self.beside, self.shapes = beside, Counter()

    def _round(self, chosen, could_copy, chance):
        tree = self.policy.trees.tree
        self.shapes[tree] += 1
        if tree is None:
            return super()._round(chosen, could_copy, chance)
        expected = 0.0
        for row, conditional in zip(self.batch.rows, self.conditional, strict=True):
            ranks = self._path(tree, conditional, chance)
            row.trace.record(
                drafted=tree.depth, accepted=len(ranks), committed=len(ranks) + 1, ranks=ranks
            )
            reach = [1.0]
            for node, parent in enumerate(tree.parents):
                reach.append(reach[parent] * self._share(tree, node, conditional))
            expected += sum(reach)
        lengths = [(tree.depth, False)] * len(self.batch)
        return expected, self.costs.round_ms(tree.depth, tree=tree), lengths

    def _share(self, tree, node, conditional):
        first = conditional[tree.depths[node + 1] - 1]
        return (1 - first) * self.beside[tree.ranks[node]] if tree.ranks[node] else first

    def _path(self, tree, conditional, chance):
        place, ranks = 0, []
        while True:
            drawn, nodes = chance.random(), range(tree.num_nodes)
            for node in (node for node in nodes if tree.parents[node] == place):
                drawn -= self._share(tree, node, conditional)
                if drawn < 0:
                    place = node + 1
                    ranks.append(tree.ranks[node])
                    break
            else:
                return tuple(ranks)


# ------------------------------------------------------------------------------------ arithmetic


def test_rows_as_they_were_evaluated_are_expected_to_accept_what_the_guesses_promise():
    guesses = evaluated()
    trees = AdaptiveTrees([TREE], guesses, LIMIT.draft)
    firsts = [shares[0] for shares in guesses.shares]
    found = dict(trees.expected([firsts, firsts], [[CAP, CAP], [0, CAP]], deepest=LIMIT.draft))
    assert len(found) > 3
    assert TREE in found
    for tree, (accepted, accepted_by_one) in found.items():
        assert max(tree.guesses) > 1
        assert tree == Tree(TREE.parents[: tree.num_nodes])
        assert accepted_by_one == pytest.approx(guesses.expected_tokens(tree) - 1)
        assert accepted == pytest.approx(2 * accepted_by_one)


def test_a_row_near_its_end_counts_as_far_as_it_may_draft_and_so_does_the_tree():
    guesses = evaluated()
    trees = AdaptiveTrees([TREE], guesses, LIMIT.draft)
    firsts = [shares[0] for shares in guesses.shares]
    cut = TREE.up_to(1)
    found = dict(trees.expected([firsts] * 2, [[1, 0]], deepest=1))
    assert found[cut] == [pytest.approx(guesses.expected_tokens(cut) - 1)]
    assert {tree.depth for tree in found} == {1}


def test_trees_with_guesses_that_were_not_evaluated_are_left_out():
    few = Guesses([[0.5, 0.2], [0.5]], [9, 9])
    assert few.covers(Tree.comb([2, 1]))
    for tree in (Tree.comb([3]), Tree.comb([2, 2]), Tree.chain(3)):
        assert not few.covers(tree)
    assert AdaptiveTrees([TREE], few, 5).chosen.max_nodes == 0
    assert AdaptiveTrees([TREE, Tree.comb([2])], few, 5).chosen.max_nodes == 2


def test_a_tree_that_is_deeper_than_the_longest_draft_is_cut():
    trees = AdaptiveTrees([TREE], evaluated(), 1)
    assert trees.chosen.max_nodes == TREE.up_to(1).num_nodes


# --------------------------------------------------------------------------------- what is chosen


@functools.cache
def rates(cell):
    """The adaptive policy, every chain and every size of the tree in a cell."""
    rows, context = cell

    def play(policy, rounds, skipped=0):
        world = TreeSimulation(mixed(rows), context=context)
        return world.play(policy, rounds, skipped=skipped).rate

    chains = [Always(Tree.chain(length)) for length in range(1, LIMIT.draft + 1)]
    sizes = [Always(Tree(TREE.parents[:number])) for number in range(2, TREE.num_nodes + 1)]
    plain = costs().at(rows=rows, context=context).round_ms(0)
    fixed = [rows / plain, *(play(policy, 1) for policy in (*chains, *sizes))]
    return play(policy_with(TREE), 400, skipped=100), fixed[: len(chains) + 1], fixed


@pytest.mark.parametrize("cell", [(1, 128), (1, 8192), (4, 1024), (16, 128), (64, 128), (64, 8192)])
def test_cells_of_batch_and_context_come_near_their_best_chain_or_tree(cell):
    found, _, fixed = rates(cell)
    assert found >= 0.95 * max(fixed)


def test_some_cells_are_for_trees_and_others_for_chains():
    """Otherwise the test above would show little."""
    _, chains, fixed = rates((1, 128))
    assert max(fixed) > 1.1 * max(chains)
    _, chains, fixed = rates((64, 128))
    assert max(fixed) == max(chains)


def proposed(policy, *, rows, context):
    """The tree that is chosen, or the length of the chain."""
    world = TreeSimulation([FIRST] * rows, context=context)
    chosen = policy.choose(world.batch, [0] * rows, [CAP] * rows)
    assert policy.trees.tree is None or policy.trees.tree.depth == chosen.draft
    return policy.trees.tree or chosen.draft


def test_as_batch_and_context_grow_trees_shrink_to_chains_and_these_to_nothing():
    policy = policy_with(TREE)
    cells = [(1, 128), (4, 128), (16, 128), (64, 128), (64, 1024), (64, 8192)]
    found = [proposed(policy, rows=rows, context=context) for rows, context in cells]
    sizes = [each.num_nodes if isinstance(each, Tree) else each for each in found]
    assert sorted(sizes, reverse=True) == sizes
    assert isinstance(found[0], Tree)
    assert any(isinstance(each, int) and each > 0 for each in found)
    assert found[-1] == 0
    assert proposed(policy, rows=1, context=128) == found[0]


def test_rows_near_their_ends_draft_the_tree_as_far_as_they_may():
    policy = policy_with(TREE)
    world = TreeSimulation([FIRST] * 2, context=128)
    policy.choose(world.batch, [0, 0], [CAP, CAP])
    assert policy.trees.tree.depth > 1
    chosen = policy.choose(world.batch, [0, 0], [1, 1])
    assert (policy.trees.tree, chosen) == (TREE.up_to(1), Lengths(1, 0))


# -------------------------------------------------------------------------------- what is learned


def settled(guesses, beside, *, rounds, skipped=100):
    """Which shapes a policy drafts where guesses beside the first are right so often."""
    policy = policy_with(TREE, guesses=guesses)
    world = TreeSimulation([FIRST] * 16, context=128, beside=beside)
    world.play(policy, skipped)
    world.shapes.clear()
    world.play(policy, rounds, seed=1)
    return world.shapes


GOOD, NEVER = (0.0, 0.95, 0.03, 0.01), (0.0, 0.0, 0.0, 0.0)


def test_a_tree_that_keeps_its_promise_is_kept():
    shapes = settled(evaluated(GOOD), GOOD, rounds=300)
    assert shapes[None] < 0.1 * shapes.total()


def test_a_tree_whose_other_guesses_are_never_right_is_dropped_and_tried_again_rarely():
    shapes = settled(evaluated(GOOD), NEVER, rounds=2000)
    assert 0 < shapes.total() - shapes[None] < 0.05 * shapes.total()


def test_first_guesses_of_a_tree_teach_what_those_of_a_chain_do():
    policy = AdaptiveLengths(costs(), LIMIT, Survival([0.3, 0.09]), [TREE], evaluated(GOOD))
    world, chance = TreeSimulation([0.9] * 4, context=128, beside=GOOD), random.Random(0)
    for _ in range(100):
        policy.choose(world.batch, [0] * 4, [CAP] * 4)
        policy.trees.tree, world.policy = TREE, policy
        world._round(None, None, chance)
        policy.observe(world.batch)
    learned = policy._drafts.conditional()
    assert learned[0] == pytest.approx(0.9, abs=0.08)
    assert learned[1] == pytest.approx(0.9 * 0.95, abs=0.1)


def test_a_spine_that_ends_before_a_path_beside_it_says_nothing_of_what_lies_behind():
    """Two guesses and one behind the second: where the first is right, nothing more was drafted."""
    tree = Tree((0, 0, 2))
    policy = policy_with(tree)
    world = TreeSimulation([FIRST], context=128)
    before = policy._drafts.conditional()
    policy.trees.tree = tree
    world.batch.rows[0].trace.record(drafted=2, accepted=1, committed=2, ranks=(0,))
    policy.observe(world.batch)
    after = policy._drafts.conditional()
    assert after[0] > before[0]
    assert policy._drafts._trials[1] == 0
    assert policy._trees._expected == 0


def test_rounds_that_were_cut_off_teach_nothing_of_guesses_behind_the_end():
    policy = policy_with(TREE)
    world = TreeSimulation([FIRST], context=128)
    policy.trees.tree = TREE
    ranks = (0, 0, 1)
    world.batch.rows[0].trace.record(drafted=4, accepted=3, committed=1, ranks=ranks)
    policy.observe(world.batch)
    assert policy._trees._expected == policy._trees._observed == 0
    assert policy._drafts._trials[:2] == [1, 0]
