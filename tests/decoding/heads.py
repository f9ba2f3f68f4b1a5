"""Feature heads of the decoder's tiny models, fitted to what these say: they are often right."""

from __future__ import annotations

import copy

import torch

from draftsmith.decoding import FeatureProposer
from draftsmith.distillation.batches import collate, make_sequences
from draftsmith.distillation.divergences import forward_kl
from draftsmith.distillation.signals import OnlineSignals
from draftsmith.distillation.unrolling import UnrolledObjective
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.eagle_start import build_head
from draftsmith.drafts.student import head_logits

UNROLL = 3


def fitted_head(model, texts, *, layers=(0, 1), steps=60, token_ids=None) -> EagleHead:
    """A head that was fitted to (prompt, answer) texts of token ids.

    Args:
        model: The target with attention of Transformers' own.
        texts: Each answer has at least a token.
        layers: Of the target, whose inputs are read.
        steps: Of the whole batch.
        token_ids: The head's vocabulary.
    """
    target = copy.deepcopy(model)
    head = build_head(target, layers, token_ids)
    sequences = make_sequences(texts)
    batch = collate(sequences, range(len(sequences)))
    signal = OnlineSignals(target, layers).signal(batch)
    objective = UnrolledObjective(
        head, lambda hidden: head_logits(head, hidden), forward_kl, unroll=UNROLL, step_decay=1.0
    )
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _ = objective(batch, signal, torch.device("cpu"))
        (loss / len(signal.hidden)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return head.requires_grad_(requires_grad=False)


def head_proposer(head: EagleHead, token_ids=None) -> FeatureProposer:
    """A proposer with a copy of the head."""
    own = copy.deepcopy(head)
    return FeatureProposer(own, own, token_ids)
