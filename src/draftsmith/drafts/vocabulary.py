"""The draft's vocabulary: which of the target's tokens the draft can propose.

A trimmed vocabulary makes the output layer, and so training and drafting, cheaper; tokens outside
it have q = 0 and are never proposed, so their share of the target's text caps acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from draftsmith.artifacts import digest_bytes


def count_tokens(sequences: Iterable[list[int]], vocab_size: int) -> Tensor:
    """How often each id occurs: int64 `[vocab_size]`."""
    flat = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.long)
    return torch.bincount(flat, minlength=vocab_size)


def choose_tokens(counts: Tensor, size: int, *, always: Iterable[int] = ()) -> Tensor:
    """The `size` most frequent ids, ascending, int64.

    Ties go to the lower id: byte-pair vocabularies number merges by frequency, so the lower id is
    the better guess for an unseen token.

    Args:
        counts: int64 `[vocab_size]`.
        size: Entries wanted; at most the vocabulary.
        always: Ids that must be in, such as those that end a turn.
    """
    weight = counts.clone()
    weight[list(always)] = counts.max() + 1
    order = weight.sort(descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts: Tensor, token_ids: Tensor) -> float:
    """Share of the counted tokens that `token_ids` holds; 1.0 when nothing was counted."""
    total = int(counts.sum())
    return int(counts[token_ids].sum()) / total if total else 1.0


def vocabulary_digest(token_ids: Tensor) -> str:
    """Digest of the map from draft entries to target ids, order included."""
    return digest_bytes(token_ids.to(torch.int64).cpu().numpy().tobytes())
