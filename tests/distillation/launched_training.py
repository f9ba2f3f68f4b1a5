"""Short trainings of every family, to be started by `accelerate launch`.

Usage: python -m tests.distillation.launched_training FOLDER [KILL_AFTER]

One after the other in the same processes, each in a folder of FOLDER that has the family's name;
then those that a checkpoint lies ready for in FOLDER/resumed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from draftsmith.artifacts import write_json
from draftsmith.distillation.building import (
    build_draft,
    in_float32,
    named_layers,
    objective_of,
)
from draftsmith.distillation.processes import divide, divides_target, join
from draftsmith.distillation.signals import OnlineSignals
from draftsmith.distillation.trainer import distill
from draftsmith.drafts.settings import EagleConfig, MedusaConfig, StudentConfig
from tests.distillation.small_training import make_config, some_sequences
from tests.drafts.small_models import NUM_LAYERS, make_target

RECIPES = {
    "student": StudentConfig("student", (0,), 0),
    "eagle": EagleConfig("eagle", (), 0, unroll=2, step_decay=0.8),
    "medusa": MedusaConfig("medusa", 2, 1, own_heads=True, vocabulary_size=0, head_decay=0.8),
}
# Batches of 4, 4 and 1: in the last one a second process has nothing.
NUM_SEQUENCES, HELD_OUT = 10, (4,)
CHECKPOINT = 6  # the only one of a training
CONFIG = make_config(
    steps=10,
    gradient_accumulation=2,
    checkpoint_steps=CHECKPOINT,
    early_stop_patience=9,
    early_stop_steps=3,
    schedule="wsd",
)


def run(root, kill_after=None):
    """Train all; the last process may be killed in the first training."""
    target = make_target("llama")
    folders = [root / family for family in RECIPES]
    folders += sorted(path for path in root.glob("resumed/*") if path.name in RECIPES)
    layers = {name: named_layers(recipe, NUM_LAYERS) for name, recipe in RECIPES.items()}
    drafts = [build_draft(RECIPES[f.name], target, layers[f.name], None) for f in folders]
    join()
    if divides_target():
        divide(target)
    for folder, draft in zip(folders, drafts, strict=True):
        in_float32(draft)
        family = folder.name
        features = layers[family] if family == "eagle" else ()
        train(folder, draft, target, OnlineSignals(target, features), kill_after)
    if join().is_main_process:
        write_json(root / "target.json", {"bytes": bytes_held(target)})


def train(folder, draft, target, signals, kill_after):
    """The main process writes weights and outcome."""

    def on_step(step, _metrics):
        if step == kill_after and join().is_last_process:
            while not (folder / f"checkpoints/step-{CHECKPOINT:08d}").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    outcome = distill(
        objective_of(RECIPES[folder.name], CONFIG, draft, target, None),
        some_sequences(NUM_SEQUENCES),
        signals,
        config=CONFIG,
        checkpoints=folder / "checkpoints",
        held_out=HELD_OUT,
        on_step=on_step,
    )
    if join().is_main_process:
        own = {name: p.data for name, p in draft.named_parameters() if p.requires_grad}
        save_file(own, folder / "draft.safetensors")
        write_json(folder / "outcome.json", outcome)


def bytes_held(target):
    """Of the target's weights, by this process."""
    held = (p.to_local() if isinstance(p, DTensor) else p for p in target.parameters())
    return sum(tensor.nbytes for tensor in held)


if __name__ == "__main__":
    run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
