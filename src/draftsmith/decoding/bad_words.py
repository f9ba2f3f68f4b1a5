"""Words that an answer must not hold: sequences of tokens, of which the last is forbidden in time.

Whether a token would complete a word depends on the tokens before it, at a draft position on the
drafts that it follows. Only the answer's own tokens count: a prompt that ends in the first half of
a word forbids nothing. Pure functions; the rows' texts are the batch's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decoding.penalties import paths_of

ANY = -1  # in the place of a token that a shorter word does not have
NOTHING = -2  # in the place of a token before an answer's first


@dataclass(frozen=True)
class BadWords:
    """Forbidden words of a batch, one entry each.

    Attributes:
        rows: int64 `[words]`: whose they are.
        before: int64 `[words, span]`: all but their last tokens, to the right; `ANY` before them.
        last: int64 `[words]`: their last tokens.
    """

    rows: Tensor
    before: Tensor
    last: Tensor


def aligned(tokens: Sequence[int], span: int, filling: int) -> list[int]:
    """The last `span` tokens, filled up before the first."""
    kept = list(tokens[max(0, len(tokens) - span) :])
    return [filling] * (span - len(kept)) + kept


def forbid(
    logits: Tensor,
    words: BadWords,
    tails: Tensor,
    drafts: Tensor,
    token_ids: Tensor | None = None,
    prefixes: Sequence[tuple[int, ...]] = (),
) -> Tensor:
    """Logits with minus infinity where a token would complete a word.

    Example: of the word (3, 5) the token 5 is forbidden where 3 is the last token before it: of the
    three positions around drafts (3, 1) at the second one, whatever the tail is.

    Args:
        logits: `[rows, positions, entries]`.
        words: Of these rows.
        tails: int64 `[rows, span]`: the last tokens of the answers, `NOTHING` before their first.
        drafts: int64 `[rows, drafts]`, at least `positions - 1` of them.
        token_ids: int64 `[entries]`: the target's id of each entry; None is the identity.
        prefixes: As in `penalise`.
    """
    is_due = _is_due(words, tails, drafts, paths_of(prefixes, drafts.shape[1], logits.shape[1]))
    entries = words.last
    if token_ids is not None:
        found = token_ids == words.last[:, None]
        entries, is_due = found.long().argmax(-1), is_due & found.any(-1, keepdim=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    index = (words.rows[:, None] * logits.shape[1] + places) * logits.shape[2] + entries[:, None]
    most = logits.new_full(is_due.shape, torch.inf).masked_fill(is_due, -torch.inf)
    scores = logits.flatten().scatter_reduce(0, index.flatten(), most.flatten(), "amin")
    return scores.view(logits.shape)


def _is_due(
    words: BadWords, tails: Tensor, drafts: Tensor, paths: Sequence[tuple[int, ...]]
) -> Tensor:
    """Where all tokens stand that come before the last one of a word: bool `[words, positions]`."""
    span = tails.shape[1]
    held = [[*range(span), *(span + node for node in path)] for path in paths]
    read = torch.tensor([places[len(places) - span :] for places in held], dtype=torch.long)
    texts = torch.cat([tails, drafts], 1)[:, read.to(drafts.device, non_blocking=True)]
    before = words.before[:, None]
    return ((before == texts[words.rows]) | (before == ANY)).all(-1)
