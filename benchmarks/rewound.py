"""Arms that take turns behind prompts which are read once.

Before each arm a row is taken back to its prompt. So rounds are timed and no prefill, every arm
decodes behind the same texts, and no row leaves the batch before the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.measuring import Groups
from draftsmith.decoding import (
    ChosenTree,
    Engine,
    FixedLengths,
    LengthPolicy,
    Lengths,
    LookupFirstProposer,
    NoProposer,
    Proposer,
    Request,
    SamplingParams,
    Trace,
    Tree,
)
from draftsmith.decoding.batch import Batch
from draftsmith.decoding.ngrams import NgramIndex
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.timing import Timings, timed

NONE = Lengths(0, 0)


class Switch:
    """A policy that does what the arm whose turn it is does."""

    def __init__(self, limit: Lengths) -> None:
        self.limit = limit
        self.policy: LengthPolicy = FixedLengths(NONE)

    def choose(self, batch: Batch, copies: Sequence[int], caps: Sequence[int]) -> Lengths:
        """The arm's choice; it knows of no copies longer than its own."""
        longest = self.policy.limit.copy
        return self.policy.choose(batch, [min(copy, longest) for copy in copies], caps)

    def observe(self, batch: Batch) -> None:
        """Tell the arm."""
        self.policy.observe(batch)


class Rewound:
    """Decodes behind the same prompts again and again.

    Args:
        pair: Target and draft, and the temperature; nothing ends an answer.
        prompts: Token ids of each row.
        tokens: Of an answer, on average over the rows.
        limit: Longest draft and copy; of none the engine has no draft at all.
        max_nodes: Of the largest tree.
    """

    def __init__(
        self,
        pair: Contestants,
        prompts: list[list[int]],
        *,
        tokens: int,
        limit: Lengths,
        max_nodes: int = 0,
    ) -> None:
        self._switch, self._trees = Switch(limit), ChosenTree(max_nodes)
        self._proposer: Proposer = NoProposer()
        if any(limit):
            draft = pair.draft.proposer(trees=self._trees)
            self._proposer = LookupFirstProposer(draft, self._switch)
        self._num_wanted = tokens * len(prompts)
        most = (max(limit) + 1) * (tokens + 1)  # of a row; every round commits one of each
        self._engine = Engine(
            pair.target, self._proposer, max_rows=len(prompts), draft_length=max(limit)
        )
        self._engine.open(max(map(len, prompts)) + most, prefill_chunk=None)
        params = SamplingParams(max_new_tokens=most, temperature=pair.temperature)
        self._engine.submit([Request(str(i), ids, params) for i, ids in enumerate(prompts)])
        self._engine.step()

    def rewind(self, policy: LengthPolicy, tree: Tree | None = None) -> None:
        """Take all rows back to their prompts, and let others decide from here on.

        Args:
            policy: Of lengths.
            tree: Shape of the drafts; None is a chain.
        """
        self._switch.policy, self._trees.tree = policy, tree
        batch = self._engine._batch
        for row in batch.rows:
            del row.token_ids[len(row.request.prompt_ids) :]
            row.trace, row.ngrams = Trace(), NgramIndex()
        self._proposer.observe(batch)

    def decode(self) -> int:
        """Decode until the rows hold so many tokens together; returns how many."""
        committed = 0
        while committed < self._num_wanted:
            committed += sum(len(event.token_ids) for event in self._engine.step())
        return committed

    @property
    def traces(self) -> list[Trace]:
        """Of all rows, since they were taken back."""
        return [row.trace for row in self._engine._batch.rows]


@dataclass(frozen=True)
class Turn:
    """What an arm decodes with."""

    rewound: Rewound
    policy: LengthPolicy
    tree: Tree | None = None


def take_turns(
    arms: Callable[[list[list[int]]], Mapping[str, Turn]], groups: Groups, *, turns: int = 1
) -> tuple[dict[str, Timings], dict[str, list[Trace]]]:
    """Time arms in alternating order on one group of prompts after another.

    Args:
        arms: The arms behind a group's prompts, by name.
        groups: Prompts decoded together.
        turns: Timed ones of each arm with a group; with the first group there is another before
            them.

    Returns:
        Timings and traces by arm.
    """
    timings: dict[str, Timings] = defaultdict(Timings)
    traces: dict[str, list[Trace]] = defaultdict(list)
    order = -1
    for index, group in enumerate(groups):
        behind = arms(group)
        for turn in range(0 if index == 0 else 1, turns + 1):
            order = -order
            for name in list(behind)[::order]:
                arm = behind[name]
                arm.rewound.rewind(arm.policy, arm.tree)
                seconds, tokens = timed(arm.rewound.decode)
                if turn:
                    timings[name].seconds.append(seconds)
                    timings[name].tokens.append(tokens)
                    traces[name] += arm.rewound.traces
    return timings, traces
