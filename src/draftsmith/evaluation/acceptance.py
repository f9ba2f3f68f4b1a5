"""Acceptance, two ways.

Teacher-forced alpha on the target's own rollouts, and survival and tau from the real decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.corpus.rollouts import Rollout
from draftsmith.decoding import (
    NO_TREES,
    Engine,
    Event,
    Request,
    Result,
    SamplingParams,
    TreesByRows,
    with_lookup,
)
from draftsmith.decoding.distribution import OneHot, SamplingTensors, densify, distribution
from draftsmith.decoding.trace import Trace, of_lossless, position_counts
from draftsmith.drafts.joined import LoadedDraft
from draftsmith.drafts.student import head_logits
from draftsmith.evaluation.intervals import Estimate, bootstrap_ratio_of_sums

Item = TypeVar("Item")

_TOKENS_PER_FORWARD = 2048
_POSITIONS_PER_CHUNK = 128


@dataclass(frozen=True)
class PromptAlpha:
    """Mean acceptance rate over a response's positions, and their number."""

    alpha: float
    num_positions: int


def _plain_sampling(temperature: float, device: torch.device) -> SamplingTensors:
    """Temperature only, for one row."""
    return SamplingTensors(
        temperature=torch.tensor([temperature], device=device),
        top_k=torch.tensor([0], device=device),
        top_p=torch.tensor([1.0], device=device),
        is_greedy=temperature == 0,
        is_truncated=False,
    )


@torch.inference_mode()
def teacher_forced_alpha(
    target: PreTrainedModel,
    draft: LoadedDraft,
    rollouts: Sequence[Rollout],
    *,
    temperature: float,
    on_batch: Callable[[int], None] = lambda _num_rollouts: None,
) -> dict[str, PromptAlpha]:
    """Mean by prompt of alpha = sum_x min(p(x), q(x)) at every response position.

    Args:
        target: Live target.
        draft: Draft joined to it.
        rollouts: The target's responses, made at `temperature`; empty ones are left out.
        temperature: Of p and q; at 0 alpha is top-1 agreement.
        on_batch: Called with the number of rollouts that a forward finished.
    """
    sampling = _plain_sampling(temperature, target.device)
    result: dict[str, PromptAlpha] = {}
    for group in _groups([rollout for rollout in rollouts if rollout.response_ids]):
        tokens, places = _pad(group, target.device)
        hidden = draft.last_hidden(target, tokens)
        for row, (rollout, place) in enumerate(zip(group, places, strict=True)):
            parts = [
                _overlap(target, draft, [h[row, place][chunk] for h in hidden], sampling)
                for chunk in _chunks(place.stop - place.start)
            ]
            alpha = float(torch.cat(parts).mean())
            result[rollout.prompt_id] = PromptAlpha(alpha, place.stop - place.start)
        on_batch(len(group))
    return result


def _overlap(
    target: PreTrainedModel, draft: LoadedDraft, hidden: list[Tensor], sampling: SamplingTensors
) -> Tensor:
    """Each position's alpha, `[n]`, from last hidden states `[n, width]` of target and draft."""
    p = distribution(head_logits(target, hidden[0]).float()[None], sampling)
    q = distribution(draft.logits(hidden[1]).float()[None], sampling, draft.token_ids)
    if isinstance(p, OneHot) and isinstance(q, OneHot):
        return (p.ids == q.ids).float()[0]
    size = target.get_output_embeddings().weight.shape[0]
    dense = [densify(side, size, torch.float32)[0] for side in (p, q)]
    return dense[0].minimum(dense[1]).sum(-1)


def _groups(rollouts: list[Rollout]) -> Iterator[list[Rollout]]:
    """Rollouts of similar length, about `_TOKENS_PER_FORWARD` tokens a group."""
    group: list[Rollout] = []
    for rollout in sorted(rollouts, key=_length):
        if group and _length(rollout) * (len(group) + 1) > _TOKENS_PER_FORWARD:
            yield group
            group = []
        group.append(rollout)
    if group:
        yield group


def _length(rollout: Rollout) -> int:
    return len(rollout.prompt_ids) + len(rollout.response_ids)


def _pad(group: list[Rollout], device: torch.device) -> tuple[Tensor, list[slice]]:
    """Right-padded ids, and the positions whose next token belongs to the response."""
    width = max(map(_length, group))
    ids = [r.prompt_ids + r.response_ids + [0] * (width - _length(r)) for r in group]
    places = [slice(len(r.prompt_ids) - 1, _length(r) - 1) for r in group]
    return torch.tensor(ids, device=device), places


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, _POSITIONS_PER_CHUNK):
        yield slice(start, min(start + _POSITIONS_PER_CHUNK, count))


@dataclass(frozen=True)
class DecodingPlan:
    """How prompts are decoded when survival and tau are measured."""

    draft_length: int
    lookup_length: int
    max_new_tokens: int
    batch_size: int
    stop_ids: tuple[int, ...]
    seed: int
    trees: TreesByRows = NO_TREES


def decode(
    target: PreTrainedModel,
    draft: LoadedDraft,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    temperature: float,
    plan: DecodingPlan,
    on_event: Callable[[Event], None] = lambda _event: None,
) -> dict[str, Result]:
    """Decode (id, token ids) prompts speculatively; results by prompt id."""
    drafter = draft.proposer(trees=plan.trees)
    proposer, length = with_lookup(drafter, plan.draft_length, plan.lookup_length)
    engine = Engine(target, proposer, max_rows=plan.batch_size, draft_length=length)
    params = SamplingParams(
        max_new_tokens=plan.max_new_tokens,
        temperature=temperature,
        seed=plan.seed,
        stop_token_ids=plan.stop_ids,
    )
    results: dict[str, Result] = {}
    for event in engine.stream([Request(name, ids, params) for name, ids in prompts]):
        on_event(event)
        if event.result is not None:
            results[event.request_id] = event.result
    return results


def copied_rounds(traces: Sequence[Trace], lookup_length: int) -> dict[str, Any]:
    """Share of the rounds that were copied from the text, and their survival by position."""
    rounds = sum(trace.num_rounds for trace in traces)
    copied = sum(sum(trace.from_text) for trace in traces)
    counts = position_counts(traces, lookup_length, from_text=True)
    return {"share": copied / rounds if rounds else 0.0, "survival": counts.survival}


def estimate_tau(traces: Sequence[Trace], *, seed: int) -> Estimate:
    """Tokens committed per target forward, with an interval over prompts (one trace each)."""
    counted = of_lossless(traces)
    committed = [float(sum(trace.committed)) for trace in counted]
    rounds = [float(trace.num_rounds) for trace in counted]
    return bootstrap_ratio_of_sums(committed, rounds, seed=seed)


def in_turn(items: Sequence[tuple[str, str, Item]]) -> list[Item]:
    """Items of (id, domain, item), one of every domain in turn: any first few are a fair sample.

    Each domain keeps the order of its ids.
    """
    by_domain: dict[str, list[Item]] = {}
    for _, domain, item in sorted(items, key=lambda entry: entry[:2]):
        by_domain.setdefault(domain, []).append(item)
    groups = list(by_domain.values())
    longest = max(map(len, groups))
    return [group[i] for i in range(longest) for group in groups if i < len(group)]
