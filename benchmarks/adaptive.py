"""Lengths that adapt against every fixed one, by batch size and context, on this machine.

`python -m benchmarks.adaptive`. In each cell the arms decode behind the same prompts in turn; a
prompt is read once and its row is taken back to it before each arm. The costs that the choice rests
on are measured in the cell before. Acceptance begins as it was evaluated, as in a service (a pair
that is given by its folders has none), and is learned on the way. Prints how near the lengths that
adapt come to the best fixed ones and writes JSON named after the machine.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import any_pair
from benchmarks.measuring import Budget, Groups, table, within
from draftsmith import provenance
from draftsmith.artifacts import write_json
from draftsmith.corpus.chat import make_chat
from draftsmith.decoding import (
    DraftModelProposer,
    Engine,
    FixedLengths,
    LengthPolicy,
    Lengths,
    LookupFirstProposer,
    Request,
    SamplingParams,
    Trace,
)
from draftsmith.decoding.batch import Batch
from draftsmith.decoding.ngrams import NgramIndex
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.acceptance import in_turn
from draftsmith.evaluation.adaptive import AdaptiveLengths
from draftsmith.evaluation.any_pair import LOOKUP_LENGTH, prompts_of
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.cost_model import Survival
from draftsmith.evaluation.profiling import Grid, round_costs
from draftsmith.evaluation.timing import Timings, speed_ratio, timed

SHORT = 0  # a context of the prompts as they are
CELLS = tuple(itertools.product((1, 4, 16), (SHORT, 1000)))  # rows, context
NONE = Lengths(0, 0)
FIXED = (NONE, *(Lengths(*each) for each in itertools.product((1, 2, 3), (0, LOOKUP_LENGTH))))
LIMIT = Lengths(draft=4, copy=8)
GOAL = 0.95  # of the tokens/s of the best fixed lengths
ADAPTIVE = "adaptive"
_MOST_GROUPS, _TURNS = 12, 2
_SEED = 0
_LOG = logging.getLogger(__name__)


class Switch:
    """A policy that does what the arm whose turn it is does."""

    limit = LIMIT

    def __init__(self) -> None:
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
        pair: Target and draft.
        prompts: Token ids of each row.
        tokens: Of an answer, on average over the rows.
    """

    def __init__(self, pair: Contestants, prompts: list[list[int]], tokens: int) -> None:
        self._switch = Switch()
        self._draft = DraftModelProposer(pair.draft.model, pair.draft.token_ids)
        self._num_wanted = tokens * len(prompts)
        most = (max(LIMIT) + 1) * (tokens + 1)  # of one row, were everything accepted
        self._engine = Engine(
            pair.target,
            LookupFirstProposer(self._draft, self._switch),
            max_rows=len(prompts),
            draft_length=max(LIMIT),
        )
        self._engine.open(max(map(len, prompts)) + most, prefill_chunk=None)
        params = SamplingParams(max_new_tokens=most)
        self._engine.submit([Request(str(i), ids, params) for i, ids in enumerate(prompts)])
        self._engine.step()

    def rewind(self, policy: LengthPolicy) -> None:
        """Take all rows back to their prompts, and let a policy decide from here on."""
        self._switch.policy = policy
        batch = self._engine._batch
        for row in batch.rows:
            del row.token_ids[len(row.request.prompt_ids) :]
            row.trace, row.ngrams = Trace(), NgramIndex()
        self._draft.observe(batch)

    def decode(self) -> int:
        """Decode until the rows hold so many tokens together; returns how many."""
        committed = 0
        while committed < self._num_wanted:
            committed += sum(len(event.token_ids) for event in self._engine.step())
        return committed

    @property
    def rounds(self) -> list[tuple[int, bool]]:
        """What every row proposed in every round: how many tokens, and whether they were copies."""
        traces = [row.trace for row in self._engine._batch.rows]
        return [each for t in traces for each in zip(t.drafted, t.from_text, strict=True)]


def deepened(prompts: list[list[int]], context: int) -> list[list[int]]:
    """Prompts behind others: the last `context` tokens of so many that they are that long."""
    if context == SHORT:
        return prompts
    texts = []
    for start in range(len(prompts)):
        text: list[int] = []
        for step in itertools.count():
            text = prompts[(start - step) % len(prompts)] + text
            if len(text) >= context:
                break
        texts.append(text[-context:])
    return texts


@dataclass(frozen=True)
class Cell:
    """One batch size and context.

    Attributes:
        pair: Target and draft.
        prompts: Of that context.
        rows: Requests decoded together.
        tokens: Of an answer.
        survival: What the lengths that adapt believe at first.
    """

    pair: Contestants
    prompts: list[list[int]]
    rows: int
    tokens: int
    survival: Survival

    def measure(self, until: float) -> dict[str, Any]:
        """All arms in turn on one group of prompts after another, until about that time."""
        middle = sorted(map(len, self.prompts))[len(self.prompts) // 2] + self.tokens // 2
        grid = Grid((self.rows,), (middle,), max(LIMIT) + 1)
        costs = round_costs(self.pair.target, self.pair.draft.model, grid)
        policies: dict[str, LengthPolicy] = {named(each): FixedLengths(each) for each in FIXED}
        policies[ADAPTIVE] = AdaptiveLengths(costs, LIMIT, self.survival)
        groups = within(self.prompts, self.rows, until=until, at_least=1, at_most=_MOST_GROUPS)
        timings, rounds = self._timed(policies, groups)
        best = max(map(named, FIXED), key=lambda name: timings[name].tokens_per_s)
        plain = timings[named(NONE)]
        return {
            "rows": self.rows,
            "context": middle,
            "tokens_per_s": {name: timing.tokens_per_s for name, timing in timings.items()},
            "best_fixed": best,
            "best_fixed_over_none": asdict(speed_ratio(timings[best], plain, seed=_SEED)),
            "adaptive_over_best_fixed": asdict(
                speed_ratio(timings[ADAPTIVE], timings[best], seed=_SEED)
            ),
            "adaptive_over_none": asdict(speed_ratio(timings[ADAPTIVE], plain, seed=_SEED)),
            **used(rounds),
            "costs": asdict(costs.at(rows=self.rows, context=middle)),
        }

    def _timed(
        self, policies: Mapping[str, LengthPolicy], groups: Groups
    ) -> tuple[dict[str, Timings], list[tuple[int, bool]]]:
        """Timings by arm, and the rounds of the one that adapts; the first turn is not counted."""
        timings = {name: Timings() for name in policies}
        rounds: list[tuple[int, bool]] = []
        for index, group in enumerate(groups):
            rewound = Rewound(self.pair, group, self.tokens)
            turns = range(0 if index == 0 else 1, _TURNS + 1)
            for turn in turns:
                for name in list(policies)[:: 1 if turn % 2 else -1]:
                    rewound.rewind(policies[name])
                    seconds, tokens = timed(rewound.decode)
                    if turn:
                        timings[name].seconds.append(seconds)
                        timings[name].tokens.append(tokens)
                        rounds += rewound.rounds if name == ADAPTIVE else []
        return timings, rounds


def named(lengths: Lengths) -> str:
    """Name of the arm."""
    return f"draft {lengths.draft}, copy {lengths.copy}"


def used(rounds: Sequence[tuple[int, bool]]) -> dict[str, float]:
    """What the lengths that adapt came to."""
    return {
        "share_proposing_nothing": sum(n == 0 for n, _ in rounds) / len(rounds),
        "share_copying": sum(is_copy for _, is_copy in rounds) / len(rounds),
        "mean_proposed": sum(n for n, _ in rounds) / len(rounds),
    }


def shown(report: Mapping[str, Any]) -> str:
    """The cells as text."""
    ratio = "{mean:.2f} ({low:.2f} to {high:.2f})"
    rows = [
        [
            f"{cell['rows']} x {cell['context']}",
            cell["best_fixed"],
            ratio.format(**cell["best_fixed_over_none"]),
            ratio.format(**cell["adaptive_over_best_fixed"]),
            ratio.format(**cell["adaptive_over_none"]),
            f"{cell['share_proposing_nothing']:.2f}",
            "met" if cell["adaptive_over_best_fixed"]["mean"] >= GOAL else "missed",
        ]
        for cell in report["cells"]
    ]
    head = (
        *("rows x context", "best fixed", "over none", "adaptive over it", "adaptive over none"),
        *("proposing nothing", f"{GOAL:.2f}"),
    )
    device = report["device"]
    return f"{device['name']}, {device['threads']} threads\n{table(head, rows)}"


def main(argv: Sequence[str] | None = None, tokens: int = 24) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    chosen = any_pair.arguments(
        argv, description=__doc__.partition("\n")[0], kind=ADAPTIVE, budget=480.0
    )
    budget = Budget(chosen.budget)
    try:
        target, draft, survival = any_pair.load(chosen)
        chat = make_chat(target.model, target.tokenizer)
        asked = prompts_of(chosen.prompts)
        prompts = in_turn([(p.prompt_id, p.domain, chat.prompt_ids(p)) for p in asked])
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    pair = Contestants(target.model, draft, (), LOOKUP_LENGTH)
    report: dict[str, Any] = {
        "schema": 1,
        "device": provenance.device(),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "pair": {"target": target.identity.digest, "draft": draft.manifest.digest},
        "budget_s": chosen.budget,
        "cells": [],
        "provenance": provenance.collect(_SEED),
    }
    path = chosen.out or any_pair.place(ADAPTIVE, report["device"])
    for index, (rows, context) in enumerate(CELLS):
        cell = Cell(pair, deepened(prompts, context), rows, tokens, survival)
        report["cells"].append(cell.measure(budget.share(1 / (len(CELLS) - index))))
        write_json(path, report)
        _LOG.info("rows=%d context=%d left_s=%.0f", rows, context, budget.left_s)
    sys.stdout.write(f"{shown(report)}\nwritten: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
