"""How far a plan is from what a distillation really takes: memory of the process, files on disk.

Reads a project whose corpus stage has run. Each recipe is distilled for a few steps in a process of
its own, twice: the first time for all that is loaded or made once. What the second one adds to the
process is compared, in one that gives freed blocks back and in one that keeps them as the C library
does. On a CPU alone: an accelerator has an allocator of its own to ask.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import any_pair
from benchmarks.measuring import table
from benchmarks.resident import RETURNING, Growth, anonymous_bytes, give_back
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
from draftsmith.targets.loading import LoadedTarget, load_by_digest, target_directory

RECIPES = ("student", "eagle", "medusa")
STEPS, CHECKPOINT_STEPS, RESPONSES = 12, 8, 24


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
        give_back()
        at_first = anonymous_bytes()
        self._train(name, target, self.config)
        growth, disk = self._train(name, target, self.config)
        return {"memory": growth.peaks, "disk": disk, "made_once": growth.base - at_first}

    def _train(
        self, name: str, target: LoadedTarget, config: DistillConfig
    ) -> tuple[Growth, dict[str, int]]:
        """Growth in making signals and in the steps before the first checkpoint; files."""
        job = Distillation(
            name, self.recipe(name), config, target, self.corpus_digest, self.rollouts
        )
        disk: dict[str, int] = {}
        with tempfile.TemporaryDirectory() as folder, Growth("signals") as growth:
            work, draft = Path(folder) / "partial", Path(folder) / "draft"
            draft.mkdir()

            def on_step(step: int, _metrics: dict[str, float]) -> None:
                for part in ("signals", "checkpoints"):
                    disk[part] = max(bytes_below(work / part), disk.get(part, 0))
                if step == 0:
                    growth.begin("training")
                if step == CHECKPOINT_STEPS - 2:
                    growth.begin("rest")

            job.run(draft, work, on_step=on_step)
            return growth, disk | {"drafts": bytes_below(draft)}


def bytes_below(folder: Path) -> int:
    """Sizes of all files; a checkpoint may be renamed or removed meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):  # which passes over folders that are gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(root) / name).stat().st_size
    return total


def compared(
    planned: dict[str, Any], measured: dict[str, Any], kept: dict[str, Any], name: str
) -> dict[str, Any]:
    """Planned and measured bytes of each part.

    Args:
        planned: The plan.
        measured: By a process that gives freed blocks back.
        kept: By one that keeps them as the C library does.
        name: Of the recipe.
    """
    entry, disk = planned["recipes"][name], planned["disk"]
    weights = planned["target"]["weights_bytes"]
    parts = {}
    for phase in ("signals", "training"):
        memory = entry["memory"][phase]
        # No checkpoint is written while these are measured.
        ours = memory["total"] - weights - memory.get("checkpoint", 0)
        parts[phase] = (ours, measured["memory"][phase])
        parts[f"{phase}, freed blocks kept"] = (ours, kept["memory"][phase])
    # What is measured is what is left behind a step; the plan counts the one being replaced, too.
    parts["checkpoint"] = (entry["sizes"]["checkpoint"], measured["disk"]["checkpoints"])
    parts["signal cache"] = (disk["signal_cache"], measured["disk"]["signals"])
    parts["draft"] = (disk["drafts"], measured["disk"]["drafts"])
    return {
        part: {"planned_bytes": ours, "measured_bytes": theirs, "ratio": ours / theirs}
        for part, (ours, theirs) in parts.items()
    }


def _measured_apart(project: Path, name: str, environment: dict[str, str]) -> dict[str, Any]:
    """What `Check.measured` says, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.plan_check", "--recipe", name]
    command += ["--project", str(project)]
    own = {**os.environ, **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=own)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


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
    recipes, once = {}, {}
    for name in RECIPES:
        returned, kept = (
            _measured_apart(arguments.project, name, environment) for environment in (RETURNING, {})
        )
        recipes[name] = compared(check.planned(name), returned, kept, name)
        once[name] = returned["made_once"]
    device = provenance.device()
    machine = {"kind": "virtual machine", "cores": len(os.sched_getaffinity(0))}
    report = {"schema": 2, "device": device, "machine": machine, "recipes": recipes}
    settings = {"steps": STEPS, "responses": RESPONSES, "corpus_digest": check.corpus_digest}
    settings["made_once_bytes"] = once
    path = arguments.out or any_pair.place("plan", device)
    write_json(path, report | settings | {"provenance": provenance.collect(0)})
    sys.stdout.write(f"{shown(recipes)}\nwritten: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
