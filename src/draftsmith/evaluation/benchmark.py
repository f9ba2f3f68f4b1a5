"""One recipe's entry of reports/benchmark.json: the measured speed of a pair on this device.

Chooses the draft length on a few calibration prompts and confirms it on others, interleaved with
the same engine without drafts and with Transformers.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.artifacts import digest_json, read_json, short, write_json
from draftsmith.corpus.rollouts import Rollout
from draftsmith.decoding import Lengths
from draftsmith.decoding.trace import block_efficiency
from draftsmith.drafts.joined import LoadedDraft
from draftsmith.evaluation.acceptance import in_turn
from draftsmith.evaluation.adaptive import AdaptiveLengths
from draftsmith.evaluation.arms import Contestants, EngineArm
from draftsmith.evaluation.cost_model import RoundCosts, Survival, best_lengths
from draftsmith.evaluation.guesses import (
    NO_GUESSES,
    NOTHING,
    Drafting,
    Guesses,
    TreeLimits,
    tree_beside,
)
from draftsmith.evaluation.profiling import (
    Grid,
    costs_from_json,
    forward_costs,
    interpolated,
    measured_widths,
    round_costs,
)
from draftsmith.evaluation.settings import BenchmarkConfig
from draftsmith.evaluation.timing import Arm, Timings, interleave, speed_ratio

_LOG = logging.getLogger(__name__)

_SCHEMA = 4  # of finished phases; since 4 trees stand beside chains in every batch
_COST_CONTEXT = 160  # tokens before an isolated forward: about the middle of a short answer
# Name -> the arm above and the arm below the line.
_RATIOS = {
    "engine_vs_generate": ("gamma_0", "transformers_generate"),
    "speculative_vs_generate": ("speculative", "transformers_generate"),
    "speculative_vs_assisted": ("speculative", "transformers_assisted"),
    "speculative_vs_prompt_lookup": ("speculative", "prompt_lookup"),
    "speculative_vs_chain": ("speculative", "chain"),
}

Phase = Callable[[], dict[str, Any]]
OnPhase = Callable[[str, int], Callable[[int], None]]


def silent(_phase: str, _total: int) -> Callable[[int], None]:
    """No progress."""
    return lambda _done: None


@dataclass(frozen=True)
class PairBench:
    """Measures one pair.

    Attributes:
        config: The benchmark section.
        contestants: The pair.
        prompts: Token ids of eval prompts; the first `calibration_prompts` calibrate, the others
            confirm.
        partial: Folder of finished phases of exactly this measurement; None keeps nothing.
        on_phase: Called with a name and a number of groups when a phase starts; returns what is
            called as they finish.
    """

    config: BenchmarkConfig
    contestants: Contestants
    prompts: Sequence[list[int]]
    partial: Path | None = None
    on_phase: OnPhase = silent

    def run(self, survival: Survival, guesses: Guesses = NO_GUESSES) -> dict[str, Any]:
        """The entry, identity left out.

        Args:
            survival: Measured by the evaluate stage at this temperature.
            guesses: Likewise; none leaves trees out.
        """
        calibration = self._phase("calibration", self._calibrate)
        length = int(calibration["draft_length"])
        costs = self._phase("costs", self._costs)
        forward = costs_from_json(costs)
        chain = Drafting.chain(length, survival, forward)
        tree = tree_beside(
            chain, [survival], guesses=guesses, costs=forward, limits=self._tree_limits, rows=1
        )
        served = tree or chain
        confirmed = self._phase("confirmation", lambda: self._confirm(calibration, served))
        if not confirmed.pop("drafts_tree"):
            served = chain
        batches = self._phase("batches", lambda: self._batches(served, survival, guesses))
        return {
            "draft_length": served.length,
            "tree": served.parents,
            "chain_length": length,
            "lookup_length": self.contestants.lookup_length,
            "temperature": self.contestants.temperature,
            "calibration": calibration["lengths"],
            **confirmed,
            "batch": batches["batches"],
            "cost": costs,
            "expected_tau": served.tau,
            "predicted_speedup": served.predicted_speedup,
        }

    @property
    def _tree_limits(self) -> TreeLimits:
        return TreeLimits(self.config.max_tree_nodes, self.contestants.draft.drafts_combs)

    def _phase(self, name: str, measure: Phase) -> dict[str, Any]:
        """A phase's result, from an earlier run that was killed if it is there."""
        if self.partial is None:
            return measure()
        kept = self.partial / f"{name}.json"
        if kept.exists():
            _LOG.info("phase=%s state=found", name)
        else:
            write_json(kept, measure())
        return read_json(kept)

    @property
    def _calibration_prompts(self) -> list[list[list[int]]]:
        return [[ids] for ids in self.prompts[: self.config.calibration_prompts]]

    @property
    def _confirmation_prompts(self) -> list[list[int]]:
        rest = list(self.prompts[self.config.calibration_prompts :]) or list(self.prompts)
        return rest[: self.config.prompts]

    def _calibrate(self) -> dict[str, Any]:
        """Tokens/s by draft length, and which length of each contestant is best."""
        tokens, groups = self.config.calibration_tokens, self._calibration_prompts
        arms = {
            f"engine-{n}": self.contestants.engine(n, max_new_tokens=tokens)
            for n in range(self.config.max_draft_length + 1)
        } | {
            f"assisted-{n}": self.contestants.assisted(n, max_new_tokens=tokens)
            for n in self._assisted_lengths
        }
        timings = interleave(arms, groups, self.on_phase("calibration", len(groups)))
        speeds = {name: timing.tokens_per_s for name, timing in timings.items()}
        lengths = [
            {
                "draft_length": n,
                "tokens_per_s": speeds[f"engine-{n}"],
                "speedup": speeds[f"engine-{n}"] / speeds["engine-0"],
            }
            for n in range(1, self.config.max_draft_length + 1)
        ]
        best = max(lengths, key=lambda entry: entry["tokens_per_s"])
        assisted = max(self._assisted_lengths, key=lambda n: speeds[f"assisted-{n}"], default=None)
        return {
            "lengths": lengths,
            "draft_length": best["draft_length"],
            "assisted_length": assisted,
        }

    @property
    def _assisted_lengths(self) -> tuple[int, ...]:
        """Of assisted generation; none where Transformers cannot draft with the draft."""
        return self.config.assisted_lengths if self.contestants.draft.is_causal_lm else ()

    def _confirm(self, calibration: Mapping[str, Any], served: Drafting) -> dict[str, Any]:
        """The arms on other prompts, interleaved; the ratios are the evidence."""
        tokens, length = self.config.max_new_tokens, int(calibration["draft_length"])
        pair = self.contestants
        assisted = calibration["assisted_length"]
        speculative = pair.engine(served.length, max_new_tokens=tokens, tree=served.tree)
        arms: dict[str, Arm] = {
            "gamma_0": pair.engine(0, max_new_tokens=tokens),
            "speculative": speculative,
            "prompt_lookup": pair.prompt_lookup(
                pair.lookup_length or length, max_new_tokens=tokens
            ),
            "transformers_generate": pair.transformers(max_new_tokens=tokens),
        }
        chain = pair.engine(length, max_new_tokens=tokens)
        if served.tree is not None:
            arms["chain"] = chain
        if assisted is not None:
            arms["transformers_assisted"] = pair.assisted(assisted, max_new_tokens=tokens)
        groups = [[ids] for ids in self._confirmation_prompts]
        timings = interleave(arms, groups, self.on_phase("confirmation", len(groups)))
        traces = speculative.traces
        drafts_tree = served.tree is not None
        if drafts_tree and self._ratio(timings, "speculative", "chain")["mean"] < 1:
            # Measured slower than it promised to be faster.
            timings["tree"], timings["speculative"] = timings["speculative"], timings.pop("chain")
            drafts_tree, traces = False, chain.traces
        entries: dict[str, Any] = {
            name: {"tokens_per_s": timing.tokens_per_s} for name, timing in timings.items()
        }
        if drafts_tree:
            entries["chain"]["draft_length"] = length
        elif served.tree is not None:
            tau = block_efficiency(speculative.traces[1:])
            entries["tree"] |= served.record() | {"tau": tau}
        if assisted is not None:
            entries["transformers_assisted"]["draft_length"] = assisted
        return {
            "drafts_tree": drafts_tree,
            "tau": block_efficiency(traces[1:]),  # without the untimed first run
            "speedup": self._ratio(timings, "speculative", "gamma_0"),
            "arms": entries,
            "ratios": {
                name: self._ratio(timings, *arms_of_ratio)
                for name, arms_of_ratio in _RATIOS.items()
                if timings.keys() >= set(arms_of_ratio)
            },
        }

    def _ratio(self, timings: Mapping[str, Timings], fast: str, slow: str) -> dict[str, Any]:
        return asdict(speed_ratio(timings[fast], timings[slow], seed=self.config.seed))

    @property
    def _max_width(self) -> int:
        """Positions of the widest verification: of the largest tree beside the longest copy."""
        copied = self.contestants.lookup_length
        return max(self.config.max_draft_length, self.config.max_tree_nodes + copied) + 1

    def _costs(self) -> dict[str, Any]:
        longest = max(self.config.max_draft_length, self.contestants.lookup_length)
        widths = {*range(1, longest + 2), *measured_widths(self._max_width)}
        self.on_phase("isolated forwards", 1)
        costs = interpolated(
            forward_costs(
                self.contestants.target,
                self.contestants.draft.model,
                sorted(widths),
                batch_size=1,
                context=_COST_CONTEXT,
                repeats=self.config.repeats,
            ),
            self._max_width,
        )
        return {
            "target_step_ms": costs.target_step_ms,
            "draft_step_ms": costs.draft_step_ms,
            "verify_ms": {str(width): value for width, value in costs.verify_ms.items()},
            "cost_ratio": costs.cost_ratio,
            "drafts_at_once": costs.drafts_at_once,
        }

    def _batches(self, single: Drafting, survival: Survival, guesses: Guesses) -> dict[str, Any]:
        """Our engine at several batch sizes: without drafts, with what is offered, and adapting."""
        done = self.on_phase("batches", len(self.config.batch_sizes))
        entries = []
        for size in self.config.batch_sizes:
            offered, arms = self._batch_arms(size, single, survival, guesses)
            timings = interleave(arms, self._batch_groups(size) * 2)
            speeds = {name: timing.tokens_per_s for name, timing in timings.items()}
            entries.append({"batch_size": size, **_batch_entry(offered, speeds)})
            done(1)
        return {"batches": entries}

    def _batch_arms(
        self, size: int, single: Drafting, survival: Survival, guesses: Guesses
    ) -> tuple[dict[str, Drafting], dict[str, EngineArm]]:
        """What may be drafted at this batch size, and the arms; the plain one is always there.

        A single row drafts what was chosen for it, which is what adapting would find; at other
        sizes what was measured of acceptance and costs decides what is offered.
        """
        pair, tokens, offers = self.contestants, self.config.batch_tokens, [single]
        arms = {"plain": pair.engine(0, max_new_tokens=tokens, batch_size=size)}
        if size > 1:
            grid = Grid((size,), (_COST_CONTEXT,), self._max_width)
            costs = round_costs(pair.target, pair.draft.model, grid)
            limit = Lengths(self.config.max_draft_length, pair.lookup_length)
            offers = self._offers(size, costs, limit, survival, guesses)
            trees = [offer.tree for offer in offers if offer.tree is not None]
            adaptive = AdaptiveLengths(costs, limit, survival, trees, guesses)
            arms["adaptive"] = pair.adaptive(adaptive, max_new_tokens=tokens, batch_size=size)
        offered = {offer.kind: offer for offer in offers if offer.length}
        for name, offer in offered.items():
            copying = dataclasses.replace(pair, lookup_length=offer.copies)
            arms[name] = copying.engine(
                offer.length, max_new_tokens=tokens, batch_size=size, tree=offer.tree
            )
        return offered, arms

    def _offers(
        self,
        size: int,
        costs: RoundCosts,
        limit: Lengths,
        survival: Survival,
        guesses: Guesses,
    ) -> list[Drafting]:
        """The chain that promises most in a batch, and the tree that promises clearly more."""
        at = costs.at(rows=size, context=_COST_CONTEXT)
        length, copies = best_lengths(survival, at, limit, rows=size)
        chain = NOTHING
        if length:
            chain = Drafting.chain(length, survival.copying(copies), at, rows=size)
        copying = map(survival.copying, range(limit.copy + 1))
        tree = tree_beside(
            chain, copying, guesses=guesses, costs=at, limits=self._tree_limits, rows=size
        )
        return [chain] if tree is None else [chain, tree]

    def _batch_groups(self, size: int) -> list[list[list[int]]]:
        """One or two full batches; prompts come again where there are too few."""
        prompts = self._confirmation_prompts
        count = max(1, min(2, len(prompts) // size))
        cycle = [prompts[i % len(prompts)] for i in range(count * size)]
        return [cycle[i * size : (i + 1) * size] for i in range(count)]


def _batch_entry(offered: Mapping[str, Drafting], speeds: Mapping[str, float]) -> dict[str, Any]:
    """What is served at a batch size: the faster of what was offered.

    Args:
        offered: By name of its arm.
        speeds: Tokens/s by arm.
    """
    plain = speeds["plain"]
    best = max(offered, key=speeds.__getitem__, default="plain")
    entry = {
        **offered.get(best, NOTHING).record(),
        "tokens_per_s": speeds[best],
        "baseline_tokens_per_s": plain,
        "speedup": speeds[best] / plain,
    }
    for name in offered.keys() - {best}:
        entry["slower"] = offered[name].record() | {"tokens_per_s": speeds[name]}
    if "adaptive" in speeds:
        entry["adaptive_tokens_per_s"] = speeds["adaptive"]
        entry["adaptive_speedup"] = speeds["adaptive"] / plain
    return entry


@dataclass(frozen=True)
class Bench:
    """Measures the drafts of one target on the prompts of the eval split.

    Attributes:
        config: The benchmark section.
        target: Live target in its serving dtype.
        stop_ids: Ids that end a response.
        rollouts: The corpus' eval split, for its prompts.
        on_phase: As in `PairBench`.
    """

    config: BenchmarkConfig
    target: PreTrainedModel
    stop_ids: tuple[int, ...]
    rollouts: Sequence[Rollout]
    on_phase: OnPhase = silent

    def measure(
        self,
        draft: LoadedDraft,
        evaluated: Mapping[str, Any],
        *,
        device: Mapping[str, Any],
        partial: Path,
    ) -> dict[str, Any]:
        """One recipe's entry.

        Args:
            draft: Joined to the target.
            evaluated: The recipe's entry of reports/evaluation.json.
            device: build/device.json.
            partial: Folder for finished phases, emptied of this measurement's at the end.
        """
        identity = {key: evaluated[key] for key in ("recipe", "draft_digest", "pair_digest")}
        prompts = list({r.prompt_id: (r.domain, r.prompt_ids) for r in self.rollouts}.items())
        ordered = in_turn([(name, domain, ids) for name, (domain, ids) in prompts])
        lookup_length = int(evaluated["lookup_length"])
        accepted = [evaluated[name] for name in ("survival", "copied")]
        settings = [asdict(self.config), lookup_length, dict(device)]
        guesses = evaluated.get("guesses", {})
        # The costs' widths follow from the configuration: another rule for them is another key.
        key = digest_json([_SCHEMA, identity, *settings, ordered, accepted, guesses])
        folder = partial / short(key)
        contestants = Contestants(self.target, draft, self.stop_ids, lookup_length)
        bench = PairBench(self.config, contestants, ordered, folder, self.on_phase)
        measured = Guesses.recorded(guesses.get(str(contestants.temperature)))
        entry = bench.run(Survival.recorded(evaluated, contestants.temperature), measured)
        shutil.rmtree(folder, ignore_errors=True)
        return identity | entry
