"""What `advice.json` says of a workload and of costs, and which words stand for which certainty.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from draftsmith.evaluation.alternatives import INT8, pays_instead
from draftsmith.evaluation.best_choice import Advice
from draftsmith.evaluation.ceilings import Ceilings, ModelSize, bound
from draftsmith.evaluation.trials import choice_record
from draftsmith.evaluation.workload import NOTHING, DeviceCosts


def verdict(advice: Advice, error: float) -> str:
    """Whether to speculate: yes and no only where the error bar leaves no doubt.

    Args:
        advice: What was found best.
        error: Relative error of predicted speedups; infinite where too few were checked.
    """
    if advice.choice == NOTHING:
        return "do not speculate" if math.isfinite(error) else "about even"
    if advice.speedup / (1 + error) <= 1:
        return "about even"
    return "speculate" if advice.choice.draft else "copies alone"


def advice_record(
    advice: Advice, error: float, costs: DeviceCosts, alternatives: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """An entry of `workloads`.

    Args:
        advice: What was found best.
        error: As in `verdict`.
        costs: What was measured.
        alternatives: What else would make the target faster. Of them one is named that surely beats
            the best that drafts and copies promise.
    """
    told = verdict(advice, error)
    instead = pays_instead(
        alternatives, advice.workload.batch_size, reading_share(advice, costs), least=advice.speedup
    )
    if instead is not None:
        told = "quantise instead" if instead["scheme"] == INT8 else "change the dtype instead"
    return {
        **asdict(advice.workload),
        "verdict": told,
        "instead": instead,
        **choice_record(advice.choice),
        "speedup": advice.speedup,
        "tokens_per_s": advice.tokens_per_s,
        "plain_tokens_per_s": advice.plain_tokens_per_s,
        "break_even_alpha": advice.break_even,
        "free_positions": advice.free_positions,
    }


def reading_share(advice: Advice, costs: DeviceCosts) -> float:
    """Share of a workload's time without speculation that goes into reading its prompts."""
    workload = advice.workload
    tokens = workload.batch_size * workload.new_tokens
    read = costs.prefill_at(rows=workload.batch_size, context=workload.context)
    return min(1.0, read.target * advice.plain_tokens_per_s / (1000 * tokens))


def cost_records(costs: DeviceCosts, size: ModelSize, ceilings: Ceilings) -> list[dict[str, Any]]:
    """`measured_costs`: every cell, and what each of its forwards waits for."""
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
