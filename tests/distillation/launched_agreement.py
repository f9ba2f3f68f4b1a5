"""Two processes that find and measure otherwise, to be started by `accelerate launch`.

Usage: python -m tests.distillation.launched_agreement FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from draftsmith.artifacts import write_json
from draftsmith.distillation.processes import join
from draftsmith.errors import ArtifactError
from tests.distillation.small_training import train
from tests.distillation.test_early_stop import judge_of
from tests.drafts.small_models import make_target

# The main process gets better all the time, the other one would end at once.
ALPHAS = ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])


def judged(alphas):
    """What a judge says with a patience of 1, and what it remembers."""
    _, judge = judge_of(alphas, patience=1)
    verdicts = [judge.judge(step) for step in range(1, len(alphas) + 1)]
    return {"ends": verdicts, "evaluations": judge.evaluations, "best": judge.best}


def resumed(folder):
    """The error of a training that goes on from a disk of the process's own."""
    target = make_target("llama")
    options = {"steps": 5, "checkpoint_steps": 4}
    train(target, folder, **options)
    try:
        train(target, folder, **options)
    except ArtifactError as error:
        return error.found
    return "nothing"


def run(folder):
    """Judge and train; every process writes what it saw."""
    place = join().process_index
    facts = {"judged": judged(ALPHAS[place]), "resumed": resumed(folder / f"disk-{place}")}
    write_json(folder / f"process-{place}.json", facts)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
