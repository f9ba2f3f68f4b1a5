"""A short training of its own, to be started by `accelerate launch`.

Usage: python -m tests.distillation.launched_training FOLDER [KILL_AFTER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file

from draftsmith.artifacts import write_json
from draftsmith.distillation.processes import join
from tests.distillation.small_training import some_sequences, train
from tests.drafts.small_models import make_target

# Batches of 4, 4 and 1: in the last one a second process has nothing.
NUM_SEQUENCES, HELD_OUT = 10, (4,)
OPTIONS = {
    "steps": 10,
    "gradient_accumulation": 2,
    "checkpoint_steps": 4,
    "early_stop_patience": 9,
    "early_stop_steps": 3,
    "schedule": "wsd",
}


def run(folder, kill_after=None):
    """Train; the main process writes weights and outcome."""

    def on_step(step, _metrics):
        if step == kill_after:
            raise KeyboardInterrupt

    student, outcome = train(
        make_target("llama"),
        folder / "checkpoints",
        sequences=some_sequences(NUM_SEQUENCES),
        held_out=HELD_OUT,
        on_step=on_step,
        **OPTIONS,
    )
    if join().is_main_process:
        own = {name: p.data for name, p in student.named_parameters() if p.requires_grad}
        save_file(own, folder / "student.safetensors")
        write_json(folder / "outcome.json", outcome)


if __name__ == "__main__":
    run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
