"""What one recipe takes on a device and on disk, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from draftsmith.distillation.settings import DistillConfig
from draftsmith.distillation.signals import cached_arrays
from draftsmith.distillation.topk_signals import topk_arrays
from draftsmith.drafts.settings import EagleConfig, StudentConfig, TrainedConfig
from draftsmith.planning.job import Job
from draftsmith.planning.models import DraftSizes, TargetSizes, draft_layers
from draftsmith.planning.step import PlannedStep

_BYTES_PER_GB = 1e9

Bytes = dict[str, int | None]


@dataclass(frozen=True)
class RecipePlan:
    """A recipe's part of the plan.

    Attributes:
        job: What it is planned for.
        recipe: The recipe.
        target: On the meta device.
        target_sizes: The target's.
        draft: The draft's sizes.
    """

    job: Job
    recipe: TrainedConfig
    target: PreTrainedModel
    target_sizes: TargetSizes
    draft: DraftSizes

    def report(self) -> dict[str, Any]:
        """Sizes, memory by phase, the signal cache, and a verdict on each."""
        memory = self._memory(self.job.config)
        decoding = self._decoding()
        return {
            "family": self.recipe.family,
            "sizes": asdict(self.draft),
            "memory": memory | {"decoding": decoding},
            "signal_cache": self.signal_cache(),
            "verdicts": {
                "training": self._training_verdict(_peak(memory)),
                "decoding": self._decoding_verdict(decoding),
            },
        }

    def signal_cache(self) -> dict[str, Any]:
        """Bytes on disk of each kind of signal, counted as the distill stage counts them."""
        corpus, config = self.job.corpus, self.job.config
        positions = corpus.predicted_tokens(prompt_positions=config.prompt_positions)
        is_eagle = isinstance(self.recipe, EagleConfig)
        whole = cached_arrays(
            positions,
            corpus.num_entries,
            width=int(self.target.config.get_text_config().hidden_size),
            num_layers=len(draft_layers(self.recipe, self.target)) if is_eagle else 0,
            dtype=self.target.dtype,
        )
        kinds = {"cache": sum(array.num_bytes for array in whole.values()), "online": 0}
        if isinstance(self.recipe, StudentConfig):
            top = topk_arrays(positions, config.topk)
            kinds["topk"] = sum(array.num_bytes for array in top.values())
        if self.job.machine.shards > 1:  # what each process lacks, all must make together
            kinds = {"online": 0}
        limit = int(config.max_cache_gb * _BYTES_PER_GB)
        needed = kinds.get(config.signal)
        fits = needed is not None and needed <= limit
        remedies = [f"distill.signal: {kind}" for kind, size in kinds.items() if size <= limit]
        if needed is not None:
            remedies.append(f"distill.max_cache_gb: {-(-needed // int(_BYTES_PER_GB))}")
        return {
            "by_signal": kinds,
            "signal": config.signal,
            "total_bytes": needed,
            "limit_bytes": limit,
            "fits": fits,
            "remedies": [] if fits else remedies,
        }

    def _memory(self, config: DistillConfig) -> dict[str, Bytes]:
        """Bytes of a device while the target's signals are made, and while a step runs."""
        job, draft = self.job, self.draft
        if job.machine.shards > 1:  # the only signal that they make together
            config = replace(config, signal="online")
        step = PlannedStep(
            job.directory,
            job.dtype,
            self.recipe,
            config,
            job.machine.device_type,
            job.shape(config),
        )
        working = step.training_bytes()
        # Several processes exchange gradients through buckets of the same size.
        buckets = draft.gradients if job.machine.processes > 1 else 0
        held: Bytes = {
            "target_weights": self._resident(job.machine.shards),
            "target_rows": draft.copies,
            "draft_weights": draft.trained,
        }
        trained: Bytes = {
            "optimizer": draft.optimizer,
            "gradients": draft.gradients,
            "gradient_buckets": buckets,
            **self._copies(config),
        }
        training = {**held, **trained, "activations": _less(working, draft.gradients)}
        gathered: Bytes = {"gathered_layers": self._gathered(job.machine.shards)}
        # A cache is filled before the optimizer is there.
        before = trained if config.signal == "online" else {}
        signals = {**held, **before, **gathered, "activations": step.signal_bytes()}
        return {"training": _with_total(training), "signals": _with_total(signals)}

    def _copies(self, config: DistillConfig) -> Bytes:
        """Bytes of what a training copies to main memory, where that is the device's."""
        if self.job.machine.device_type != "cpu":
            return {}
        is_saved, is_judged = config.steps > config.checkpoint_steps, config.early_stop_patience > 0
        return {
            "checkpoint": self.draft.checkpoint if is_saved else 0,
            "best_weights": self.draft.trained if is_judged else 0,
        }

    def _resident(self, shards: int) -> int:
        """Bytes of the target's weights that a process of a training holds all the time."""
        sizes = self.target_sizes
        return sizes.weights - sizes.layers + -(-sizes.layers // shards)

    def _gathered(self, shards: int) -> int:
        """Bytes of what a process gathers while a forward runs: received, and in its place."""
        return 2 * self.target_sizes.largest_layer if shards > 1 else 0

    def _decoding(self) -> Bytes:
        """Bytes of a device while the pair decodes."""
        return _with_total(
            {
                "target_weights": self.job.shard(self.target_sizes.weights),
                "target_cache": self.job.shard(self.target_sizes.cache),
                "draft_weights": self.draft.served,
                "draft_cache": self.draft.cache,
            }
        )

    def _training_verdict(self, total: int | None) -> dict[str, Any]:
        limit = self.job.machine.memory
        if total is None or limit is None or total <= limit:
            return _verdict(total, limit, [])
        remedies: list[str] = []
        least, best, found = total, "", self.job.config
        for text, config in self._options():
            peak = _peak(self._memory(config))
            if peak is not None and peak < least:
                least, best, found = peak, f" with {text}", config
            if peak is not None and peak <= limit:
                remedies.append(f"{text} ({_gb(peak)})")
        for config, suffix in ((self.job.config, ""), (found, best)):
            shards = self._shards(config, limit)
            if shards is not None and shards > self.job.machine.shards:
                remedies.append(f"--shards {shards}{suffix}")
                break
        return _verdict(total, limit, remedies or [f"devices of {_gb(least)}{best}"])

    def _shards(self, config: DistillConfig, limit: int) -> int | None:
        """So many processes would do if they divided the target; None where no number does.

        Each would have fewer sequences than now, which is left out.
        """
        memory = self._memory(replace(config, signal="online"))
        others = [
            phase["total"] - (phase["target_weights"] or 0) - (phase.get("gathered_layers") or 0)
            for phase in memory.values()
            if phase["total"] is not None
        ]
        sizes, fixed = self.target_sizes, max(others, default=limit)
        if self.job.machine.processes == 1:
            fixed += self.draft.gradients  # exchanged among several
        room = limit - fixed - self._gathered(2) - (sizes.weights - sizes.layers)
        return max(self.job.machine.processes, _parts(sizes.layers, room)) if room > 0 else None

    def _options(self) -> Iterator[tuple[str, DistillConfig]]:
        """Settings that give the same draft with less memory."""
        config, processes = self.job.config, self.job.machine.processes
        parts = max(1, config.batch_size // processes)
        configs = [config]
        if parts > config.gradient_accumulation and config.batch_size % parts == 0:
            configs.append(replace(config, gradient_accumulation=parts))
            yield f"distill.gradient_accumulation: {parts}", configs[-1]
        if not config.gradient_checkpointing:
            for changed in configs:
                also = "" if changed is config else f" and gradient_accumulation: {parts}"
                recomputed = replace(changed, gradient_checkpointing=True)
                yield f"distill.gradient_checkpointing: true{also}", recomputed

    def _decoding_verdict(self, decoding: Bytes) -> dict[str, Any]:
        total, limit = decoding["total"], self.job.machine.memory
        if total is None or limit is None or total <= limit:
            return _verdict(total, limit, [])
        target, draft, cache = self.target_sizes, self.draft, self.job.cache
        remedies = []
        a_row = (self.job.shard(target.cache) + draft.cache) / cache.rows
        rows = int((limit - self.job.shard(target.weights) - draft.served) // a_row)
        if rows > 0:
            remedies.append(f"--batch-size {rows}")
        left = limit - draft.served - draft.cache
        if left > 0:
            remedies.append(f"--shards {_parts(target.weights + target.cache, left)}")
        return _verdict(total, limit, remedies or ["a smaller draft, batch or context"])


def _with_total(parts: Bytes) -> Bytes:
    """The parts and their sum; one that is not known makes the sum unknown."""
    known = [size for size in parts.values() if size is not None]
    return parts | {"total": sum(known) if len(known) == len(parts) else None}


def _peak(memory: dict[str, Bytes]) -> int | None:
    """The most bytes of all phases."""
    totals = [phase["total"] for phase in memory.values()]
    known = [total for total in totals if total is not None]
    return max(known) if len(known) == len(totals) else None


def _less(working: int | None, gradients: int) -> int | None:
    return None if working is None else max(0, working - gradients)


def _parts(num_bytes: int, room: int) -> int:
    return -(-num_bytes // room)


def _verdict(total: int | None, limit: int | None, remedies: list[str]) -> dict[str, Any]:
    fits = None if total is None or limit is None else total <= limit
    return {"total_bytes": total, "limit_bytes": limit, "fits": fits, "remedies": remedies}


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / _BYTES_PER_GB:.1f} GB"
