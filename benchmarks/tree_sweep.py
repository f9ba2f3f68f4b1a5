"""One draft's trees against its chains, by batch size: what each is expected to give, and gives.

How often each guess of the draft is right is counted on some prompts, as the evaluate stage does;
trees are grown from that, and decode behind other prompts in turn with chains and with the engine
that has no draft. Nothing is copied from the text: trees are judged themselves. Verifications are
also timed alone, as chains and as trees of the same number of positions. Finished parts are kept.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Budget, within
from benchmarks.rewound import NONE, Rewound, Turn, take_turns
from draftsmith.artifacts import read_json, write_json
from draftsmith.decoding import FixedLengths, Lengths, SlotModel, Trace, Tree
from draftsmith.decoding.batch import to_device
from draftsmith.decoding.features import FeatureReader
from draftsmith.decoding.trace import block_efficiency
from draftsmith.evaluation.acceptance import DecodingPlan, decode
from draftsmith.evaluation.any_pair import GUESSES
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.cost_model import ForwardCosts, Rounds, Survival, speedup_of
from draftsmith.evaluation.guesses import Guesses, served_trees
from draftsmith.evaluation.profiling import IsolatedForwards, forward_costs, reader_beside
from draftsmith.evaluation.settings import EvaluationConfig
from draftsmith.evaluation.timing import Timings, median_ms, speed_ratio

BATCH_SIZES = (1, 4, 16)
CHAINS = (1, 2, 3)
NODES = (2, 3, 4, 6, 8, 12, 16)
TEMPERATURE = 0.7  # of the arms that sample, at the first batch size
TOKENS = 24  # of an answer, on average over the rows
PLAIN = "none"
_SAMPLED_PART = 0.3  # of the time of a batch size
_MOST_GROUPS, _MOST_SAMPLED = 40, 16
_REPEATS = 7
_SEED = 0
_NOTHING_COPIED = Survival(())
_LOG = logging.getLogger(__name__)

Parts = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """What an arm drafts.

    Attributes:
        length: Draft positions.
        tree: Of the drafts; None is a chain.
        tau: Expected tokens of a round.
    """

    length: int
    tree: Tree | None
    tau: float

    @property
    def nodes(self) -> int:
        """Drafts of a row."""
        return self.length if self.tree is None else self.tree.num_nodes

    @property
    def name(self) -> str:
        """Of the arm."""
        return f"chain {self.length}" if self.tree is None else f"tree {self.nodes}"


@dataclass(frozen=True)
class Sweep:
    """One draft.

    Attributes:
        pair: Target and draft.
        counting: How guesses are counted.
        prompts: Token ids; the first ones count guesses, the arms decode behind the others.
        work: Where finished parts of exactly this measurement are kept.
        tokens: Of an answer, on average over the rows.
    """

    pair: Contestants
    counting: EvaluationConfig
    prompts: Sequence[list[int]]
    work: Path
    tokens: int

    def run(self, budget: Budget) -> Parts:
        """Guesses, every batch size, and the best tree where guesses are drawn."""
        guesses = Guesses.recorded(self._kept("guesses", lambda: asdict(self._count())))
        shapes = self._shapes(guesses)
        batches = []
        for index, rows in enumerate(BATCH_SIZES):
            until = budget.share(1 / (len(BATCH_SIZES) - index + _SAMPLED_PART))
            part = partial(self._batch, rows, shapes, until)
            batches.append(self._kept(f"batch-{rows}", part))
            _LOG.info("rows=%d left_s=%.0f", rows, budget.left_s)
        part = partial(self._sampled, batches[0], shapes, budget.share(1.0))
        sampled = self._kept("sampled", part)
        return {"guesses": asdict(guesses), "batches": batches, "sampled": sampled}

    def _kept(self, name: str, measure: Callable[[], Parts]) -> Parts:
        path = self.work / f"{name}.json"
        if not path.exists():
            write_json(path, measure())
        return read_json(path)

    def _count(self) -> Guesses:
        config = self.counting
        comb = Tree.comb(config.guesses or GUESSES)
        trees = served_trees(comb, config.batch_size)
        plan = DecodingPlan(
            comb.depth, 0, config.max_new_tokens, config.batch_size, (), config.seed, trees
        )
        chosen = [(str(i), ids) for i, ids in enumerate(self.prompts[: config.guess_prompts])]
        results = decode(self.pair.target, self.pair.draft, chosen, temperature=0.0, plan=plan)
        return Guesses.counted([result.trace for result in results.values()], comb)

    def _shapes(self, guesses: Guesses) -> list[Shape]:
        """Chains, and trees of all sizes that the guesses allow."""
        draft = self.pair.draft
        longest = min(len(guesses.shares), draft.max_draft_length)
        chains = (Tree.chain(length) for length in CHAINS if length <= longest)
        grown = guesses.grown(max(NODES), is_comb=draft.drafts_combs)
        trees = (tree for tree in grown if tree.num_nodes in NODES and max(tree.guesses) > 1)
        return [
            *(Shape(chain.depth, None, guesses.expected_tokens(chain)) for chain in chains),
            *(Shape(tree.depth, tree, guesses.expected_tokens(tree)) for tree in trees),
        ]

    def _batch(self, rows: int, shapes: Sequence[Shape], until: float) -> Parts:
        """All arms at one batch size, until about that time."""
        prompts = self.prompts[self.counting.guess_prompts :]
        context = int(statistics.median(map(len, prompts))) + self.tokens // 2
        target, draft = self.pair.target, self.pair.draft.model
        costs = forward_costs(
            target,
            draft,
            [shape.nodes + 1 for shape in shapes],
            batch_size=rows,
            context=context,
            repeats=_REPEATS,
        )
        trees = [shape.tree for shape in shapes if shape.tree is not None]
        alone = tree_ms(self.pair, trees, rows=rows, context=context)
        groups = within(prompts, rows, until=until, at_least=1, at_most=_MOST_GROUPS)
        timings, traces = take_turns(partial(self._turns, self.pair, shapes), groups)
        arms = {
            shape.name: arm(shape, costs, rows)
            | measured(timings, traces, shape.name)
            | {"alone_ms": alone.get(shape.name)}
            for shape in shapes
        }
        return {
            "batch_size": rows,
            "context": context,
            "num_turns": len(timings[PLAIN].seconds),
            "costs": asdict(costs),
            "plain_tokens_per_s": timings[PLAIN].tokens_per_s,
            "arms": arms,
            **compared(timings, arms),
        }

    def _turns(
        self, pair: Contestants, shapes: Sequence[Shape], group: list[list[int]]
    ) -> dict[str, Turn]:
        """The arms behind these prompts: without a draft, and every shape."""
        plain = Rewound(pair, group, tokens=self.tokens, limit=NONE)
        limit = Lengths(max(shape.length for shape in shapes), 0)
        nodes = max(shape.nodes for shape in shapes)
        drafting = Rewound(pair, group, tokens=self.tokens, limit=limit, max_nodes=nodes)
        return {PLAIN: Turn(plain, FixedLengths(NONE))} | {
            shape.name: Turn(drafting, FixedLengths(Lengths(shape.length, 0)), shape.tree)
            for shape in shapes
        }

    def _sampled(self, batch: Parts, shapes: Sequence[Shape], until: float) -> Parts:
        """The best tree of a batch size beside its best chain where the temperature is above 0."""
        names = batch["best_chain"], batch["best_tree"]
        chosen = [shape for shape in shapes if shape.name in names]
        pair = dataclasses.replace(self.pair, temperature=TEMPERATURE)
        prompts = self.prompts[self.counting.guess_prompts :]
        rows = int(batch["batch_size"])
        groups = within(prompts, rows, until=until, at_least=1, at_most=_MOST_SAMPLED)
        timings, traces = take_turns(partial(self._turns, pair, chosen), groups)
        arms = {shape.name: measured(timings, traces, shape.name) for shape in chosen}
        return {
            "temperature": TEMPERATURE,
            "batch_size": rows,
            "arms": arms,
            **compared(timings, arms),
        }


def arm(shape: Shape, costs: ForwardCosts, rows: int) -> Parts:
    """What is known of an arm before it decodes."""
    rounds = Rounds(shape.tau, shape.length, shape.tree)
    return {
        "nodes": shape.nodes,
        "depth": shape.length,
        "tree": [] if shape.tree is None else list(shape.tree.parents),
        "expected_tau": shape.tau,
        "verify_ms": costs.verify_ms[shape.nodes + 1],
        "predicted_speedup": speedup_of(rounds, _NOTHING_COPIED, costs, rows),
    }


def measured(
    timings: Mapping[str, Timings], traces: Mapping[str, Sequence[Trace]], name: str
) -> Parts:
    """What an arm came to."""
    return {"tau": block_efficiency(traces[name]), "speedup": _ratio(timings, name, PLAIN)}


def compared(timings: Mapping[str, Timings], arms: Mapping[str, Parts]) -> Parts:
    """Trees against the fastest chain, which the ratios of each tree are over."""
    speeds = {name: timings[name].tokens_per_s for name in arms}
    chains = [name for name in arms if name.startswith("chain")]
    trees = [name for name in arms if name.startswith("tree")]
    best = max(chains, key=speeds.__getitem__)
    over = {name: _ratio(timings, name, best) for name in trees}
    return {
        "best_chain": best,
        "best_tree": max(trees, key=speeds.__getitem__, default=None),
        "over_chain": over,
    }


def _ratio(timings: Mapping[str, Timings], fast: str, slow: str) -> Parts:
    return asdict(speed_ratio(timings[fast], timings[slow], seed=_SEED))


@torch.inference_mode()
def tree_ms(
    pair: Contestants, trees: Sequence[Tree], *, rows: int, context: int
) -> dict[str, Parts]:
    """Verifications alone, taken in turn, milliseconds: by name of the tree.

    As a chain of as many positions, as a tree, and as one of which a path is then moved into its
    place in every row.
    """
    width = max((tree.num_nodes + 1 for tree in trees), default=1)
    forwards = IsolatedForwards(SlotModel(pair.target), rows=rows, context=context, width=width)
    reader = reader_beside(pair.draft.model, rows=rows, slots=context + width)
    actions: dict[str, Callable[[], None]] = {}
    for tree in trees:
        nodes = tree.num_nodes
        actions[f"chain {nodes}"] = partial(forwards.run, nodes + 1, reader)
        actions[f"tree {nodes}"] = partial(forwards.run, tree, reader)
        moves = farthest_moves(tree, rows=rows, context=context)
        actions[f"moved {nodes}"] = partial(_run_and_move, forwards, tree, reader, moves)
    times = median_ms(actions, _REPEATS)
    kinds = ("chain", "tree", "moved")
    numbers = [tree.num_nodes for tree in trees]
    return {f"tree {n}": {kind: times[f"{kind} {n}"] for kind in kinds} for n in numbers}


def _run_and_move(
    forwards: IsolatedForwards,
    tree: Tree,
    reader: FeatureReader | None,
    moves: list[tuple[int, int, int]],
) -> None:
    """A verification, and the moves of the path that it accepts."""
    forwards.run(tree, reader)
    if moves:
        rows, sources, destinations = to_device(moves, forwards.model.device).T
        forwards.model.move_slots(rows, sources, destinations)
        if reader is not None:
            reader.move_slots(rows, sources, destinations)


def farthest_moves(tree: Tree, *, rows: int, context: int) -> list[tuple[int, int, int]]:
    """Row, slot and new slot of the path with the most nodes that are not in their place."""
    paths = (
        [(node + 1, depth) for depth, node in enumerate(prefix, start=1) if node + 1 != depth]
        for prefix in tree.prefixes
    )
    path = max(paths, key=len)
    return [(row, context + place, context + depth) for row in range(rows) for place, depth in path]
