"""The contestants of a benchmark: our engine with and without drafts, and Transformers' `generate`.

All of them run on the same weights.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from draftsmith.decoding import (
    DraftModelProposer,
    Engine,
    NoProposer,
    PromptLookupProposer,
    Proposer,
    Request,
    SamplingParams,
    with_lookup,
)
from draftsmith.decoding.draft_length import RoundCosts
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.drafts.checkpoint import LoadedDraft, with_full_head
from draftsmith.drafts.manifest import CAUSAL_LM
from draftsmith.evaluation.cost_model import ForwardCosts
from draftsmith.evaluation.timing import Arm, median_ms

_COST_CONTEXT = 160


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under a configuration of their own, with Transformers' sdpa attention.

    The engine switches the attention of the model it drives; the twin keeps Transformers' own for
    baselines.
    """
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, memo)
    other.set_attn_implementation("sdpa")
    return other


@dataclass(frozen=True)
class Contestants:
    """A pair and the ways to decode with it.

    Attributes:
        target: Live target, driven by the engine.
        draft: Joined to it.
        stop_ids: Ids that end a response.
        lookup_length: Tokens that our engine copies from the text in the place of a draft.
        temperature: Of every arm.
    """

    target: PreTrainedModel
    draft: LoadedDraft
    stop_ids: tuple[int, ...]
    lookup_length: int = 0
    temperature: float = 0.0

    def engine(self, draft_length: int, *, max_new_tokens: int, batch_size: int = 1) -> Arm:
        """Our engine with the draft; draft length 0 is the autoregressive baseline."""
        if draft_length == 0:
            return self._arm(NoProposer(), 0, max_new_tokens, batch_size)
        draft = DraftModelProposer(self.draft.model, self.draft.token_ids)
        proposer, length = with_lookup(draft, draft_length, self.lookup_length)
        return self._arm(proposer, length, max_new_tokens, batch_size)

    def prompt_lookup(self, draft_length: int, *, max_new_tokens: int) -> Arm:
        """Our engine with the free baseline; copies are as long as those of the pair."""
        length = self.lookup_length or draft_length
        return self._arm(PromptLookupProposer(), length, max_new_tokens, 1)

    def _arm(self, proposer: Proposer, draft_length: int, max_new_tokens: int, rows: int) -> Arm:
        engine = Engine(self.target, proposer, max_rows=rows, draft_length=draft_length)
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            stop_token_ids=self.stop_ids,
        )

        def run(prompts: list[list[int]]) -> int:
            requests = [Request(str(i), ids, params) for i, ids in enumerate(prompts)]
            return sum(len(result.token_ids) for result in engine.generate(requests))

        return run

    def transformers(self, *, max_new_tokens: int) -> Arm:
        """`generate` of Transformers, one prompt after another."""
        return self._generate(twin(self.target), max_new_tokens, None, 0)

    def assisted(self, draft_length: int, *, max_new_tokens: int) -> Arm:
        """Assisted generation of Transformers at a constant draft length.

        With the same draft, a student under the target's whole head.
        """
        is_whole = self.draft.manifest.family == CAUSAL_LM
        draft = self.draft
        assistant = twin(draft.model) if is_whole else with_full_head(draft, self.target)
        return self._generate(twin(self.target), max_new_tokens, assistant, draft_length)

    def _generate(
        self,
        target: PreTrainedModel,
        max_new_tokens: int,
        assistant: PreTrainedModel | None,
        draft_length: int,
    ) -> Arm:
        extra: dict[str, object] = {}
        if assistant is not None:
            assistant.generation_config.num_assistant_tokens = draft_length
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
            extra["assistant_model"] = assistant
        if self.temperature > 0:
            extra |= {"do_sample": True, "temperature": self.temperature, "top_k": 0}
        else:
            extra["do_sample"] = False

        @torch.inference_mode()
        def run(prompts: list[list[int]]) -> int:
            total = 0
            for ids in prompts:
                inputs = torch.tensor([ids], device=target.device)
                output = target.generate(  # type: ignore[operator]  # of GenerationMixin
                    inputs,
                    attention_mask=torch.ones_like(inputs),
                    max_new_tokens=max_new_tokens,
                    eos_token_id=list(self.stop_ids) or None,
                    pad_token_id=0,
                    **extra,
                )
                total += output.shape[1] - len(ids)
            return total

        return run


@torch.inference_mode()
def forward_costs(
    contestants: Contestants,
    widths: Sequence[int],
    *,
    batch_size: int,
    repeats: int,
    context: int = _COST_CONTEXT,
) -> ForwardCosts:
    """Isolated forwards over the slot cache, timed in turn.

    Args:
        contestants: The pair.
        widths: Positions of a verification; 1 is a plain step.
        batch_size: Rows.
        repeats: Repetitions; the median counts.
        context: Tokens before these positions; fewer where the models hold no more.
    """
    target, draft = SlotModel(contestants.target), SlotModel(contestants.draft.model)
    limit = min(target.max_positions, draft.max_positions)
    context = min(context, limit - max(widths))
    rows = torch.arange(batch_size, device=target.device)[:, None] * 0
    for model in (target, draft):
        model.reserve(rows=batch_size, slots=context + max(widths))
        places = rows + torch.arange(context, device=target.device)
        model.forward(places % 100, places, span=context, keep=0)

    def step(model: SlotModel, width: int) -> None:
        places = rows + context + torch.arange(width, device=target.device)
        model.forward(places % 100, places, span=context + width)

    actions = {f"target-{width}": partial(step, target, width) for width in sorted({1, *widths})}
    times = median_ms({"draft": partial(step, draft, 1), **actions}, repeats)
    verify = {width: times[f"target-{width}"] for width in sorted({1, *widths})}
    return ForwardCosts(times["target-1"], times["draft"], verify)


def round_costs(
    contestants: Contestants,
    max_length: int,
    *,
    rows: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
) -> RoundCosts:
    """What rounds cost by batch and context, for an adaptive draft length.

    Args:
        contestants: The pair.
        max_length: Longest draft length.
        rows: Batch sizes to measure.
        contexts: Contexts to measure, tokens.
        repeats: Repetitions of each forward; the median counts.
    """
    widths = range(1, max_length + 2)
    verify, draft = {}, {}
    for cell in itertools.product(sorted(rows), sorted(contexts)):
        size, context = cell
        measured = forward_costs(
            contestants, widths, batch_size=size, repeats=repeats, context=context
        )
        verify[cell] = [measured.verify_ms[width] for width in widths]
        draft[cell] = measured.draft_step_ms
    return RoundCosts(tuple(sorted(rows)), tuple(sorted(contexts)), verify, draft)
