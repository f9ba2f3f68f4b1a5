"""The contestants of a benchmark: our engine with and without drafts, and Transformers' `generate`.

All of them run on the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decoding import (
    Engine,
    LookupFirstProposer,
    NoProposer,
    PromptLookupProposer,
    Proposer,
    Request,
    SamplingParams,
    SlotModel,
    Trace,
    Tree,
    with_lookup,
)
from draftsmith.decoding.steps import BuildStep
from draftsmith.drafts.joined import LoadedDraft
from draftsmith.evaluation.adaptive import AdaptiveLengths
from draftsmith.evaluation.guesses import served_trees
from draftsmith.evaluation.timing import Arm

_PADDING = 0
_LEAST_NGRAM = 2  # that a pair copies behind, by the default of `LookupFirstProposer`


def twin(model: PreTrainedModel, attention: str = "sdpa") -> PreTrainedModel:
    """The same weights under a configuration of their own, with Transformers' own attention.

    The engine switches the attention of the model it drives; the twin keeps Transformers' own for
    baselines.
    """
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, memo)
    other.set_attn_implementation(attention)
    return other


def copies_alone() -> PromptLookupProposer:
    """What a pair proposes where it drafts nothing: the copies that it makes beside its drafts."""
    return PromptLookupProposer(min_ngram=_LEAST_NGRAM)


class EngineArm:
    """Our engine. Starting is to prefill and to decode the first round; the rest is decoding.

    Attributes:
        traces: Of all requests that have ended.
    """

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self.traces: list[Trace] = []
        self._engine = engine
        self._params = params

    def __call__(self, prompts: list[list[int]]) -> int:
        """Decode prompts together; returns the number of committed tokens."""
        return self.start(prompts) + self.finish()

    def start(self, prompts: list[list[int]]) -> int:
        """Admit the prompts; returns the tokens of the rounds until each has its first."""
        requests = [Request(str(i), ids, self._params) for i, ids in enumerate(prompts)]
        self._engine.open(max(map(len, prompts)) + self._params.max_new_tokens)
        self._engine.submit(requests)
        waiting, tokens = {request.request_id for request in requests}, 0
        while waiting:
            for request_id, committed in self._step():
                waiting.discard(request_id)
                tokens += committed
        return tokens

    def finish(self) -> int:
        """Decode to the end; returns the tokens of these rounds."""
        tokens = 0
        while self._engine.is_busy:
            tokens += sum(committed for _, committed in self._step())
        return tokens

    def _step(self) -> Iterator[tuple[str, int]]:
        for event in self._engine.step():
            if event.result is not None:
                self.traces.append(event.result.trace)
            yield event.request_id, len(event.token_ids)


@dataclass(frozen=True)
class Rival:
    """How Transformers decodes.

    Attributes:
        attention: Its attention implementation.
        cache: Name of a cache implementation; None is the default. With a static one Transformers
            compiles the decoding step where the device allows it.
        lookup_length: Tokens copied from the prompt (prompt lookup); 0 is off.
        draft_length: Tokens guessed by the draft (assisted generation); 0 is off.
        is_batched: Decode the prompts of a group together, padded on the left; one after another
            otherwise, as drafts and copies require.
        pad_to: Prompts are padded to so many tokens at least: a compiled step wants one shape.
    """

    attention: str = "sdpa"
    cache: str | None = None
    lookup_length: int = 0
    draft_length: int = 0
    is_batched: bool = False
    pad_to: int = 0


@dataclass(frozen=True)
class Contestants:
    """A pair and the ways to decode with it.

    Attributes:
        target: Live target, driven by the engine.
        draft: Joined to it.
        stop_ids: Ids that end a response.
        lookup_length: Tokens that our engine copies from the text in the place of a draft.
        temperature: Of every arm.
        steps: How our engine's steps are compiled or captured; None runs them as they are.
    """

    target: PreTrainedModel
    draft: LoadedDraft
    stop_ids: tuple[int, ...]
    lookup_length: int = 0
    temperature: float = 0.0
    steps: BuildStep | None = None

    def engine(
        self,
        draft_length: int,
        *,
        max_new_tokens: int,
        batch_size: int = 1,
        tree: Tree | None = None,
    ) -> EngineArm:
        """Our engine with the draft; draft length 0 is the autoregressive baseline."""
        if draft_length == 0:
            return self._arm(NoProposer(), 0, max_new_tokens, batch_size)
        draft = self.draft.proposer(self.steps, served_trees(tree, batch_size))
        proposer, length = with_lookup(draft, draft_length, self.lookup_length)
        return self._arm(proposer, length, max_new_tokens, batch_size)

    def adaptive(
        self, lengths: AdaptiveLengths, *, max_new_tokens: int, batch_size: int = 1
    ) -> EngineArm:
        """Our engine with the draft and copies, as long as `lengths` says."""
        drafter = self.draft.proposer(self.steps, lengths.trees)
        proposer = LookupFirstProposer(drafter, lengths)
        return self._arm(proposer, max(lengths.limit), max_new_tokens, batch_size)

    def with_copies(self, length: int) -> Contestants:
        """The same with copies of at most so many tokens beside drafts."""
        return replace(self, lookup_length=length)

    def copies(self, length: int, *, max_new_tokens: int, batch_size: int) -> EngineArm:
        """Our engine with the copies that the pair makes beside its drafts, and nothing else."""
        return self._arm(copies_alone(), length, max_new_tokens, batch_size)

    def prompt_lookup(self, draft_length: int, *, max_new_tokens: int) -> EngineArm:
        """Our engine with the free baseline, which copies up to `draft_length` tokens."""
        return self._arm(PromptLookupProposer(), draft_length, max_new_tokens, 1)

    def _arm(self, proposer: Proposer, length: int, max_new_tokens: int, rows: int) -> EngineArm:
        target = SlotModel(self.target, self.steps)
        engine = Engine(target, proposer, max_rows=rows, draft_length=length)
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            stop_token_ids=self.stop_ids,
        )
        return EngineArm(engine, params)

    def assisted(self, draft_length: int, *, max_new_tokens: int) -> Arm:
        """Assisted generation of Transformers at a constant draft length.

        Raises:
            DraftError: Transformers cannot draft with this draft.
        """
        return self.transformers(Rival(draft_length=draft_length), max_new_tokens=max_new_tokens)

    def transformers(self, rival: Rival = Rival(), *, max_new_tokens: int) -> Arm:  # noqa: B008
        """`generate` of Transformers.

        With the same draft where it is assisted: a student under the target's whole head.
        """
        target = twin(self.target, rival.attention)
        # Of its own, so that nothing of the checkpoint's defaults (a top-p) changes the task.
        target.generation_config = GenerationConfig(
            eos_token_id=list(self.stop_ids) or None, pad_token_id=_PADDING
        )
        options = self._options(rival) | {"max_new_tokens": max_new_tokens}

        @torch.inference_mode()
        def run(prompts: list[list[int]]) -> int:
            groups = [prompts] if rival.is_batched else [[ids] for ids in prompts]
            return sum(self._generate(target, group, rival.pad_to, options) for group in groups)

        return run

    def _options(self, rival: Rival) -> dict[str, Any]:
        options: dict[str, Any] = {"do_sample": self.temperature > 0}
        if self.temperature > 0:
            options |= {"temperature": self.temperature, "top_k": 0}
        if rival.cache is not None:
            options["cache_implementation"] = rival.cache
        if rival.lookup_length:
            options["prompt_lookup_num_tokens"] = rival.lookup_length
        if rival.draft_length:
            assistant = self._assistant(rival.attention)
            assistant.generation_config.num_assistant_tokens = rival.draft_length
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
            options["assistant_model"] = assistant
        return options

    def _assistant(self, attention: str) -> PreTrainedModel:
        return twin(self.draft.as_causal_lm(self.target), attention)

    def _generate(
        self,
        target: PreTrainedModel,
        prompts: list[list[int]],
        pad_to: int,
        options: dict[str, Any],
    ) -> int:
        """Committed tokens of prompts that are decoded together."""
        width = max(pad_to, *map(len, prompts))
        padded = [[_PADDING] * (width - len(ids)) + ids for ids in prompts]
        real = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        output = target.generate(  # type: ignore[operator]  # of GenerationMixin
            torch.tensor(padded, device=target.device),
            attention_mask=torch.tensor(real, device=target.device),
            **options,
        )
        return sum(self._num_committed(row) for row in output[:, width:].tolist())

    def _num_committed(self, token_ids: list[int]) -> int:
        """Tokens up to the first stop token, which counts; what follows it is padding."""
        for place, token in enumerate(token_ids):
            if token in self.stop_ids:
                return place + 1
        return len(token_ids)
