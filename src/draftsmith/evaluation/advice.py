"""When to speculate with a pair on this device, and how: the content of `advice.json`.

Costs are measured on a grid of batch sizes and contexts, workloads are priced with them, and
predictions are held against workloads that are really decoded. Their errors are the error bars.
Where no draft pays, another dtype or int8 weights may: they are measured beside.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.corpus.rollouts import Rollout
from draftsmith.decoding import Lengths
from draftsmith.errors import EvidenceError
from draftsmith.evaluation.alternatives import INT8, SCHEMES, AlternativeRun, pays_instead
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.benchmark import OnPhase, silent
from draftsmith.evaluation.ceilings import Ceilings, ModelSize, bound, measure_ceilings
from draftsmith.evaluation.cost_model import Survival
from draftsmith.evaluation.sweep import Axes, CostSweep
from draftsmith.evaluation.trials import (
    Trial,
    TrialRun,
    check,
    conversations,
    error_bar,
    plan_trials,
    summary,
)
from draftsmith.evaluation.workload import Advice, DeviceCosts, Workload, advise

_COST_SHARE = 0.3  # of the budget; what is left of it goes to the trials
_ALTERNATIVE_SHARE = 0.15
_ALTERNATIVE_TOKENS = 32
_FALLBACK = Lengths(1, 0)  # drafted on an alternative where nothing pays on the served target


@dataclass(frozen=True)
class Plan:
    """What is asked for.

    Attributes:
        batch_sizes: Rows in flight, ascending.
        contexts: Tokens of prompts, ascending.
        new_tokens: Tokens of answers.
        longest: Longest draft and copy.
        seconds: Budget.
    """

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    new_tokens: tuple[int, ...]
    longest: Lengths
    seconds: float


def advice_report(
    pair: Contestants,
    survivals: Mapping[float, Survival],
    rollouts: Sequence[Rollout],
    *,
    plan: Plan,
    folder: Path,
    on_phase: OnPhase = silent,
) -> dict[str, Any]:
    """Measure, price, check.

    Args:
        pair: Target and draft.
        survivals: Measured acceptance by temperature.
        rollouts: The target's greedy answers to real prompts, of which prompts of any length are
            made.
        plan: What is asked for.
        folder: Where finished measurements of exactly this pair on this device are kept.
        on_phase: As the benchmark stage's.

    Raises:
        EvidenceError: Acceptance was not measured.
    """
    _require_measured(survivals)
    drafted = min(plan.longest.draft, pair.draft.max_draft_length)
    plan = replace(plan, longest=plan.longest._replace(draft=drafted))
    end = time.monotonic() + plan.seconds
    target = pair.target
    axes = Axes(plan.batch_sizes, _held(plan, pair))
    cells = len(axes.rows) * len(axes.contexts)
    sweep = CostSweep(target, pair.draft, axes, max(plan.longest) + 1, folder)
    costs = sweep.run(seconds=_COST_SHARE * plan.seconds, on_done=on_phase("costs", cells))
    advices = [
        advise(workload, costs, survivals[workload.temperature], longest=plan.longest)
        for workload in _workloads(costs, plan.new_tokens, list(survivals))
    ]
    alternatives = _alternatives(pair, rollouts, advices, plan=plan, folder=folder).run(
        _lengths(advices, axes.rows),
        seconds=_ALTERNATIVE_SHARE * plan.seconds,
        on_done=on_phase("alternatives", len(SCHEMES)),
    )
    planned = plan_trials(costs, survivals, new_tokens=plan.new_tokens[0], longest=plan.longest)
    trials = check(
        _trials(pair, rollouts, folder),
        planned,
        seconds=end - time.monotonic(),
        on_done=on_phase("trials", len(planned)),
    )
    return _report(pair, costs, advices, alternatives, trials)


def _report(
    pair: Contestants,
    costs: DeviceCosts,
    advices: Sequence[Advice],
    alternatives: Sequence[Mapping[str, Any]],
    trials: Sequence[Trial],
) -> dict[str, Any]:
    error = error_bar(trials)
    ceilings = measure_ceilings(pair.target.device, pair.target.dtype)
    size = ModelSize.of(pair.target)
    return {
        "ceilings": asdict(ceilings),
        "target_size": asdict(size),
        "draft_size": asdict(ModelSize.of(pair.draft.model)),
        "served_dtype": str(pair.target.dtype).removeprefix("torch."),
        "measured_costs": _cost_records(costs, size, ceilings),
        "judging_ms": asdict(costs.judging),
        "alternatives": [dict(entry) for entry in alternatives],
        "prediction": summary(trials),
        "trials": [trial.record() for trial in trials],
        "workloads": [_advice_record(advice, error, costs, alternatives) for advice in advices],
    }


def _require_measured(survivals: Mapping[float, Survival]) -> None:
    if not survivals:
        raise EvidenceError(
            "pricing workloads",
            found="a pair without measured acceptance",
            expected="the evidence of an evaluation",
            remedy="run `dvc repro`, which attaches it to the pair",
        )


def _held(plan: Plan, pair: Contestants) -> tuple[int, ...]:
    """The contexts that both models hold, with an answer behind them."""
    limits = [
        int(getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 30))
        for model in (pair.target, pair.draft.model)
    ]
    most = min(limits) - max(plan.new_tokens) - max(plan.longest) - 1
    return tuple(sorted({min(context, most) for context in plan.contexts}))


def _workloads(
    costs: DeviceCosts, new_tokens: Sequence[int], temperatures: Sequence[float]
) -> Iterator[Workload]:
    rounds = costs.rounds
    for cell in itertools.product(rounds.rows, rounds.contexts, new_tokens, sorted(temperatures)):
        yield Workload(*cell)


def _trials(pair: Contestants, rollouts: Sequence[Rollout], folder: Path) -> TrialRun:
    return TrialRun(
        lambda temperature, copy: replace(
            pair, temperature=temperature, lookup_length=copy, stop_ids=()
        ),
        partial(conversations, rollouts),
        folder,
    )


def _alternatives(
    pair: Contestants,
    rollouts: Sequence[Rollout],
    advices: Sequence[Advice],
    *,
    plan: Plan,
    folder: Path,
) -> AlternativeRun:
    context = min(advice.workload.context for advice in advices)
    return AlternativeRun(
        replace(pair, temperature=0.0, stop_ids=()),
        partial(conversations, rollouts, context),
        rollouts,
        min(_ALTERNATIVE_TOKENS, max(plan.new_tokens)),
        folder,
    )


def _lengths(advices: Sequence[Advice], rows: Sequence[int]) -> dict[int, Lengths]:
    """Lengths to draft with on the alternatives, by the smallest and the largest batch size.

    Those that pay best behind short prompts.
    """
    found: dict[int, Lengths] = {}
    for size in sorted({rows[0], rows[-1]}):
        at_size = [advice for advice in advices if advice.workload.batch_size == size]
        first = min(at_size, key=lambda a: (a.workload.temperature, a.workload.context))
        found[size] = first.lengths if first.lengths.draft else _FALLBACK
    return found


def verdict(speedup: float, error: float) -> str:
    """Whether to speculate: yes and no only where the error bar leaves no doubt."""
    if speedup / (1 + error) > 1:
        return "speculate"
    return "about even" if speedup > 1 else "do not speculate"


def _advice_record(
    advice: Advice, error: float, costs: DeviceCosts, alternatives: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    told, instead = verdict(advice.speedup, error), None
    if advice.lengths.draft == 0:
        reading = _reading_share(advice, costs)
        instead = pays_instead(alternatives, advice.workload.batch_size, reading)
    if instead is not None:
        told = "quantise instead" if instead["scheme"] == INT8 else "change the dtype instead"
    return {
        **asdict(advice.workload),
        "verdict": told,
        "instead": instead,
        "draft_length": advice.lengths.draft,
        "copy_length": advice.lengths.copy,
        "speedup": advice.speedup,
        "tokens_per_s": advice.tokens_per_s,
        "plain_tokens_per_s": advice.plain_tokens_per_s,
        "break_even_alpha": advice.break_even,
        "free_positions": advice.free_positions,
    }


def _reading_share(advice: Advice, costs: DeviceCosts) -> float:
    """Share of a workload's time without speculation that goes into reading its prompts."""
    workload = advice.workload
    tokens = workload.batch_size * workload.new_tokens
    read = costs.prefill_at(rows=workload.batch_size, context=workload.context)
    return min(1.0, read.target * advice.plain_tokens_per_s / (1000 * tokens))


def _cost_records(costs: DeviceCosts, size: ModelSize, ceilings: Ceilings) -> list[dict[str, Any]]:
    return [
        {
            "batch_size": rows,
            "context": context,
            **asdict(cell),
            "prefill_ms": asdict(costs.prefill[rows, context]),
            "bound": {
                width: bound(size, ceilings, rows=rows, width=width, context=context)
                for width in cell.verify_ms
            },
        }
        for (rows, context), cell in costs.rounds.cells.items()
    ]
