"""Prompt lookup in the engine, beside the same engine without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from benchmarks.measuring import within
from draftsmith.decoding import (
    Engine,
    NoProposer,
    PromptLookupProposer,
    SamplingParams,
    SlotModel,
)
from draftsmith.decoding.trace import block_efficiency
from draftsmith.evaluation.arms import EngineArm
from draftsmith.evaluation.settings import BenchmarkConfig
from draftsmith.evaluation.timing import interleave, speed_ratio

_LENGTHS = (2, 3, 5, 8)  # tokens copied at most


@dataclass(frozen=True)
class Copies:
    """Prompt lookup in our engine, beside the same engine without drafts."""

    target: PreTrainedModel
    stop_ids: tuple[int, ...]
    config: BenchmarkConfig

    def measured(self, prompts: Sequence[list[int]], size: int) -> dict[str, Any]:
        """Speedup and tau by copy length, and which length is best."""
        tokens = self.config.max_new_tokens if size == 1 else self.config.batch_tokens
        arms = {0: self._arm(0, tokens, size)} | {n: self._arm(n, tokens, size) for n in _LENGTHS}
        groups = list(within(prompts, size, until=0.0, at_least=max(2, len(prompts) // size)))
        timings = interleave({str(n): arm for n, arm in arms.items()}, groups)
        lengths = {
            str(n): {
                "speedup": asdict(speed_ratio(timings[str(n)], timings["0"], seed=0)),
                "tau": block_efficiency(arms[n].traces),
            }
            for n in _LENGTHS
        }
        best = max(lengths, key=lambda n: lengths[n]["speedup"]["mean"])
        return {"copy_length": int(best), **lengths[best], "lengths": lengths}

    def _arm(self, length: int, tokens: int, rows: int) -> EngineArm:
        proposer = PromptLookupProposer() if length else NoProposer()
        engine = Engine(SlotModel(self.target), proposer, max_rows=rows, draft_length=length)
        params = SamplingParams(max_new_tokens=tokens, stop_token_ids=self.stop_ids)
        return EngineArm(engine, params)
