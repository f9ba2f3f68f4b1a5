"""A short training of its own, to be started by `accelerate launch`.

Usage: python -m tests.distillation.launched_training FOLDER [KILL_AFTER]
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
from draftsmith.distillation.processes import divide, divides_target, join
from tests.distillation.small_training import make_student, some_sequences, train
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
    """Train; the main process writes weights and outcome, the last one may be killed."""

    def on_step(step, _metrics):
        if step == kill_after and join().is_last_process:
            while not (folder / "checkpoints/step-00000004").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    target = make_target("llama")
    student = make_student(target)
    join()
    if divides_target():
        divide(target)
    _, outcome = train(
        target,
        folder / "checkpoints",
        student=student,
        sequences=some_sequences(NUM_SEQUENCES),
        held_out=HELD_OUT,
        on_step=on_step,
        **OPTIONS,
    )
    if join().is_main_process:
        own = {name: p.data for name, p in student.named_parameters() if p.requires_grad}
        save_file(own, folder / "student.safetensors")
        write_json(folder / "outcome.json", outcome)
        write_json(folder / "target.json", {"bytes": bytes_held(target)})


def bytes_held(target):
    """Of the target's weights, by this process."""
    held = (p.to_local() if isinstance(p, DTensor) else p for p in target.parameters())
    return sum(tensor.nbytes for tensor in held)


if __name__ == "__main__":
    run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
