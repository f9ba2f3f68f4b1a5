"""The decoder against what it replaces, on this machine: `make bench`.

One run, arms in turn on the same prompts, every rival at its own best length and with the best of
Transformers' attentions and caches. Prints ratios with 95 % intervals over groups of prompts and
writes JSON named after the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import any_pair
from benchmarks.measuring import Budget, table, usable, within
from draftsmith import provenance
from draftsmith.artifacts import write_json
from draftsmith.corpus.chat import make_chat
from draftsmith.decoding import Lengths
from draftsmith.decoding.trace import Trace, position_counts
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.acceptance import copied_rounds, in_turn
from draftsmith.evaluation.adaptive import AdaptiveLengths
from draftsmith.evaluation.any_pair import LOOKUP_LENGTH, prompts_of
from draftsmith.evaluation.arms import Contestants, EngineArm, Rival
from draftsmith.evaluation.cost_model import Survival, predicted_speedup
from draftsmith.evaluation.profiling import Grid, forward_costs, round_costs
from draftsmith.evaluation.timing import (
    Arm,
    Timings,
    forward_seconds,
    interleave,
    speed_ratio,
    timed,
)

# What each ratio is held to; they are goals of the project, not properties of a machine.
GOALS = {
    "engine over generate, batch 1": 0.97,
    "engine over generate, batch 16": 1.3,
    "speculative over assisted generation": 1.15,
    "speculative over Transformers' prompt lookup": 1.05,
    "32 requests together over one after another": 8.0,
    "measured speedup over prediction": 0.9,
}
MOST_OVERHEAD = 0.10  # of a round's time, outside model forwards
BATCH, MANY = 16, 32
PLAIN_RIVALS = {
    "generate, sdpa": Rival(),
    "generate, eager": Rival(attention="eager"),
    "generate, static": Rival(cache="static"),
}
DRAFT_LENGTHS, ASSISTED_LENGTHS, LOOKUP_LENGTHS = (1, 2, 3), (1, 2, 3), (2, 3, 5, 10)
ADAPTIVE_LIMIT = Lengths(draft=4, copy=8)
_SPECULATIVE_RIVALS = {
    "assisted": "assisted generation",
    "lookup": "Transformers' prompt lookup",
}
_CALIBRATION_PROMPTS = 5
_SEED = 0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokens:
    """Tokens of a request in each part of the run."""

    calibration: int = 32
    alone: int = 48
    batched: int = 32
    many: int = 96


@dataclass
class Bench:
    """The parts of the run on one pair.

    Attributes:
        pair: Stops where the target does.
        endless: The same pair without stop ids: every arm commits the same number of tokens, so
            that engines are compared and not their ways to end.
        prompts: Token ids, domains in turn.
        budget: Time.
        tokens: Sizes.
    """

    pair: Contestants
    endless: Contestants
    prompts: list[list[int]]
    budget: Budget
    tokens: Tokens

    def calibrate(self) -> dict[str, Any]:
        """The best length, attention and cache of everybody, on prompts of their own."""
        tokens = self.tokens.calibration
        prompts = self.prompts[:_CALIBRATION_PROMPTS]
        kinds = PLAIN_RIVALS | {
            f"{name} {length}, {attention}": Rival(attention, **{option: length})
            for attention in ("sdpa", "eager")
            for name, option, lengths in (
                ("assisted", "draft_length", self.assisted_lengths),
                ("lookup", "lookup_length", LOOKUP_LENGTHS),
            )
            for length in lengths
        }
        arms: dict[str, Arm] = {
            name: self.pair.transformers(rival, max_new_tokens=tokens)
            for name, rival in kinds.items()
        }
        arms |= {f"engine {n}": self.pair.engine(n, max_new_tokens=tokens) for n in DRAFT_LENGTHS}
        arms["engine adaptive"] = self.adaptive(1, tokens)
        working, _, refused = usable(arms, prompts[:1])
        groups = within(prompts, 1, until=self.budget.share(0.25), at_least=2, at_most=len(prompts))
        timings = interleave(working, groups)
        speeds = {name: timing.tokens_per_s for name, timing in timings.items()}
        best = {
            family: max(of_family, key=speeds.__getitem__)
            for family in ("generate", "assisted", "lookup", "engine")
            if (of_family := [name for name in speeds if name.startswith(family)])
        }
        rivals = {family: kinds[name] for family, name in best.items() if family != "engine"}
        return {"tokens_per_s": speeds, "best": best, "refused": refused, "rivals": rivals}

    @property
    def assisted_lengths(self) -> tuple[int, ...]:
        """None where Transformers cannot draft with the draft: a head reads the target's states."""
        return ASSISTED_LENGTHS if self.pair.draft.is_causal_lm else ()

    def adaptive(self, rows: int, tokens: int) -> EngineArm:
        """Our engine with lengths that adapt, its costs measured now."""
        grid = Grid((rows,), (self.context(tokens),), max(ADAPTIVE_LIMIT) + 1)
        costs = round_costs(self.pair.target, self.pair.draft.model, grid)
        policy = AdaptiveLengths(costs, ADAPTIVE_LIMIT, Survival(()))
        return self.pair.adaptive(policy, max_new_tokens=tokens, batch_size=rows)

    def context(self, tokens: int) -> int:
        """Tokens in the middle of a typical request."""
        return int(statistics.median(map(len, self.prompts))) + tokens // 2

    def alone(self, calibrated: Mapping[str, Any]) -> dict[str, Any]:
        """Batch 1: the best of everybody on other prompts, and the prediction of our own."""
        tokens, best = self.tokens.alone, calibrated["best"]
        lengths = [n for n in DRAFT_LENGTHS if f"engine {n}" in calibrated["tokens_per_s"]]
        fixed = max(lengths, key=lambda n: calibrated["tokens_per_s"][f"engine {n}"])
        engines = {
            "engine 0": self.pair.engine(0, max_new_tokens=tokens),
            f"engine {fixed}": self.pair.engine(fixed, max_new_tokens=tokens),
            "engine adaptive": self.adaptive(1, tokens),
        }
        rivals = {
            best[family]: self.pair.transformers(rival, max_new_tokens=tokens)
            for family, rival in calibrated["rivals"].items()
        }
        prompts = self.prompts[_CALIBRATION_PROMPTS:] or self.prompts
        groups = within(prompts, 1, until=self.budget.share(0.4), at_least=3, at_most=len(prompts))
        timings = interleave({**engines, **rivals}, groups)
        ours, plain = timings[best["engine"]], timings["engine 0"]
        speedup = speed_ratio(timings[f"engine {fixed}"].decoding, plain.decoding, seed=_SEED)
        predicted = self.prediction(fixed, engines[f"engine {fixed}"].traces, tokens)
        ratio = {key: value / predicted["speedup"] for key, value in asdict(speedup).items()}
        against = {
            f"speculative over {name}": _ratio(ours, timings[best[family]])
            for family, name in _SPECULATIVE_RIVALS.items()
            if family in best
        }
        return {
            "arms": _speeds(timings),
            "prediction": predicted | {"decode_speedup": asdict(speedup), "draft_length": fixed},
            "ratios": {
                "engine over generate, batch 1": _ratio(plain, timings[best["generate"]]),
                **against,
                "measured speedup over prediction": ratio | {"num_prompts": speedup.num_prompts},
            },
        }

    def prediction(self, length: int, traces: Sequence[Trace], tokens: int) -> dict[str, Any]:
        """From isolated forwards, and the survival in these very traces; nothing is fitted."""
        costs = forward_costs(
            self.pair.target,
            self.pair.draft.model,
            range(1, max(length, LOOKUP_LENGTH) + 2),
            batch_size=1,
            context=self.context(tokens),
            repeats=15,
        )
        copied = copied_rounds(traces, LOOKUP_LENGTH)
        drafted = position_counts(traces, length).survival
        survived = Survival(drafted, copied["share"], copied["survival"])
        return {
            "speedup": predicted_speedup(survived, length, costs),
            "survival": drafted,
            "copied": copied,
            "costs": asdict(costs),
        }

    def batched(self) -> dict[str, Any]:
        """The engine without drafts against `generate` of a padded batch."""
        tokens = self.tokens.batched
        arms: dict[str, Arm] = {
            name: self.endless.transformers(
                dataclasses.replace(rival, is_batched=True), max_new_tokens=tokens
            )
            for name, rival in PLAIN_RIVALS.items()
        }
        arms["engine 0"] = self.endless.engine(0, max_new_tokens=tokens, batch_size=BATCH)
        groups = within(self.prompts, BATCH, until=self.budget.share(0.4), at_least=3, at_most=9)
        timings = interleave(arms, groups)
        best = max(PLAIN_RIVALS, key=lambda name: timings[name].tokens_per_s)
        return {
            "arms": _speeds(timings),
            "best": best,
            "ratios": {
                "engine over generate, batch 16": _ratio(timings["engine 0"], timings[best])
            },
        }

    def many(self, rival: Rival) -> dict[str, Any]:
        """All requests at once against `generate`, one request after another."""
        tokens = self.tokens.many
        arms: dict[str, Arm] = {
            "one after another": self.endless.transformers(rival, max_new_tokens=tokens),
            "together": self.endless.engine(0, max_new_tokens=tokens, batch_size=MANY),
        }
        groups = within(self.prompts, MANY, until=self.budget.share(0.8), at_least=2, at_most=5)
        timings = interleave(arms, groups)
        ratio = _ratio(timings["together"], timings["one after another"])
        return {
            "arms": _speeds(timings),
            "ratios": {"32 requests together over one after another": ratio},
        }

    def overhead(self, length: int) -> dict[str, float]:
        """Share of the decoding time outside the forwards of target and draft."""
        models = [self.pair.target, self.pair.draft.model]
        shares = {}
        for rows in (1, BATCH):
            for n in (0, length):
                arm = self.pair.engine(n, max_new_tokens=self.tokens.batched, batch_size=rows)
                for is_warm in (False, True):
                    arm.start(self.prompts[:rows])
                    with forward_seconds(models) as spent:
                        seconds, _ = timed(arm.finish)
                    if is_warm:
                        shares[f"batch {rows}, draft {n}"] = 1 - sum(spent) / seconds
        return shares

    def run(self) -> dict[str, Any]:
        """Every part; the shortest last."""
        calibrated = self.calibrate()
        parts = {"calibration": {k: v for k, v in calibrated.items() if k != "rivals"}}
        _LOG.info("best=%s left_s=%.0f", calibrated["best"], self.budget.left_s)
        parts["alone"] = self.alone(calibrated)
        _LOG.info("part=alone left_s=%.0f", self.budget.left_s)
        parts["batched"] = self.batched()
        _LOG.info("part=batched left_s=%.0f", self.budget.left_s)
        parts["many"] = self.many(calibrated["rivals"]["generate"])
        _LOG.info("part=many left_s=%.0f", self.budget.left_s)
        shares = self.overhead(parts["alone"]["prediction"]["draft_length"])
        ratios = {
            name: value
            for part in ("alone", "batched", "many")
            for name, value in parts[part]["ratios"].items()
        }
        return {"ratios": ratios, "share_outside_forwards": shares, "parts": parts}


def _ratio(fast: Timings, slow: Timings) -> dict[str, Any]:
    return asdict(speed_ratio(fast, slow, seed=_SEED))


def _speeds(timings: Mapping[str, Timings]) -> dict[str, Any]:
    return {
        name: {"tokens_per_s": t.tokens_per_s, "median_tokens_per_s": t.median_tokens_per_s}
        for name, t in timings.items()
    }


def shown(report: Mapping[str, Any]) -> str:
    """The ratios as text."""
    rows = []
    for name, goal in GOALS.items():
        if name not in report["ratios"]:
            rows.append([name, "no such rival", "", f"{goal:.2f} or more", ""])
            continue
        found = report["ratios"][name]
        bounds = "{mean:.2f} ({low:.2f} to {high:.2f})".format(**found)
        met = "met" if found["mean"] >= goal else "missed"
        rows.append([name, bounds, str(found["num_prompts"]), f"{goal:.2f} or more", met])
    for name, share in report["share_outside_forwards"].items():
        met = "met" if share <= MOST_OVERHEAD else "missed"
        goal_text = f"{MOST_OVERHEAD:.2f} or less"
        rows.append([f"outside forwards, {name}", f"{share:.3f}", "1", goal_text, met])
    device = report["device"]
    best = ", ".join(report["parts"]["calibration"]["best"].values())
    head = ("ratio (95 %)", "measured", "groups", "goal", "")
    return (
        f"{device['name']}, {device['threads']} threads, torch {device['torch']}, "
        f"{report['dtype']}\nbest at batch 1: {best}\n{table(head, rows)}"
    )


def _report(arguments: argparse.Namespace, tokens: Tokens) -> dict[str, Any]:
    budget = Budget(arguments.budget)
    target, draft, _ = any_pair.load(arguments)
    chat = make_chat(target.model, target.tokenizer)
    named = [(p.prompt_id, p.domain, chat.prompt_ids(p)) for p in prompts_of(arguments.prompts)]
    pair = Contestants(target.model, draft, chat.stop_ids, LOOKUP_LENGTH)
    endless = dataclasses.replace(pair, stop_ids=())
    bench = Bench(pair, endless, in_turn(named), budget, tokens)
    return {
        "schema": 1,
        "device": provenance.device(),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "pair": {"target": target.identity.digest, "draft": draft.manifest.digest},
        "budget_s": arguments.budget,
        **bench.run(),
        "provenance": provenance.collect(_SEED),
    }


def main(argv: Sequence[str] | None = None, tokens: Tokens | None = None) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    arguments = any_pair.arguments(
        argv, description=__doc__.partition("\n")[0], kind="decoder", budget=480.0
    )
    try:
        report = _report(arguments, tokens or Tokens())
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    path = arguments.out or any_pair.place("decoder", report["device"])
    write_json(path, report)
    sys.stdout.write(f"{shown(report)}\nwritten: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
