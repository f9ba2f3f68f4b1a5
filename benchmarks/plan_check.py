"""How far a plan is from what a distillation really takes: memory of the process, files on disk.

Reads a project whose corpus stage has run. Each recipe is distilled for a few steps in a process of
its own, whose anonymous memory is read every millisecond; what it held before, with the target
loaded, is taken off. On a CPU alone: an accelerator has an allocator of its own to ask.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import any_pair
from benchmarks.measuring import table
from draftsmith import provenance
from draftsmith.artifacts import read_json, write_json
from draftsmith.config import compose, load_section
from draftsmith.corpus.dataset import read_corpus
from draftsmith.corpus.rollouts import Rollout
from draftsmith.distillation.run import Distillation
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.settings import RecipeConfig
from draftsmith.planning.corpus import counted
from draftsmith.planning.job import Job, Machine, Rates
from draftsmith.planning.models import CacheShape
from draftsmith.planning.plan import plan
from draftsmith.strict import convert
from draftsmith.targets.loading import load_by_digest, target_directory

RECIPES = ("student", "eagle", "medusa")
STEPS, CHECKPOINT_STEPS, RESPONSES = 12, 5, 48
_PAUSE_S = 0.001


@dataclass
class Watch:
    """The most that was held in each phase: signals until the first step is done, then training."""

    work: Path
    base: int = 0
    phase: str = "signals"
    memory: dict[str, int] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)
    is_over: bool = False

    def run(self) -> None:
        """Read until it is over."""
        pause = threading.Event()
        while not self.is_over:
            grown = anonymous_bytes() - self.base
            self.memory[self.phase] = max(grown, self.memory.get(self.phase, 0))
            pause.wait(_PAUSE_S)

    def on_step(self, step: int, _metrics: dict[str, float]) -> None:
        """Go to the next phase; look at the disk."""
        for name in ("signals", "checkpoints"):
            size = bytes_below(self.work / name)
            self.disk[name] = max(size, self.disk.get(name, 0))
        if step == 0:
            give_back()
            self.phase = "training"
        if step == STEPS - 1:
            self.is_over = True


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def give_back() -> None:
    """Let the C library give what is free back to the system."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def bytes_below(folder: Path) -> int:
    """Sizes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True)
class Check:
    """What is distilled in this check.

    Attributes:
        project: Folder of the project.
        config: The distill section, cut to a few steps.
        rollouts: A few of the project's.
    """

    project: Path
    config: DistillConfig
    rollouts: dict[str, list[Rollout]]
    corpus_digest: str

    @classmethod
    def of(cls, project: Path) -> Check:
        """A check of this project."""
        config = load_section(project / "build/config.yaml", "distill", DistillConfig)
        config = dataclasses.replace(
            config, steps=STEPS, checkpoint_steps=CHECKPOINT_STEPS, warmup_steps=1, signal="cache"
        )
        digest, splits = read_corpus(project / "data/corpus")
        longest = sorted(splits["train"], key=lambda row: -len(row.response_ids))
        few = {"train": longest[:RESPONSES], "eval": splits["eval"][:8]}
        return cls(project, config, few, digest)

    def recipe(self, name: str) -> Any:  # noqa: ANN401  of any family
        """The recipe of this name, as it is in this folder."""
        found = compose(Path("params.yaml"), Path("conf"), recipes=[name])
        return convert(found["drafts"], dict[str, RecipeConfig], "drafts")[name]

    def digest(self) -> str:
        """The target's."""
        return str(read_json(self.project / "build/target.json")["digest"])

    def planned(self, name: str) -> dict[str, Any]:
        """The plan of a recipe."""
        folder = target_directory(self.project / "models/targets", self.digest())
        job = Job(
            folder,
            "auto",
            self.config,
            counted(self.rollouts),
            CacheShape(1, 64),
            Machine("cpu"),
        )
        return plan(job, {name: self.recipe(name)}, Rates())

    def measured(self, name: str) -> dict[str, Any]:
        """What a training of it takes."""
        target = load_by_digest(self.project / "models/targets", self.digest(), device="cpu")
        with torch.no_grad():  # what is loaded at a first forward is not of the training
            target.model(input_ids=torch.arange(64)[None])
        job = Distillation(
            name, self.recipe(name), self.config, target, self.corpus_digest, self.rollouts
        )
        with tempfile.TemporaryDirectory() as folder:
            work, draft = Path(folder) / "partial", Path(folder) / "draft"
            draft.mkdir()
            give_back()
            watch = Watch(work, anonymous_bytes())
            reader = threading.Thread(target=watch.run)
            reader.start()
            try:
                job.run(draft, work, on_step=watch.on_step)
            finally:
                watch.is_over = True
                reader.join()
            return {"memory": watch.memory, "disk": watch.disk | {"drafts": bytes_below(draft)}}


def compared(planned: dict[str, Any], measured: dict[str, Any], name: str) -> dict[str, Any]:
    """Planned and measured bytes of each part."""
    entry, disk = planned["recipes"][name], planned["disk"]
    weights = planned["target"]["weights_bytes"]
    parts = {
        phase: (entry["memory"][phase]["total"] - weights, measured["memory"][phase])
        for phase in ("signals", "training")
    }
    # What is measured is what is left behind a step; the plan counts the one being replaced, too.
    parts["checkpoint"] = (entry["sizes"]["checkpoint"], measured["disk"]["checkpoints"])
    parts["signal cache"] = (disk["signal_cache"], measured["disk"]["signals"])
    parts["draft"] = (disk["drafts"], measured["disk"]["drafts"])
    return {
        part: {"planned_bytes": ours, "measured_bytes": theirs, "ratio": ours / theirs}
        for part, (ours, theirs) in parts.items()
    }


def shown(recipes: dict[str, Any]) -> str:
    """The comparison as text, in MB."""
    rows = [
        [
            f"{name}, {part}",
            f"{found['planned_bytes'] / 1e6:.1f}",
            f"{found['measured_bytes'] / 1e6:.1f}",
            f"{found['ratio']:.2f}",
        ]
        for name, parts in recipes.items()
        for part, found in parts.items()
    ]
    return table(["MB", "planned", "measured", "ratio"], rows)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, default=Path(), help="default: this folder")
    parser.add_argument("--recipe", choices=RECIPES, help="measure this one in this process")
    parser.add_argument("--out", type=Path, help="JSON; default: docs/measurements/plan-*.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    arguments = _arguments(argv)
    check = Check.of(arguments.project)
    if arguments.recipe is not None:
        sys.stdout.write(json.dumps(check.measured(arguments.recipe)) + "\n")
        return 0
    recipes = {}
    for name in RECIPES:
        command = [sys.executable, "-m", "benchmarks.plan_check", "--recipe", name]
        command += ["--project", str(arguments.project)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        recipes[name] = compared(check.planned(name), measured, name)
    device = provenance.device()
    machine = {"kind": "virtual machine", "cores": len(os.sched_getaffinity(0))}
    report = {"schema": 1, "device": device, "machine": machine, "recipes": recipes}
    settings = {"steps": STEPS, "responses": RESPONSES, "corpus_digest": check.corpus_digest}
    path = arguments.out or any_pair.place("plan", device)
    write_json(path, report | settings | {"provenance": provenance.collect(0)})
    sys.stdout.write(f"{shown(recipes)}\nwritten: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
