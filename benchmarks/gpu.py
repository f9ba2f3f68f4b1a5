"""Speed of the decoder on an accelerator: `python -m benchmarks.gpu --shape 1b`.

Needs torch, Transformers and this repository (PYTHONPATH=src). Takes a real pair (`--target DIR
--draft DIR`), or random weights of a realistic shape with a stated acceptance (`--shape`), which
tell the cost of the systems and nothing of any draft. Prints a table and writes JSON after every
cell, the most informative cell first, so that a run that is cut short has said what matters. Runs
on a CPU too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Budget, table, usable, within
from benchmarks.synthetic import SHAPES, build_pair
from benchmarks.synthetic import prompts as random_prompts
from draftsmith import provenance
from draftsmith.artifacts import write_json
from draftsmith.corpus.chat import make_chat
from draftsmith.decoding import Lengths, SlotModel, graphed
from draftsmith.decoding.steps import BuildStep
from draftsmith.decoding.trace import accepted_fraction, block_efficiency, position_counts
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.acceptance import in_turn
from draftsmith.evaluation.adaptive import AdaptiveLengths
from draftsmith.evaluation.any_pair import LOOKUP_LENGTH, load_any_draft, prompts_of
from draftsmith.evaluation.arms import Contestants, EngineArm, Rival
from draftsmith.evaluation.cost_model import (
    ForwardCosts,
    RoundCosts,
    Survival,
    predicted_speedup,
)
from draftsmith.evaluation.profiling import forward_costs
from draftsmith.evaluation.timing import Arm, Timings, interleave, speed_ratio
from draftsmith.targets.loading import load_target

# (batch size, temperature): what is most worth knowing comes first.
CELLS = ((1, 0.0), (32, 0.0), (8, 0.0), (1, 0.8), (32, 0.8), (8, 0.8))
ASSISTED_LENGTHS = (2, 4, 6)
PLAIN = "engine, no draft"
GRAPHED = "engine, CUDA graphs"
UNGRAPHED = "engine, no draft, no CUDA graphs"
SYNTHETIC = (
    "random weights: system cost only; acceptance is built into the weights, not measured of a "
    "trained draft"
)
_LEAST_PASSES = 3
_MIN_CELL_S = 5.0
_TRIED_TOKENS = 4
_SEED = 0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        contestants: A pair.
        prompts: Token ids.
        lookup_length: Longest copy from the text of an adaptive arm; 0 where texts never repeat.
        description: What the report says of it.
        refused: What could not be done with it, and why.
    """

    contestants: Contestants
    prompts: list[list[int]]
    lookup_length: int
    description: dict[str, Any]
    refused: dict[str, str] = field(default_factory=dict)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path, help="folder of a target")
    parser.add_argument("--draft", type=Path, help="folder of a draft, or of any checkpoint")
    parser.add_argument("--prompts", type=Path, help="JSONL; default: the bundled eval prompts")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--acceptance", type=float, default=0.7, help="of the random weights")
    parser.add_argument("--budget", type=float, default=330.0, metavar="SECONDS")
    parser.add_argument("--passes", type=int, default=999, metavar="N", help="at most; least 3")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], metavar="T")
    parser.add_argument("--max-draft-length", type=int, default=8, metavar="N")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="with --shape")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("build/partial/gpu-benchmark.json"))
    arguments = parser.parse_args(argv)
    if (arguments.shape is None) == (arguments.target is None or arguments.draft is None):
        parser.error("pass either --target and --draft, or --shape")
    return arguments


def _subject(arguments: argparse.Namespace) -> Subject:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.shape is None:
        return _real(arguments, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    share = arguments.acceptance
    target, draft = build_pair(arguments.shape, share, device=device, dtype=dtype, seed=_SEED)
    prompts = random_prompts(target.config.vocab_size, 96, arguments.prompt_tokens, _SEED)
    description = {"shape": arguments.shape, "stated_acceptance": share, "note": SYNTHETIC}
    sizes = dict(zip(("target", "draft"), map(asdict, SHAPES[arguments.shape]), strict=True))
    return Subject(Contestants(target, draft, ()), prompts, 0, description | sizes)


def _real(arguments: argparse.Namespace, device: torch.device) -> Subject:
    target = load_target(arguments.target, dtype="auto", device=str(device))
    draft = load_any_draft(target, arguments.draft)
    chat = make_chat(target.model, target.tokenizer)
    named = [(p.prompt_id, p.domain, chat.prompt_ids(p)) for p in prompts_of(arguments.prompts)]
    description = {
        "target_digest": target.identity.digest,
        "draft_digest": draft.manifest.digest,
        "note": "a real pair: its own acceptance on real prompts",
    }
    contestants = Contestants(target.model, draft, chat.stop_ids)
    return Subject(contestants, in_turn(named), LOOKUP_LENGTH, description)


def steps_for(device: torch.device) -> BuildStep | None:
    """Captured steps where the device has them."""
    return graphed() if device.type == "cuda" else None


def with_graphs(subject: Subject) -> Subject:
    """The subject with captured steps, where device and models allow it."""
    pair = subject.contestants
    steps = steps_for(pair.target.device)
    if steps is None:
        return dataclasses.replace(subject, refused={GRAPHED: "no CUDA device"})
    captured = dataclasses.replace(pair, steps=steps)
    arms = {GRAPHED: captured.engine(1, max_new_tokens=_TRIED_TOKENS)}
    _, _, refused = usable(arms, subject.prompts[:1])
    kept = pair if refused else captured
    return dataclasses.replace(subject, contestants=kept, refused=refused)


@dataclass(frozen=True)
class Cell:
    """One batch size and temperature of a subject.

    Attributes:
        subject: What is measured.
        batch_size: Requests decoded together.
        longest: Draft lengths 1 to this are measured.
        max_new_tokens: Tokens of a request.
        most_passes: Passes over the arms, however much time is left; the least is 3.
    """

    subject: Subject
    batch_size: int
    longest: int
    max_new_tokens: int
    most_passes: int

    @property
    def context(self) -> int:
        """Tokens in the middle of a typical request."""
        typical = statistics.median(map(len, self.subject.prompts))
        return int(typical) + self.max_new_tokens // 2

    def costs(self) -> ForwardCosts:
        """Isolated forwards over 1 to `longest + 1` positions."""
        pair = self.subject.contestants
        return forward_costs(
            SlotModel(pair.target, pair.steps),
            SlotModel(pair.draft.model, pair.steps),
            range(1, max(self.longest, self.subject.lookup_length) + 2),
            batch_size=self.batch_size,
            context=self.context,
            repeats=9,
        )

    def engines(self, costs: ForwardCosts) -> dict[str, EngineArm]:
        """Our engine at every draft length, and with lengths that adapt."""
        pair = self.subject.contestants
        sizes = {"max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size}
        arms = {PLAIN: pair.engine(0, **sizes)}
        if pair.steps is not None:
            arms[UNGRAPHED] = dataclasses.replace(pair, steps=None).engine(0, **sizes)
        arms |= {f"engine, draft {n}": pair.engine(n, **sizes) for n in range(1, self.longest + 1)}
        table_of_costs = RoundCosts(
            (self.batch_size,), (self.context,), {(self.batch_size, self.context): costs}
        )
        for copy in sorted({0, self.subject.lookup_length}):
            limit = Lengths(self.longest, copy)
            policy = AdaptiveLengths(table_of_costs, limit, Survival(()))
            name = "engine, adaptive" + (", copies first" if copy else "")
            arms[name] = pair.adaptive(policy, **sizes)
        return arms

    def rivals(self) -> dict[str, Arm]:
        """Transformers: its assisted generation decodes one request at a time, and with no head."""
        pair, pad_to = self.subject.contestants, max(map(len, self.subject.prompts))
        kinds = {
            "transformers, eager": Rival(is_batched=True),
            _static_name(): Rival(cache="static", is_batched=True, pad_to=pad_to),
        }
        if self.batch_size == 1 and pair.draft.is_causal_lm:
            lengths = [n for n in ASSISTED_LENGTHS if n <= self.longest] or [1]
            kinds |= {f"transformers, assisted {n}": Rival(draft_length=n) for n in lengths}
        return {
            name: pair.transformers(rival, max_new_tokens=self.max_new_tokens)
            for name, rival in kinds.items()
        }


def _static_name() -> str:
    """Transformers compiles the step over a static cache on accelerators only."""
    compiled = "compiled" if torch.cuda.is_available() else "not compiled here"
    return f"transformers, static cache, {compiled}"


def measure(cell: Cell, until: float) -> dict[str, Any]:
    """All arms of a cell in turn, until about that time of `time.monotonic`."""
    costs = cell.costs()
    engines, prompts = cell.engines(costs), cell.subject.prompts
    groups = within(
        prompts,
        cell.batch_size,
        until=until,
        at_least=_LEAST_PASSES + 1,
        at_most=cell.most_passes + 1,
    )
    rivals, warm_up_s, refused = usable(cell.rivals(), next(groups))
    timings = interleave({**engines, **rivals}, groups)
    longest = engines[f"engine, draft {cell.longest}"].traces
    survived = Survival(position_counts(longest, cell.longest).survival)
    predictions = {PLAIN: 1.0} | {
        f"engine, draft {n}": predicted_speedup(survived, n, costs)
        for n in range(1, cell.longest + 1)
    }
    entries = []
    for name, timing in timings.items():
        entry = _entry(timing, timings[PLAIN], predictions.get(name))
        if name in engines:
            entry["tau"] = block_efficiency(engines[name].traces)
        entry["warm_up_s"] = warm_up_s.get(name, timing.warm_up_s)
        entries.append({"name": name, **entry})
    return {
        "batch_size": cell.batch_size,
        "temperature": cell.subject.contestants.temperature,
        "passes": len(timings[PLAIN].seconds),
        "context": cell.context,
        "costs": asdict(costs),
        "accepted_fraction": accepted_fraction(longest),
        "survival": survived.draft,
        "arms": entries,
        "captured": cell.subject.contestants.steps is not None,
        "refused": refused | cell.subject.refused,
    }


def _entry(timing: Timings, plain: Timings, predicted: float | None) -> dict[str, Any]:
    """Figures of an arm; the prediction is of decoding, so it is compared without the prefill."""
    entry: dict[str, Any] = {
        "median_tokens_per_s": timing.median_tokens_per_s,
        "speedup": asdict(speed_ratio(timing, plain, seed=_SEED)),
    }
    if predicted is not None:
        decoding = speed_ratio(timing.decoding, plain.decoding, seed=_SEED)
        entry |= {
            "predicted_speedup": predicted,
            "decode_speedup": asdict(decoding),
            "measured_over_predicted": decoding.mean / predicted,
        }
    return entry


def shown(cell: Mapping[str, Any]) -> str:
    """A cell as text."""
    if "arms" not in cell:
        return f"batch {cell['batch_size']}, temperature {cell['temperature']}: {cell['state']}"
    costs = cell["costs"]
    step = costs["target_step_ms"]
    widths = ", ".join(f"{w}: {ms / step:.2f}" for w, ms in costs["verify_ms"].items())
    rows = [
        [
            arm["name"],
            f"{arm['median_tokens_per_s']:.1f}",
            "{mean:.2f} ({low:.2f} to {high:.2f})".format(**arm["speedup"]),
            _optional(arm, "tau"),
            _optional(arm, "predicted_speedup"),
            f"{arm['decode_speedup']['mean']:.2f}" if "decode_speedup" in arm else "",
            _optional(arm, "measured_over_predicted"),
        ]
        for arm in cell["arms"]
    ]
    rows += [[name, reason, "", "", "", "", ""] for name, reason in cell["refused"].items()]
    head = ("arm", "tokens/s", "speedup (95 %)", "tau", "predicted", "decoding", "of predicted")
    return (
        f"batch {cell['batch_size']}, temperature {cell['temperature']}, {cell['passes']} passes, "
        f"accepted {cell['accepted_fraction']:.2f} of drafts of the longest length\n"
        f"T_1 {step:.2f} ms, T_draft {costs['draft_step_ms']:.2f} ms, T_verify / T_1 by width "
        f"{widths}\n{table(head, rows)}"
    )


def _optional(arm: Mapping[str, Any], key: str) -> str:
    return f"{arm[key]:.2f}" if key in arm else ""


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure cell by cell; the report so far is on disk after each."""
    budget = Budget(arguments.budget)
    subject = with_graphs(_subject(arguments))
    report: dict[str, Any] = {
        "schema": 1,
        "device": provenance.device(),
        "pair": subject.description,
        "max_new_tokens": arguments.max_new_tokens,
        "budget_s": arguments.budget,
        "cells": [],
        "provenance": provenance.collect(_SEED),
    }
    sys.stdout.write(f"{report['device']['name']}: {subject.description['note']}\n")
    asked = set(itertools.product(arguments.batch_sizes, arguments.temperatures))
    cells = [cell for cell in CELLS if cell in asked] + sorted(asked - set(CELLS))
    for index, (size, temperature) in enumerate(cells):
        at = dataclasses.replace(subject.contestants, temperature=temperature)
        cell = Cell(
            dataclasses.replace(subject, contestants=at),
            size,
            arguments.max_draft_length,
            arguments.max_new_tokens,
            max(_LEAST_PASSES, arguments.passes),
        )
        report["cells"].append(_measured(cell, budget, len(cells) - index))
        write_json(arguments.out, report)
        sys.stdout.write(f"\n{shown(report['cells'][-1])}\n")
        sys.stdout.flush()
    return report


def _measured(cell: Cell, budget: Budget, num_left: int) -> dict[str, Any]:
    """A cell, or why there is none."""
    temperature = cell.subject.contestants.temperature
    place = {"batch_size": cell.batch_size, "temperature": temperature}
    if budget.left_s < _MIN_CELL_S:
        return place | {"state": "not measured: the time was used up"}
    try:
        return measure(cell, budget.share(1 / num_left))
    except torch.OutOfMemoryError as error:
        return place | {"state": f"not measured: {str(error).partition(chr(10))[0]}"}
    finally:
        if torch.cuda.is_available():
            torch.compiler.reset()
            torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    arguments = _arguments(argv)
    try:
        run(arguments)
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"\nwritten: {arguments.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
