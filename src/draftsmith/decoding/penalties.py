"""Sampling parameters that change logits: a bias, and what looks at a row's text so far.

They change logits before anything else does, at every draft position with the prefix that it would
have. Pure functions of counts; the rows' texts are the batch's business. Repetition counts prompt
and answer and is Transformers' rule (Keskar et al. 2019, arXiv 1909.05858); presence and frequency
count the answer alone and are subtracted, as OpenAI's API defines them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Penalties:
    """Parameters of a batch, one entry a row.

    Attributes:
        repetition: float32 `[rows]`, positive; 1 is off.
        presence: float32 `[rows]`; 0 is off.
        frequency: float32 `[rows]`; 0 is off.
        min_new: int64 `[rows]`: no stop token before so many new tokens.
        stops: bool `[rows, vocab]`: the row's stop tokens.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    min_new: Tensor
    stops: Tensor


@dataclass(frozen=True)
class History:
    """What the rows hold, committed tokens only.

    Attributes:
        used: int32 `[rows, vocab]`: occurrences in prompt and answer.
        new: int32 `[rows, vocab]`: occurrences in the answer.
        num_new: int64 `[rows]`: length of the answer.
    """

    used: Tensor
    new: Tensor
    num_new: Tensor


def add_bias(logits: Tensor, bias: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Logits with each row's bias added, the same at every position.

    Args:
        logits: `[rows, positions, entries]`.
        bias: `[rows, vocab]`; 0 where a token has none.
        token_ids: int64 `[entries]`: the target's id of each entry; None is the identity.
    """
    return logits + _entries(bias, token_ids)[:, None].to(logits.dtype)


def penalise(
    logits: Tensor,
    penalties: Penalties,
    history: History,
    drafts: Tensor,
    token_ids: Tensor | None = None,
    prefixes: Sequence[tuple[int, ...]] = (),
) -> Tensor:
    """Logits after penalties and minimum length.

    Without `prefixes` the last position follows all `drafts`, the one before it all but the last
    draft, and so on. Example: a verification has 3 positions for 2 drafts, so they follow 0, 1 and
    2 drafts; the draft's own third step has 1 position, which follows both.

    Args:
        logits: `[rows, positions, entries]`.
        penalties: Parameters of the rows.
        history: Counts of the rows.
        drafts: int64 `[rows, drafts]`, at least `positions - 1` of them.
        token_ids: int64 `[entries]`: the target's id of each entry; None is the identity.
        prefixes: By position the drafts that it follows.
    """
    paths = paths_of(prefixes, drafts.shape[1], logits.shape[1])
    stops = _entries(penalties.stops, token_ids)
    adjusted = logits.clone()
    for place, (prefix, used, new) in enumerate(_counts(history, drafts, paths)):
        scores = _penalised(
            logits[:, place], penalties, _entries(used, token_ids), _entries(new, token_ids)
        )
        is_early = (history.num_new + len(prefix) < penalties.min_new)[:, None]
        adjusted[:, place] = scores.masked_fill(stops & is_early, -torch.inf)
    return adjusted


def paths_of(
    prefixes: Sequence[tuple[int, ...]], num_drafts: int, num_positions: int
) -> Sequence[tuple[int, ...]]:
    """The drafts before each position: as given, or those of a chain, see `penalise`."""
    chain = tuple(range(num_drafts))
    return prefixes or [chain[: num_drafts + 1 - n] for n in range(num_positions, 0, -1)]


def _counts(
    history: History, drafts: Tensor, prefixes: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor]]:
    """Each prefix with the occurrences, committed tokens and its drafts together."""
    one = torch.ones(len(drafts), 1, dtype=history.used.dtype, device=drafts.device)
    used, new = history.used.clone(), history.new.clone()
    held: tuple[int, ...] = ()
    for prefix in prefixes:
        if prefix[: len(held)] != held:
            used, new, held = history.used.clone(), history.new.clone(), ()
        for index in prefix[len(held) :]:
            used.scatter_add_(1, drafts[:, index : index + 1], one)
            new.scatter_add_(1, drafts[:, index : index + 1], one)
        held = prefix
        yield prefix, used, new


def _entries(table: Tensor, token_ids: Tensor | None) -> Tensor:
    return table if token_ids is None else table[:, token_ids]


def _penalised(logits: Tensor, penalties: Penalties, used: Tensor, new: Tensor) -> Tensor:
    """One position: `[rows, entries]`."""
    repetition = penalties.repetition[:, None].to(logits.dtype)
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    scores = torch.where(used > 0, repeated, logits)
    return scores - penalties.presence[:, None] * (new > 0) - penalties.frequency[:, None] * new
