"""A handful of sequences, a student to train on them, and a budget of seconds."""

from __future__ import annotations

import torch

from draftsmith.distillation.batches import make_sequences
from draftsmith.distillation.settings import DistillConfig
from draftsmith.distillation.signals import OnlineSignals
from draftsmith.distillation.trainer import StudentObjective, distill
from draftsmith.drafts.student import build_student, head_logits
from tests.drafts.small_models import VOCAB_SIZE


def make_config(**changes):
    plain = {
        "steps": 10,
        "batch_size": 4,
        "gradient_accumulation": 1,
        "learning_rate": 3e-3,
        "weight_decay": 0.01,
        "warmup_steps": 1,
        "schedule": "cosine",
        "max_grad_norm": 1.0,
        "mixed_precision": "no",
        "signal": "online",
        "max_cache_gb": 1.0,
        "checkpoint_steps": 4,
        "log_steps": 1,
        "seed": 0,
    }
    return DistillConfig(**(plain | changes))


def some_sequences(count=6, seed=3):
    """Prompts of 4 tokens and responses of 5, 6, 7, ... tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size):
        return torch.randint(VOCAB_SIZE, (size,), generator=generator).tolist()

    return make_sequences([(draw(4), draw(5 + index)) for index in range(count)])


def make_student(target, layers=(0,), token_ids=None):
    """A student with float32 weights, the form that the trainer takes."""
    student = build_student(target, layers, token_ids)
    for parameter in student.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return student


def train(target, folder, *, sequences=None, student=None, signals=None, on_step=None, **changes):
    """Train a fresh student; returns it with the outcome."""
    student = make_student(target) if student is None else student
    outcome = distill(
        StudentObjective(student, lambda hidden: head_logits(student, hidden)),
        some_sequences() if sequences is None else sequences,
        OnlineSignals(target) if signals is None else signals,
        config=make_config(**changes),
        checkpoints=folder,
        on_step=on_step or (lambda _step, _metrics: None),
    )
    return student, outcome


def weights_of(student):
    return {name: p.detach().clone() for name, p in student.named_parameters()}


def are_equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
