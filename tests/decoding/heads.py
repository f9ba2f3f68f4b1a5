"""Heads on the states of the decoder's tiny models, fitted to what these say: often right."""

from __future__ import annotations

import copy
from functools import partial

import torch

from draftsmith.decoding import NO_TREES, FeatureProposer, MedusaProposer
from draftsmith.distillation.batches import collate, make_sequences
from draftsmith.distillation.divergences import forward_kl
from draftsmith.distillation.medusa_objective import MedusaObjective
from draftsmith.distillation.signals import OnlineSignals
from draftsmith.distillation.unrolling import UnrolledObjective
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.eagle_start import build_head
from draftsmith.drafts.medusa import HeadShape, MedusaHeads, build_heads
from draftsmith.drafts.student import head_logits

UNROLL = 3
SHAPE = HeadShape(num_heads=4, num_blocks=2, own_heads=False)


def fitted_head(model, texts, *, layers=(0, 1), steps=60, token_ids=None) -> EagleHead:
    """A feature head that was fitted to (prompt, answer) texts of token ids.

    Args:
        model: The target with attention of Transformers' own.
        texts: Each answer has at least a token.
        layers: Of the target, whose inputs are read.
        steps: Of the whole batch.
        token_ids: The head's vocabulary.
    """
    target = copy.deepcopy(model)
    head = build_head(target, layers, token_ids)
    logits = partial(head_logits, head)
    objective = UnrolledObjective(head, logits, forward_kl, unroll=UNROLL, step_decay=1.0)
    _fit(objective, OnlineSignals(target, layers), texts, steps)
    return head.requires_grad_(requires_grad=False)


def fitted_heads(model, texts, *, shape=SHAPE, steps=120, token_ids=None) -> MedusaHeads:
    """The same for heads on the last hidden state."""
    target = copy.deepcopy(model)
    heads = build_heads(target, shape, token_ids)
    objective = MedusaObjective(heads, partial(head_logits, heads), forward_kl, head_decay=1.0)
    _fit(objective, OnlineSignals(target), texts, steps)
    return heads.requires_grad_(requires_grad=False)


def _fit(objective, signals, texts, steps):
    sequences = make_sequences(texts)
    batch = collate(sequences, range(len(sequences)))
    signal = signals.signal(batch)
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _ = objective(batch, signal, torch.device("cpu"))
        (loss / len(signal.hidden)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()


def head_proposer(head, token_ids=None, trees=NO_TREES) -> FeatureProposer | MedusaProposer:
    """A proposer with a copy of the head or the heads."""
    own = copy.deepcopy(head)
    if isinstance(own, MedusaHeads):
        return MedusaProposer(own, token_ids, trees)
    return FeatureProposer(own, own, token_ids, trees)
