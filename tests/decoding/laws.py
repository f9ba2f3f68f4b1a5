"""Proposers of every kind, and the test of continuations against a law that is known exactly."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import torch
from scipy import stats
from torch import Tensor, nn

from draftsmith.decoding import (
    DraftModelProposer,
    FixedLengths,
    Lengths,
    LookupFirstProposer,
    NoProposer,
    PromptLookupProposer,
)


def trimmed(model) -> DraftModelProposer:
    """A draft that knows five of the eight tokens."""
    token_ids = torch.tensor([6, 1, 4, 0, 3])
    draft = copy.deepcopy(model)
    weight = draft.lm_head.weight[token_ids].clone()
    draft.lm_head = nn.Linear(32, len(token_ids), bias=False)
    draft.lm_head.weight = nn.Parameter(weight)
    return DraftModelProposer(draft, token_ids)


def build_proposer(kind: str, small):
    match kind:
        case "draft":
            return DraftModelProposer(small.draft)
        case "trimmed":
            return trimmed(small.draft)
        case "lookup":
            return PromptLookupProposer()
        case "lookup_first":
            return LookupFirstProposer(
                DraftModelProposer(small.draft), FixedLengths(Lengths(2, copy=4))
            )
        case "lookup_first_trimmed":
            return LookupFirstProposer(
                trimmed(small.draft), FixedLengths(Lengths(1, copy=4)), min_ngram=1
            )
    return NoProposer()


def p_value(results, law: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the observed continuations against `law`, rare ones pooled."""
    counts = Counter(tuple(result.token_ids) for result in results)
    assert set(counts) <= set(law), "a continuation that the target cannot produce"
    frequent = [tokens for tokens, mass in law.items() if mass * len(results) >= 5]
    observed = [counts[tokens] for tokens in frequent]
    expected = [law[tokens] * len(results) for tokens in frequent]
    rest = len(results) - sum(expected)
    if rest >= 5:
        observed.append(len(results) - sum(observed))
        expected.append(rest)
    scale = sum(observed) / sum(expected)
    return float(stats.chisquare(observed, [e * scale for e in expected]).pvalue)


@torch.inference_mode()
def exact_law(
    model: nn.Module, prompt: list[int], num_new: int, warp: Callable[[Tensor, Tensor], Tensor]
) -> dict[tuple[int, ...], float]:
    """Probabilities of all continuations in float64, by a full forward a token.

    Args:
        model: The target, as Transformers runs it.
        prompt: Its context.
        num_new: Length of the continuations.
        warp: Scores of `(token ids, logits)` of the last position, both `[rows, ...]`.
    """
    model = copy.deepcopy(model).double()
    found = {(): 1.0}
    for _ in range(num_new):
        inputs = torch.tensor([[*prompt, *prefix] for prefix in found])
        rows = warp(inputs, model(inputs, use_cache=False).logits[:, -1]).softmax(-1).tolist()
        found = {
            (*prefix, token): mass * share
            for (prefix, mass), row in zip(found.items(), rows, strict=True)
            for token, share in enumerate(row)
            if share > 0
        }
    return found
