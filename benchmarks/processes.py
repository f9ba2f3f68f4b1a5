"""What a second process does for a training on CPUs: tokens/s and memory, arms in turn.

Reads a project whose corpus stage has run. The same steps of one recipe run in one process with one
thread and with two, and in two processes with one thread each, as `accelerate launch` starts them;
every step sees the same sequences in all of them. The target's signals are made before. A run that
is finished is kept, so one that was ended goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import any_pair
from benchmarks.measuring import table
from benchmarks.resident import anonymous_bytes
from draftsmith import provenance
from draftsmith.artifacts import digest_json, read_json, short, write_json
from draftsmith.config import compose, load_section
from draftsmith.corpus.dataset import read_corpus, read_facts
from draftsmith.distillation.processes import join
from draftsmith.distillation.recipe import recipe_digest
from draftsmith.distillation.run import Distillation
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.settings import RecipeConfig
from draftsmith.errors import DraftsmithError
from draftsmith.strict import convert
from draftsmith.targets.loading import load_by_digest

# Processes, and threads of each.
ARMS = {
    "1 process, 1 thread": (1, 1),
    "1 process, 2 threads": (1, 2),
    "2 processes, 1 thread each": (2, 1),
}
ROOT = Path(__file__).resolve().parents[1]
_LAUNCH = ROOT / "docs/examples/cluster/ddp.yaml"
_WORK = Path("build/partial/processes")
_STEADY_SHARE = 0.75  # the last of the steps; before, kernels are made
_BYTES_PER_GB = 1e9


@dataclass(frozen=True)
class Training:
    """What every arm trains.

    Attributes:
        project: Folder of the project.
        name: Of the recipe.
        recipe: As it is in this folder.
        config: The project's settings, for so many steps and without checkpoints.
    """

    project: Path
    name: str
    recipe: Any
    config: DistillConfig

    @classmethod
    def of(cls, project: Path, name: str, steps: int) -> Training:
        """A recipe on a project."""
        composed = compose(Path("params.yaml"), Path("conf"), recipes=[name])
        recipe = convert(composed["drafts"], dict[str, RecipeConfig], "drafts")[name]
        config = load_section(project / "build/config.yaml", "distill", DistillConfig)
        changed = {
            "steps": steps,
            "warmup_steps": min(config.warmup_steps, steps),
            "checkpoint_steps": steps + 1,
            "early_stop_patience": 0,
            "signal": "cache",
        }
        return cls(project, name, recipe, dataclasses.replace(config, **changed))

    @property
    def target_digest(self) -> str:
        """The project's target."""
        return str(read_json(self.project / "build/target.json")["digest"])

    @property
    def key(self) -> str:
        """Of what decides the figures."""
        corpus = read_facts(self.project / "data/corpus")["digest"]
        machine = provenance.processor_name(), torch.__version__
        recipe = recipe_digest(self.recipe, self.config)
        return short(digest_json([self.target_digest, corpus, recipe, *machine]))

    def run(self, folder: Path, work: Path) -> None:
        """Train in this process; it writes what it saw into `folder`.

        Args:
            folder: Of this run.
            work: Where the signals are kept.
        """
        target = load_by_digest(self.project / "models/targets", self.target_digest)
        corpus = read_corpus(self.project / "data/corpus")
        job = Distillation(self.name, self.recipe, self.config, target, *corpus)
        speeds: list[float] = []
        seen: dict[str, Any] = {"threads": torch.get_num_threads()}

        def on_step(_step: int, metrics: dict[str, float]) -> None:
            speeds.append(metrics["tokens_per_s"])
            seen["loss"], seen["peak_gb"] = metrics["loss"], metrics["memory_gb"]
            seen["anonymous_gb"] = anonymous_bytes() / _BYTES_PER_GB

        with tempfile.TemporaryDirectory() as draft:
            job.run(Path(draft), work, on_step=on_step)
        seen["tokens_per_s"] = statistics.median(steady(speeds))
        write_json(folder / f"process-{join().process_index}.json", seen)


def steady(speeds: Sequence[float]) -> Sequence[float]:
    """The steps that count."""
    return speeds[-max(1, round(_STEADY_SHARE * len(speeds))) :]


def launch(command: Sequence[str], *, processes: int, threads: int) -> None:
    """Run this program's module in so many processes of so many threads, on CPUs.

    Raises:
        CalledProcessError: One of them failed.
    """
    launcher: list[str] = []
    if processes > 1:
        launcher = ["accelerate.commands.launch", "--config_file", str(_LAUNCH)]
        launcher += ["--num_processes", str(processes), "--main_process_port", "0", "-m"]
    places = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
    }
    subprocess.run(
        [sys.executable, "-m", *launcher, "benchmarks.processes", *command],
        env={**os.environ, **own},
        check=True,
    )


def seen_by(folder: Path) -> list[dict[str, Any]]:
    """What each process of a finished run saw."""
    return [read_json(path) for path in sorted(folder.glob("process-*.json"))]


def measured(training: Training, work: Path, rounds: int) -> dict[str, list[Any]]:
    """What all processes of every arm saw, round by round, the arms in turn."""
    folder = (work / training.key).resolve()
    given = ["--project", str(training.project), "--recipe", training.name, "--work", str(folder)]
    signals = folder / "signals-made"
    if not seen_by(signals):
        command = [*given, "--steps", "1", "--into", str(signals)]
        launch(command, processes=1, threads=max(threads for _, threads in ARMS.values()))
    runs: dict[str, list[Any]] = {name: [] for name in ARMS}
    for number in range(rounds):
        for name, (processes, threads) in ARMS.items():
            into = folder / f"{processes}x{threads}-{number}"
            if len(seen_by(into)) < processes:
                command = [*given, "--steps", str(training.config.steps), "--into", str(into)]
                launch(command, processes=processes, threads=threads)
            runs[name].append(seen_by(into))
    return runs


def summary(runs: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Each arm's figures: the median of its rounds, beside the first arm's, and the largest memory.

    Args:
        runs: By arm what `measured` gives.
    """
    arms: dict[str, Any] = {}
    for name, rounds in runs.items():
        speed = statistics.median(processes[0]["tokens_per_s"] for processes in rounds)
        every = [seen for processes in rounds for seen in processes]
        arms[name] = {
            "tokens_per_s": speed,
            "speedup": speed / next(iter(arms.values()), {"tokens_per_s": speed})["tokens_per_s"],
            "anonymous_gb": max(seen["anonymous_gb"] for seen in every),
            "peak_gb": max(seen["peak_gb"] for seen in every),
            "loss": rounds[0][0]["loss"],
            "rounds": rounds,
        }
    return arms


def shown(arms: Mapping[str, Any]) -> str:
    """The table as text; memory is of each process."""
    rows = [
        [
            name,
            f"{arm['tokens_per_s']:.0f}",
            f"{arm['speedup']:.2f}",
            f"{arm['anonymous_gb']:.2f}",
            f"{arm['peak_gb']:.2f}",
            f"{arm['loss']:.4f}",
        ]
        for name, arm in arms.items()
    ]
    columns = ("tokens/s", "to the first", "GB, no files", "GB, peak", "last loss")
    return table(["training in", *columns], rows)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, default=Path(), help="default: this folder")
    parser.add_argument("--recipe", default="eagle", help="default: eagle")
    parser.add_argument("--steps", type=int, default=120, help="of each run (default: 120)")
    parser.add_argument("--rounds", type=int, default=2, help="of all arms (default: 2)")
    parser.add_argument("--work", type=Path, default=_WORK)
    parser.add_argument("--into", type=Path, help="train in this process and write there")
    parser.add_argument("--out", type=Path, help="JSON; default: docs/measurements/processes-*")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    chosen = _arguments(argv)
    try:
        training = Training.of(chosen.project, chosen.recipe, chosen.steps)
        if chosen.into is not None:
            training.run(chosen.into, chosen.work)
            return 0
        arms = summary(measured(training, chosen.work, chosen.rounds))
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    device = provenance.device()
    report = {
        "schema": 1,
        "device": device,
        "recipe": training.name,
        "steps": chosen.steps,
        "batch_size": training.config.batch_size,
        "arms": arms,
        "provenance": provenance.collect(training.config.seed),
    }
    path = chosen.out or any_pair.place("processes", device)
    write_json(path, report)
    sys.stdout.write(f"{shown(arms)}\nwritten: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
