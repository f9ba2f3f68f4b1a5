"""When to speculate with a pair on this device, and how: the content of `advice.json`.

Costs are measured on a grid of batch sizes and contexts, workloads are priced with them, and
predictions are held against workloads that are really decoded. Their errors are the error bars.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.corpus.rollouts import Rollout
from draftsmith.decoding import Lengths
from draftsmith.errors import EvidenceError
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.benchmark import OnPhase, silent
from draftsmith.evaluation.ceilings import Ceilings, ModelSize, bound, measure_ceilings
from draftsmith.evaluation.cost_model import Survival
from draftsmith.evaluation.sweep import Axes, CostSweep, Trial, TrialRun, check
from draftsmith.evaluation.workload import (
    Advice,
    DeviceCosts,
    Workload,
    advise,
    expected_speedup,
)

_COST_SHARE = 0.5  # of the budget; the rest checks the predictions
_WIDE_ERROR = 0.9  # share of the trials whose error is below the error bar
_TRIED_PLACES = (0.0, 0.4, 0.8)  # between the smallest and the largest, on a logarithmic scale
_TRIED_TOKENS = (1, 3)  # times the shortest answer


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
        rollouts: Real conversations, of which prompts of any length are made.
        plan: What is asked for.
        folder: Where finished measurements of exactly this pair on this device are kept.
        on_phase: As the benchmark stage's.

    Raises:
        EvidenceError: Acceptance was not measured.
    """
    _require_measured(survivals)
    end = time.monotonic() + plan.seconds
    target, draft = pair.target, pair.draft.model
    axes = Axes(plan.batch_sizes, _held(plan, pair))
    cells = len(axes.rows) * len(axes.contexts)
    sweep = CostSweep(target, draft, axes, max(plan.longest) + 1, folder)
    costs = sweep.run(seconds=_COST_SHARE * plan.seconds, on_done=on_phase("costs", cells))
    trials = _tried(
        pair, survivals, rollouts, costs=costs, plan=plan, folder=folder, end=end, on_phase=on_phase
    )
    error = error_bar(trials)
    ceilings = measure_ceilings(target.device, target.dtype)
    size = ModelSize.of(target)
    advices = [
        advise(workload, costs, survivals[workload.temperature], longest=plan.longest)
        for workload in _workloads(costs, plan.new_tokens, list(survivals))
    ]
    return {
        "ceilings": asdict(ceilings),
        "target_size": asdict(size),
        "draft_size": asdict(ModelSize.of(draft)),
        "measured_costs": _cost_records(costs, size, ceilings),
        "prediction": _prediction_record(trials, error),
        "trials": [_trial_record(trial) for trial in trials],
        "workloads": [_advice_record(advice, error) for advice in advices],
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


def conversations(rollouts: Sequence[Rollout], num_tokens: int) -> Iterator[list[int]]:
    """Prompts of `num_tokens` tokens in a circle: earlier conversations, then a question.

    Args:
        rollouts: Prompts with their answers.
        num_tokens: Of each prompt; the newest are kept.
    """
    turns = list({rollout.prompt_id: rollout for rollout in rollouts}.values())
    for last in itertools.count():
        text: list[int] = list(turns[last % len(turns)].prompt_ids)
        for back in itertools.count(1):
            if len(text) >= num_tokens:
                break
            earlier = turns[(last - back) % len(turns)]
            text = [*earlier.prompt_ids, *earlier.response_ids, *text]
        yield text[-num_tokens:]


def _tried(  # noqa: PLR0913  the parts of one report
    pair: Contestants,
    survivals: Mapping[float, Survival],
    rollouts: Sequence[Rollout],
    *,
    costs: DeviceCosts,
    plan: Plan,
    folder: Path,
    end: float,
    on_phase: OnPhase,
) -> list[Trial]:
    run = TrialRun(
        lambda temperature, copy: replace(
            pair, temperature=temperature, lookup_length=copy, stop_ids=()
        ),
        lambda num_tokens: conversations(rollouts, num_tokens),
        folder,
    )
    planned = list(_planned(costs, survivals, plan))
    left = end - time.monotonic()
    return check(run, planned, seconds=left, on_done=on_phase("trials", len(planned)))


def _planned(
    costs: DeviceCosts, survivals: Mapping[float, Survival], plan: Plan
) -> Iterator[tuple[Workload, Lengths, float]]:
    """Workloads within the measured range in a mixed order.

    Their lengths are in turn those that pay best and others, so that losses are predicted too.
    """
    cells = itertools.product(
        _between(costs.rounds.rows),
        _between(costs.rounds.contexts),
        (times * plan.new_tokens[0] for times in _TRIED_TOKENS),
        sorted(survivals),
    )
    mixed = [Workload(*cell) for cell in cells]
    random.Random(0).shuffle(mixed)
    for index, workload in enumerate(mixed):
        survived = survivals[workload.temperature]
        most = min(plan.longest.draft, len(survived.draft))
        best = advise(workload, costs, survived, longest=plan.longest).lengths
        lengths = best if best.draft and index % 2 else Lengths(1 + index % most, best.copy)
        yield workload, lengths, expected_speedup(workload, lengths, costs, survived)


def _between(points: Sequence[int]) -> list[int]:
    """Places within a measured range; most of them were not measured.

    Example: 1 to 16 gives 1, 3 and 9.
    """
    first, last = points[0], points[-1]
    return sorted({round(first * (last / first) ** place) for place in _TRIED_PLACES})


def error_bar(trials: Sequence[Trial]) -> float:
    """Relative error that nine of ten trials stayed below; infinite without a trial."""
    if not trials:
        return math.inf
    return float(np.quantile([abs(trial.error) for trial in trials], _WIDE_ERROR))


def verdict(speedup: float, error: float) -> str:
    """Whether to speculate: yes and no only where the error bar leaves no doubt."""
    if speedup / (1 + error) > 1:
        return "speculate"
    return "about even" if speedup > 1 else "do not speculate"


def _advice_record(advice: Advice, error: float) -> dict[str, Any]:
    return {
        **asdict(advice.workload),
        "verdict": verdict(advice.speedup, error),
        "draft_length": advice.lengths.draft,
        "copy_length": advice.lengths.copy,
        "speedup": advice.speedup,
        "tokens_per_s": advice.tokens_per_s,
        "plain_tokens_per_s": advice.plain_tokens_per_s,
        "break_even_alpha": advice.break_even,
        "free_positions": advice.free_positions,
    }


def _trial_record(trial: Trial) -> dict[str, Any]:
    return {
        **asdict(trial.workload),
        "draft_length": trial.lengths.draft,
        "copy_length": trial.lengths.copy,
        "predicted": trial.predicted,
        "measured": trial.measured,
    }


def _prediction_record(trials: Sequence[Trial], error: float) -> dict[str, Any]:
    errors = [abs(trial.error) for trial in trials]
    return {
        "num_trials": len(trials),
        "median_error": float(np.median(errors)) if errors else None,
        "error_bar": error if errors else None,
        "sign_errors": sum(trial.has_sign_error for trial in trials),
    }


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
