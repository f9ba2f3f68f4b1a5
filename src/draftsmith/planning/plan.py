"""The plan of a distillation: sizes, memory and verdicts of each recipe, disk, tokens, hours.

Rates come from whoever measured them; where one is missing, so are the hours that follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from draftsmith.drafts.settings import TrainedConfig
from draftsmith.planning.job import Job, Rates
from draftsmith.planning.models import TargetSizes, draft_sizes, meta_target, target_sizes
from draftsmith.planning.recipe import RecipePlan

_SECONDS_PER_HOUR = 3600


def plan(job: Job, recipes: Mapping[str, TrainedConfig], rates: Rates) -> dict[str, Any]:
    """The plan as plain values: bytes, tokens, hours.

    Args:
        job: What it is made for.
        recipes: By name, at least one.
        rates: What is known of speed and price.

    Raises:
        TargetError: The target cannot be served.
        DraftError: It can have no such draft.
    """
    target = meta_target(job.directory, job.dtype)
    sizes, config = target_sizes(target, job.cache), target.config.get_text_config()
    plans = {
        name: RecipePlan(job, recipe, target, sizes, draft_sizes(recipe, target, job.cache))
        for name, recipe in recipes.items()
    }
    return {
        "schema": 1,
        "target": {
            "model_type": str(target.config.model_type),
            "dtype": str(target.dtype).removeprefix("torch."),
            "num_layers": int(config.num_hidden_layers),
            "hidden_size": int(config.hidden_size),
            "num_parameters": sizes.num_parameters,
            "weights_bytes": sizes.weights,
            "cache_bytes": sizes.cache,
        },
        "machine": asdict(job.machine),
        "cache": asdict(job.cache),
        "corpus": asdict(job.corpus),
        "step": asdict(job.shape(job.config)),
        "recipes": {name: recipe.report() for name, recipe in plans.items()},
        "disk": _disk(job, sizes, list(plans.values())),
        "time": _time(job, rates, num_recipes=len(plans)),
    }


def _disk(job: Job, target: TargetSizes, plans: Sequence[RecipePlan]) -> dict[str, int]:
    """Bytes that a run has on disk at its fullest; recipes share one cache of signals."""
    config = job.config
    saved = (config.steps - 1) // config.checkpoint_steps
    is_judged = config.early_stop_patience > 0  # a checkpoint then holds the best weights, too
    parts = [plan.draft.checkpoint + is_judged * plan.draft.trained for plan in plans]
    disk = {
        "target_snapshot": target.weights if job.is_copied else 0,
        "signal_cache": max(plan.signal_cache()["total_bytes"] or 0 for plan in plans),
        # The next one is written before the last one goes.
        "checkpoints": min(2, saved) * max(parts),
        "drafts": sum(plan.draft.stored for plan in plans),
    }
    return disk | {"total": sum(disk.values())}


def _time(job: Job, rates: Rates, *, num_recipes: int) -> dict[str, int | float | None]:
    """Tokens, hours where a rate is known, and cost where a price is, too.

    Device hours and cost are those of trainings from the target's layers; warm starts take less.
    """
    corpus, machine, config = job.corpus, job.machine, job.config
    predicted = corpus.predicted_tokens(prompt_positions=config.prompt_positions)
    a_step = num_recipes * config.batch_size * predicted / corpus.train_responses
    trained, warm = (a_step * each.steps for each in (config, config.warm_started()))
    rollouts = _hours(corpus.rollout_tokens, rates.rollout_tokens_per_s)
    training = _hours(trained, rates.training_tokens_per_s)
    used = cost = None
    if rollouts is not None and training is not None:
        used = machine.shards * rollouts + machine.processes * training
    if used is not None and rates.price_per_device_hour is not None:
        cost = used * rates.price_per_device_hour
    return {
        "rollout_tokens": corpus.rollout_tokens,
        "training_tokens": round(trained),
        "warm_start_tokens": round(warm),
        "rollout_hours": rollouts,
        "training_hours": training,
        "warm_start_hours": _hours(warm, rates.training_tokens_per_s),
        "device_hours": used,
        "cost": cost,
    }


def _hours(tokens: float, rate: float | None) -> float | None:
    return None if rate is None else tokens / rate / _SECONDS_PER_HOUR
