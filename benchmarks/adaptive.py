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
from functools import partial
from typing import Any

from benchmarks import any_pair
from benchmarks.measuring import Budget, table, within
from benchmarks.rewound import NONE, Rewound, Turn, take_turns
from draftsmith import provenance
from draftsmith.artifacts import write_json
from draftsmith.corpus.chat import make_chat
from draftsmith.decoding import FixedLengths, LengthPolicy, Lengths, Trace
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.acceptance import in_turn
from draftsmith.evaluation.adaptive import AdaptiveLengths
from draftsmith.evaluation.any_pair import LOOKUP_LENGTH, prompts_of
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.cost_model import Survival
from draftsmith.evaluation.profiling import Grid, round_costs
from draftsmith.evaluation.timing import speed_ratio

SHORT = 0  # a context of the prompts as they are
CELLS = tuple(itertools.product((1, 4, 16), (SHORT, 1000)))  # rows, context
FIXED = (NONE, *(Lengths(*each) for each in itertools.product((1, 2, 3), (0, LOOKUP_LENGTH))))
LIMIT = Lengths(draft=4, copy=8)
GOAL = 0.95  # of the tokens/s of the best fixed lengths
ADAPTIVE = "adaptive"
_MOST_GROUPS, _TURNS = 12, 2
_SEED = 0
_LOG = logging.getLogger(__name__)


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
        timings, traces = take_turns(partial(self._arms, policies), groups, turns=_TURNS)
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
            **used(traces[ADAPTIVE]),
            "costs": asdict(costs.at(rows=self.rows, context=middle)),
        }

    def _arms(
        self, policies: Mapping[str, LengthPolicy], group: list[list[int]]
    ) -> dict[str, Turn]:
        rewound = Rewound(self.pair, group, tokens=self.tokens, limit=LIMIT)
        return {name: Turn(rewound, policy) for name, policy in policies.items()}


def named(lengths: Lengths) -> str:
    """Name of the arm."""
    return f"draft {lengths.draft}, copy {lengths.copy}"


def used(traces: Sequence[Trace]) -> dict[str, float]:
    """What the lengths that adapt came to."""
    rounds = [each for t in traces for each in zip(t.drafted, t.from_text, strict=True)]
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
