"""When to speculate with a pair on this device, and how: the content of `advice.json`.

Costs are measured on a grid of batch sizes and contexts, workloads are priced with them, and
predictions are held against workloads that are really decoded. Their errors are the error bars.
Beside drafts another dtype or int8 weights may pay: they are measured, too. All of it ends at a
deadline, and what there was no time for is told.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.corpus.rollouts import Rollout
from draftsmith.decoding import Lengths
from draftsmith.errors import EvidenceError
from draftsmith.evaluation.advice_record import advice_record, cost_records
from draftsmith.evaluation.alternatives import SCHEMES, AlternativeRun
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.benchmark import OnPhase, silent
from draftsmith.evaluation.best_choice import Advice, advise
from draftsmith.evaluation.ceilings import Ceilings, ModelSize, measure_ceilings
from draftsmith.evaluation.cost_model import Survival
from draftsmith.evaluation.deadline import Deadline
from draftsmith.evaluation.sweep import Axes, CostSweep
from draftsmith.evaluation.trial_plan import LONGEST_TRIAL, conversations, plan_trials, unseen
from draftsmith.evaluation.trials import Trial, TrialRun, check, error_bar, summary
from draftsmith.evaluation.workload import NOTHING, DeviceCosts, Workload, expected_ms

_COST_SHARE = 0.3  # of the time; what is left behind the next goes to the trials
_ALTERNATIVE_SHARE = 0.25  # of what is left then
_ALTERNATIVE_TOKENS = 32
_FALLBACK = Lengths(1, 0)  # drafted on an alternative where nothing pays on the served target


@dataclass(frozen=True)
class Plan:
    """What is asked for.

    Attributes:
        batch_sizes: Rows in flight, ascending.
        contexts: Tokens of prompts, ascending.
        new_tokens: Tokens of answers, ascending.
        longest: Longest draft and copy.
        deadline: When all has to be done.
        measured_on: Ids of the prompts that survival was measured on: trials decode others.
    """

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    new_tokens: tuple[int, ...]
    longest: Lengths
    deadline: Deadline
    measured_on: Collection[str] = ()


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
        EvidenceError: Acceptance was not measured, or the models hold too few positions.
    """
    _require_measured(survivals)
    asked, plan = plan, _within_reach(plan, pair)
    ceilings = measure_ceilings(pair.target.device, pair.target.dtype)
    costs = _costs(pair, survivals, plan, folder, on_phase)
    advices = [
        advise(workload, costs, survivals[workload.temperature], longest=plan.longest)
        for workload in _workloads(costs, plan.new_tokens, sorted(survivals))
    ]
    alternatives = _alternatives(pair, rollouts, costs, plan=plan, folder=folder).run(
        _lengths(advices, costs.rounds.rows),
        plan.deadline.part(_ALTERNATIVE_SHARE),
        on_done=on_phase("alternatives", len(SCHEMES)),
    )
    planned = plan_trials(costs, survivals, new_tokens=plan.new_tokens, longest=plan.longest)
    texts = unseen(rollouts, plan.measured_on)
    done = on_phase("trials", len(planned))
    trials = check(_trial_run(pair, texts, folder), planned, plan.deadline, on_done=done)
    found = _report(pair, costs, ceilings, advices, alternatives, trials)
    found["prediction"]["on_unseen_prompts"] = len(texts) < len(rollouts)
    return found | {"left_out": _left_out(asked, plan, costs)}


def _trial_run(pair: Contestants, texts: Sequence[Rollout], folder: Path) -> TrialRun:
    def contestants(temperature: float) -> Contestants:
        return replace(pair, temperature=temperature, stop_ids=())

    return TrialRun(contestants, partial(conversations, texts), folder)


def _report(
    pair: Contestants,
    costs: DeviceCosts,
    ceilings: Ceilings,
    advices: Sequence[Advice],
    alternatives: Sequence[Mapping[str, Any]],
    trials: Sequence[Trial],
) -> dict[str, Any]:
    error, size = error_bar(trials), ModelSize.of(pair.target)
    return {
        "ceilings": asdict(ceilings),
        "target_size": asdict(size),
        "draft_size": asdict(ModelSize.of(pair.draft.model)),
        "served_dtype": str(pair.target.dtype).removeprefix("torch."),
        "measured_costs": cost_records(costs, size, ceilings),
        "judging_ms": asdict(costs.judging),
        "alternatives": [dict(entry) for entry in alternatives],
        "prediction": summary(trials),
        "trials": [trial.record() for trial in trials],
        "workloads": [advice_record(advice, error, costs, alternatives) for advice in advices],
    }


def _require_measured(survivals: Mapping[float, Survival]) -> None:
    if not survivals:
        raise EvidenceError(
            "pricing workloads",
            found="a pair without measured acceptance",
            expected="the evidence of an evaluation",
            remedy="run `dvc repro`, which attaches it to the pair",
        )


def _within_reach(plan: Plan, pair: Contestants) -> Plan:
    """The same with what both models hold and the draft drafts.

    Answers that would leave less than half of the positions to the prompt are left out, unless it
    is the shortest.
    """
    limits = [
        int(getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 30))
        for model in (pair.target, pair.draft.model)
    ]
    drafted = min(plan.longest.draft, pair.draft.max_draft_length)
    longest = plan.longest._replace(draft=drafted)
    room = min(limits) - max(longest) - 1
    answers = tuple(n for n in plan.new_tokens if 2 * n <= room) or plan.new_tokens[:1]
    most = room - max(*answers, LONGEST_TRIAL * answers[0])
    if most < 1:
        raise EvidenceError(
            "pricing workloads",
            found=f"models that hold {min(limits)} tokens",
            expected=f"room for a prompt, an answer of {answers[0]} tokens and a round of "
            f"{max(longest)} drafts",
            remedy="measure such a pair with `draftsmith measure`, which decodes short answers",
        )
    contexts = tuple(sorted({min(context, most) for context in plan.contexts}))
    return replace(plan, contexts=contexts, new_tokens=answers, longest=longest)


def _costs(
    pair: Contestants,
    survivals: Mapping[float, Survival],
    plan: Plan,
    folder: Path,
    on_phase: OnPhase,
) -> DeviceCosts:
    axes = Axes(plan.batch_sizes, plan.contexts)
    trees = {tree for survived in survivals.values() for tree in survived.trees}
    nodes = [tree.num_nodes_with(plan.longest.copy) for tree in trees]
    width = max(*plan.longest, *nodes) + 1
    return CostSweep(pair.target, pair.draft, axes, width, folder).run(
        plan.deadline.part(_COST_SHARE),
        on_done=on_phase("costs", len(axes.rows) * len(axes.contexts)),
    )


def _workloads(
    costs: DeviceCosts, new_tokens: Sequence[int], temperatures: Sequence[float]
) -> Iterator[Workload]:
    rounds = costs.rounds
    for cell in itertools.product(rounds.rows, rounds.contexts, new_tokens, temperatures):
        yield Workload(*cell)


def _alternatives(
    pair: Contestants,
    rollouts: Sequence[Rollout],
    costs: DeviceCosts,
    *,
    plan: Plan,
    folder: Path,
) -> AlternativeRun:
    context, tokens = costs.rounds.contexts[0], min(_ALTERNATIVE_TOKENS, max(plan.new_tokens))

    def group_s(size: int) -> float:
        workload = Workload(size, context, tokens, temperature=0.0)
        return expected_ms(workload, NOTHING, costs, Survival(())) / 1000

    return AlternativeRun(
        replace(pair, temperature=0.0, stop_ids=()),
        partial(conversations, rollouts, context),
        rollouts,
        tokens,
        group_s,
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
        draft, copy, _ = first.choice
        found[size] = Lengths(draft, copy) if draft else _FALLBACK
    return found


def _left_out(asked: Plan, plan: Plan, costs: DeviceCosts) -> list[str]:
    """What was asked for and is not told, and why."""
    rounds = costs.rounds
    late = {
        "batches of": sorted({*plan.batch_sizes} - {*rounds.rows}),
        "prompts of": sorted({*plan.contexts} - {*rounds.contexts}),
    }
    long = {
        "answers of": sorted({*asked.new_tokens} - {*plan.new_tokens}),
        "prompts of": sorted({*asked.contexts} - {*plan.contexts}),
    }
    told = [
        f"{what} {', '.join(map(str, sizes))}: no time left of the budget"
        for what, sizes in late.items()
        if sizes
    ]
    return told + [
        f"{what} {', '.join(map(str, sizes))} tokens: the models hold too few"
        for what, sizes in long.items()
        if sizes
    ]
