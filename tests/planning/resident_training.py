"""What short trainings add to their process, each beside its plan.

Usage: python -m tests.planning.resident_training FOLDER   (holds the config of a target)
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from benchmarks.resident import Growth
from draftsmith.distillation.batches import TrainingSequence
from draftsmith.distillation.building import build_draft, in_float32, objective_of
from draftsmith.distillation.signals import OnlineSignals
from draftsmith.distillation.trainer import distill
from draftsmith.drafts.settings import EagleConfig, MedusaConfig, StudentConfig
from draftsmith.planning.corpus import CorpusSize
from draftsmith.planning.job import Rates
from draftsmith.planning.models import causal_lm, draft_layers
from draftsmith.planning.plan import plan
from tests.planning.small_plans import make_job

PROMPT, RESPONSE, BATCH_SIZE, ENTRIES = 8, 150, 8, 4096
CORPUS = CorpusSize(
    "data/corpus", BATCH_SIZE, BATCH_SIZE * RESPONSE, BATCH_SIZE * PROMPT, 0, 0, PROMPT, RESPONSE
)
RUNS = {
    "student": (StudentConfig("student", (0, -1), ENTRIES), {}),
    "eagle": (EagleConfig("eagle", (), ENTRIES, 2, 0.8), {"mixed_precision": "bf16"}),
    "medusa": (
        MedusaConfig("medusa", 4, 1, own_heads=False, vocabulary_size=ENTRIES, head_decay=0.8),
        {"gradient_accumulation": 2},
    ),
}


def job_of(folder, changes):
    """Two steps and no checkpoint."""
    options = {"steps": 2, "checkpoint_steps": 2, "batch_size": BATCH_SIZE, **changes}
    dtype = "bfloat16" if changes.get("mixed_precision") == "bf16" else "float32"
    return make_job(folder, corpus=CORPUS, dtype=dtype, **options)


def train(job, recipe, target):
    """Sequences of one length, as a plan takes them to be."""
    AcceleratorState._reset_state(reset_partial_state=True)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(ENTRIES, (BATCH_SIZE, PROMPT + RESPONSE), generator=generator)
    layers = draft_layers(recipe, target)
    ids = torch.arange(ENTRIES)
    draft = build_draft(recipe, target, layers, ids)
    draft.set_attn_implementation("eager")
    in_float32(draft)
    with tempfile.TemporaryDirectory() as checkpoints:
        distill(
            objective_of(recipe, job.config, draft, target, ids),
            [TrainingSequence(row.tolist(), PROMPT - 1) for row in rows],
            OnlineSignals(target, layers if recipe.family == "eagle" else ()),
            config=job.config,
            checkpoints=Path(checkpoints),
        )


def compared(folder, name):
    """Planned and measured bytes; a first training is for what is loaded or made once."""
    recipe, changes = RUNS[name]
    job = job_of(folder, changes)
    report = plan(job, {name: recipe}, Rates())
    target = causal_lm(folder, job.dtype)
    train(job, recipe, target)
    with Growth("training") as growth:
        train(job, recipe, target)
    phases = report["recipes"][name]["memory"]
    totals = [phases[phase]["total"] for phase in ("signals", "training")]
    planned = max(totals) - report["target"]["weights_bytes"]
    return {"planned": planned, "measured": growth.peaks["training"]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: compared(Path(sys.argv[1]), name) for name in RUNS}))
