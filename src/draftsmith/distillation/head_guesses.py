"""How good Medusa heads are at guessing: the rank of the target's token among a head's guesses.

Measured on responses that were not trained on, with the target's own states. Shares by exact rank
say what a guess more is worth, so trees of guesses can be chosen by them.

Source: Cai et al. 2024 (arXiv 2401.10774), section 2.3: accuracies of the heads' top guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.corpus.rollouts import Rollout
from draftsmith.distillation.batches import TrainingSequence, collate, places_in_responses
from draftsmith.distillation.objective import positions_per_chunk
from draftsmith.distillation.signals import by_length
from draftsmith.drafts.medusa import MedusaHeads

NUM_RANKS = 10
_HIT_RATES = (1, 2, 3, 5, 10)
_MAX_POSITIONS = 4096


def held_out_guesses(
    heads: MedusaHeads,
    target: PreTrainedModel,
    token_ids: Tensor | None,
    rollouts: Sequence[Rollout],
) -> dict[str, Any]:
    """The heads' guesses on the coldest of the target's own responses; empty without any.

    Args:
        heads: As they will draft.
        target: Live target.
        token_ids: int64 `[entries]`, the draft's vocabulary; None is the target's.
        rollouts: Held-out ones; so many are taken, from all over them, that a few thousand
            positions are judged.

    Returns:
        `temperature` of the responses, and by head `positions`, `rank_shares` (share of positions
        whose token is the head's r-th guess, r from 1) and `hit_rates` (is among the first r).
    """
    chosen = _chosen(rollouts)
    if not chosen:
        return {}
    # A round begins with the state before a prompt's last token.
    sequences = [
        TrainingSequence(r.prompt_ids + r.response_ids, max(len(r.prompt_ids) - 2, 0))
        for r in chosen
    ]
    hits = torch.zeros(heads.num_heads, NUM_RANKS, dtype=torch.long)
    positions = torch.zeros(heads.num_heads, dtype=torch.long)
    for indices in by_length(sequences):
        found, judged = _count(heads, target, token_ids, [sequences[index] for index in indices])
        hits, positions = hits + found, positions + judged
    return {"temperature": chosen[0].temperature, **guess_rates(hits, positions)}


def guess_rates(hits: Tensor, positions: Tensor) -> dict[str, Any]:
    """Shares and hit rates from counts.

    Args:
        hits: int64 `[heads, ranks]`: positions whose token is the head's r-th guess.
        positions: int64 `[heads]`: all that were judged.
    """
    shares = (hits.double() / positions[:, None].clamp(min=1)).tolist()
    return {
        "positions": positions.tolist(),
        "rank_shares": shares,
        "hit_rates": [
            {str(rank): list(accumulate(own))[rank - 1] for rank in _HIT_RATES} for own in shares
        ],
    }


def rank_hits(logits: Tensor, tokens: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """How many of the tokens are the first, the second, ... guess: int64 `[NUM_RANKS]`.

    Args:
        logits: `[n, entries]`.
        tokens: int64 `[n]`, ids of the target; one that the draft's vocabulary lacks is no guess.
        token_ids: int64 `[entries]`: the target's id of each entry; None is the identity.

    Example: logits [1, 3, 2] guess the tokens 1, 2, 0 in this order.
    """
    guesses = logits.topk(min(NUM_RANKS, logits.shape[-1])).indices
    if token_ids is not None:
        guesses = token_ids[guesses]
    hits = (guesses == tokens[:, None]).sum(0)
    return torch.nn.functional.pad(hits, (0, NUM_RANKS - len(hits)))


def _chosen(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Evenly spaced ones of the lowest temperature, which say most of the target's own choice."""
    answered = [rollout for rollout in rollouts if rollout.response_ids]
    coldest = min((rollout.temperature for rollout in answered), default=0.0)
    pool = [rollout for rollout in answered if rollout.temperature == coldest]
    num_positions = sum(len(rollout.response_ids) for rollout in pool)
    return pool[:: max(1, -(-num_positions // _MAX_POSITIONS))]


@torch.no_grad()
def _count(
    heads: MedusaHeads,
    target: PreTrainedModel,
    token_ids: Tensor | None,
    sequences: Sequence[TrainingSequence],
) -> tuple[Tensor, Tensor]:
    """Hits `[heads, ranks]` and judged positions `[heads]` of some sequences."""
    batch = collate(sequences, range(len(sequences)))
    before, lengths = places_in_responses(batch.mask)
    device = target.device
    tokens, mask = batch.token_ids.to(device), batch.mask.to(device)
    hidden = target.base_model(input_ids=tokens, use_cache=False).last_hidden_state[mask]
    entries = None if token_ids is None else token_ids.to(device)
    hits, positions = [], []
    for head in range(heads.num_heads):
        ahead = head + 1
        is_judged = (before + ahead < lengths).to(device)
        states, wanted = hidden[is_judged], tokens.roll(-1 - ahead, 1)[mask][is_judged]
        found = torch.zeros(NUM_RANKS, dtype=torch.long, device=device)
        size = positions_per_chunk(heads)
        for part, expected in zip(states.split(size), wanted.split(size), strict=True):
            own = heads.run(part, ahead)[:, head]
            found += rank_hits(heads.logits_of(own, head), expected, entries)
        hits.append(found.cpu())
        positions.append(len(wanted))
    return torch.stack(hits), torch.tensor(positions)
