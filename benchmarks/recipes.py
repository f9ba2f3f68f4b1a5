"""What each recipe's draft is worth: trained on one corpus, judged on one machine in one run.

Reads a project whose corpus stage has run; its settings hold but for the recipes and the number of
steps. A draft that is there already is not trained again, and its judgement is kept, so a run that
was killed goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import any_pair
from benchmarks.measuring import table
from draftsmith import provenance
from draftsmith.artifacts import atomic_directory, read_json, write_json
from draftsmith.config import load_section
from draftsmith.console import Progress, count_phase
from draftsmith.corpus.chat import make_chat
from draftsmith.corpus.dataset import read_corpus
from draftsmith.corpus.rollouts import Rollout
from draftsmith.distillation.run import Distillation
from draftsmith.distillation.settings import DistillConfig
from draftsmith.distillation.warm_start import DraftSource
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.drafts.manifest import read_manifest
from draftsmith.drafts.settings import EagleConfig, MedusaConfig, StudentConfig, TrainedConfig
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.benchmark import Bench
from draftsmith.evaluation.record import Evaluator
from draftsmith.evaluation.settings import BenchmarkConfig, EvaluationConfig
from draftsmith.targets.loading import LoadedTarget, load_by_digest

TRIMMED, WHOLE = 8192, 0
BATCH_SIZES = (1, 4, 8, 16)


def _student(layers: tuple[int, ...], vocabulary_size: int) -> StudentConfig:
    return StudentConfig("student", layers, vocabulary_size)


def _eagle(vocabulary_size: int, unroll: int = 2) -> EagleConfig:
    return EagleConfig("eagle", (), vocabulary_size, unroll, 0.8)


RECIPES: dict[str, TrainedConfig] = {
    "student, 1 layer, 8k": _student((0,), TRIMMED),
    "student, 2 layers, 8k": _student((0, -1), TRIMMED),
    "student, 4 layers, 8k": _student((0, 1, -2, -1), TRIMMED),
    "student, 2 layers": _student((0, -1), WHOLE),
    "eagle, 8k": _eagle(TRIMMED),
    "eagle, 8k, unroll 4": _eagle(TRIMMED, 4),
    "eagle, 8k, own head": dataclasses.replace(_eagle(TRIMMED), own_head=True),
    "eagle": _eagle(WHOLE),
    "medusa, 8k": MedusaConfig(
        "medusa", 4, 1, own_heads=False, vocabulary_size=TRIMMED, head_decay=0.8
    ),
}


@dataclass(frozen=True)
class Comparison:
    """All recipes on one project.

    Attributes:
        project: Folder of the project.
        work: Where drafts, checkpoints and judgements are kept.
        target: The project's target.
        corpus: Digest and rollouts.
        distill: Settings of every training.
        source: A draft that the trainings go on from; None starts from the target.
    """

    project: Path
    work: Path
    target: LoadedTarget
    corpus: tuple[str, dict[str, list[Rollout]]]
    distill: DistillConfig
    source: DraftSource | None = None

    def entry(self, name: str, recipe: TrainedConfig) -> dict[str, Any]:
        """What a recipe's draft costs and gives."""
        kept = self._folder(name) / "entry.json"
        if not kept.exists():
            seconds = self._train(name, recipe)
            write_json(kept, self._judge(name) | {"training_s": seconds})
        return read_json(kept)

    def _folder(self, name: str) -> Path:
        kind = name.replace(",", "").replace(" ", "-")
        suffix = "" if self.source is None else "-warm"
        return self.work / f"{kind}-{self.distill.steps}{suffix}"

    def _train(self, name: str, recipe: TrainedConfig) -> float:
        """Seconds of the training; of its last part where it was killed."""
        folder = self._folder(name)
        if not (folder / "draft").exists():
            start = time.perf_counter()
            job = Distillation(name, recipe, self.distill, self.target, *self.corpus, self.source)
            bar = Progress(f"distil {name}", self.distill.steps, unit="steps")
            with atomic_directory(folder / "draft") as draft:
                job.run(draft, self.work / "partial", on_step=bar.on_step)
            write_json(folder / "training.json", {"seconds": time.perf_counter() - start})
        return float(read_json(folder / "training.json")["seconds"])

    def _judge(self, name: str) -> dict[str, Any]:
        config = self.project / "build/config.yaml"
        stop_ids = make_chat(self.target.model, self.target.tokenizer).stop_ids
        rollouts = self.corpus[1]["eval"]
        evaluation = load_section(config, "evaluation", EvaluationConfig)
        evaluator = Evaluator(
            evaluation, self.target.model, self.target.identity, rollouts, stop_ids, count_phase
        )
        folder = self._folder(name) / "draft"
        evaluated = evaluator.evaluate(folder)
        settings = load_section(config, "benchmark", BenchmarkConfig)
        settings = dataclasses.replace(settings, batch_sizes=BATCH_SIZES)
        draft = load_draft(folder, self.target.model, target_digest=None)
        measured = Bench(settings, self.target.model, stop_ids, rollouts, count_phase).measure(
            draft, evaluated, device=provenance.device(), partial=self.work / "partial/benchmark"
        )
        return summary(evaluated, measured) | {
            "trained_parameters": read_manifest(folder).training["trained_parameters"],
            "steps": self.distill.steps,
        }


def summary(evaluated: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the table, of a recipe's entries in both reports."""
    return {
        "alpha": {key: value["mean"] for key, value in evaluated["alpha"].items()},
        "survival": evaluated["survival"],
        "draft_length": measured["draft_length"],
        "tree": measured["tree"],
        "tau": measured["tau"],
        "cost_ratio": measured["cost"]["cost_ratio"],
        "predicted_speedup": measured["predicted_speedup"],
        "speedup": measured["speedup"],
        "ratios": measured["ratios"],
        "batch": measured["batch"],
        "prompt_lookup_tokens_per_s": measured["arms"]["prompt_lookup"]["tokens_per_s"],
        "gamma_0_tokens_per_s": measured["arms"]["gamma_0"]["tokens_per_s"],
        "digest": evaluated["draft_digest"],
        "losslessness": evaluated["losslessness"]["holds"],
    }


def shown(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The table as text."""
    rows = []
    for name, entry in entries.items():
        batches = {int(e["batch_size"]): e["speedup"] for e in entry["batch"]}
        drafts = f"tree {len(entry['tree'])}" if entry["tree"] else str(entry["draft_length"])
        speedup = "{mean:.2f} ({low:.2f} to {high:.2f})".format(**entry["speedup"])
        rows.append(
            [
                name,
                f"{entry['trained_parameters'] / 1e6:.1f} M",
                f"{entry['training_s']:.0f}",
                *(f"{value:.3f}" for value in entry["alpha"].values()),
                drafts,
                f"{entry['tau']:.2f}",
                f"{entry['cost_ratio']:.3f}",
                speedup,
                *(f"{batches[size]:.2f}" for size in BATCH_SIZES[1:]),
            ]
        )
    temperatures = [f"alpha at {key}" for key in next(iter(entries.values()))["alpha"]]
    sizes = [f"batch {size}" for size in BATCH_SIZES[1:]]
    columns = ("draft", "tau", "c", "speedup, batch 1", *sizes)
    return table(["recipe", "trained", "seconds", *temperatures, *columns], rows)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, default=Path(), help="default: this folder")
    parser.add_argument("--work", type=Path, default=Path("build/partial/recipes"))
    parser.add_argument("--steps", type=int, help="of every training; default: the project's")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES])
    parser.add_argument("--warm-start", type=Path, help="folder of a draft to go on from")
    parser.add_argument("--out", type=Path, help="JSON; default: docs/measurements/recipes-*.json")
    return parser.parse_args(argv)


def _comparison(arguments: argparse.Namespace) -> Comparison:
    project: Path = arguments.project
    distill = load_section(project / "build/config.yaml", "distill", DistillConfig)
    if arguments.steps is not None:
        warmup = min(distill.warmup_steps, arguments.steps)
        distill = dataclasses.replace(distill, steps=arguments.steps, warmup_steps=warmup)
    digest = read_json(project / "build/target.json")["digest"]
    source = arguments.warm_start and DraftSource(arguments.warm_start, "")
    return Comparison(
        project,
        arguments.work,
        load_by_digest(project / "models/targets", digest),
        read_corpus(project / "data/corpus"),
        distill,
        source,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    arguments = _arguments(argv)
    device = provenance.device()
    path = arguments.out or any_pair.place("recipes", device)
    try:
        comparison = _comparison(arguments)
        entries = {}
        for name in arguments.recipes:
            entries[name] = comparison.entry(name, RECIPES[name])
            report = {"schema": 1, "device": device, "recipes": entries}
            origin = {"corpus_digest": comparison.corpus[0]}
            write_json(path, report | origin | {"provenance": provenance.collect(0)})
            sys.stdout.write(f"{shown(entries)}\n")
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"written: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
