"""What each recipe's draft is worth: trained on one corpus, judged on one machine in one run.

Reads a project whose corpus stage has run; its settings hold but for what a row says
(`benchmarks/recipe_rows.py`). Drafts of the project that were trained alike are taken over, nothing
is trained or judged twice, so a run that was killed goes on where it stopped. The first row is
prompt lookup, which needs no draft.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import any_pair
from benchmarks.copies import Copies
from benchmarks.recipe_rows import FORM, RECIPES, Row, row_of
from benchmarks.recipe_table import alpha_changes, shown, summary
from draftsmith import provenance
from draftsmith.artifacts import atomic_directory, digest_json, read_json, short, write_json
from draftsmith.config import load_section
from draftsmith.console import Progress, count_phase
from draftsmith.corpus.chat import make_chat
from draftsmith.corpus.dataset import read_corpus
from draftsmith.corpus.rollouts import Rollout
from draftsmith.distillation.run import Distillation
from draftsmith.distillation.settings import DistillConfig
from draftsmith.distillation.warm_start import DraftSource
from draftsmith.drafts.checkpoint import copy_draft, load_draft
from draftsmith.drafts.manifest import read_manifest
from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.acceptance import in_turn
from draftsmith.evaluation.benchmark import Bench
from draftsmith.evaluation.record import Evaluator
from draftsmith.evaluation.settings import BenchmarkConfig, EvaluationConfig
from draftsmith.targets.loading import LoadedTarget, load_by_digest

BATCH_SIZES = (1, 4, 8, 16)
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Comparison:
    """All recipes on one project.

    Attributes:
        project: Folder of the project.
        work: Where drafts, checkpoints and judgements are kept, by all that decides them.
        target: The project's target.
        corpus: Digest and rollouts.
        evaluation: The project's evaluation section.
        benchmark: Its benchmark section, with the batch sizes of the table.
    """

    project: Path
    work: Path
    target: LoadedTarget
    corpus: tuple[str, dict[str, list[Rollout]]]
    evaluation: EvaluationConfig
    benchmark: BenchmarkConfig

    def entry(self, row: Row) -> dict[str, Any]:
        """What a row's draft costs and gives."""
        kept = self._folder(row) / f"entry-{self._judged_by(self.evaluation)}.json"
        if not kept.exists():
            facts = self._trained(row)
            write_json(kept, facts | self._judge(self._folder(row) / "draft"))
        return read_json(kept)

    def settings(self, distill: DistillConfig) -> dict[str, Any]:
        """What all rows share; an entry's own steps come before these."""
        sections = {"distill": distill, "evaluation": self.evaluation, "benchmark": self.benchmark}
        return {name: asdict(section) for name, section in sections.items()}

    def _judged_by(self, *more: EvaluationConfig) -> str:
        """What a judgement rests on besides the draft."""
        settings = [asdict(section) for section in (self.benchmark, *more)]
        digests = [self.target.identity.digest, self.corpus[0]]
        return short(digest_json([digests, settings, provenance.device()]))

    def _folder(self, row: Row) -> Path:
        return self.work / row.folder(self.target.identity.digest, self.corpus[0])

    def _trained(self, row: Row) -> dict[str, Any]:
        """The draft in the row's folder; its seconds are None where it was taken over."""
        folder, clock = self._folder(row), StepClock()
        if not folder.exists():
            alike = self._trained_alike(row)
            with atomic_directory(folder) as made:
                draft = made / "draft"
                draft.mkdir()
                if alike is None:
                    self._train(row, draft, clock)
                else:
                    copy_draft(alike, draft)
                write_json(made / "training.json", {"seconds": clock.seconds(row.config.steps)})
        facts = read_manifest(folder / "draft").training
        return {
            "training_s": read_json(folder / "training.json")["seconds"],
            "trained_parameters": facts["trained_parameters"],
            "held_out_coverage": facts["held_out_coverage"],
            "steps": row.config.steps,
            "predicted_tokens": facts["predicted_tokens"],
            "started_from": facts.get("started_from"),
        }

    def _trained_alike(self, row: Row) -> Path | None:
        """A draft of the project that this training would give, too."""
        wanted = (row.digest, self.target.identity.digest, row.corpus(self.corpus)[0])
        places = ("models/drafts/*", "models/champions/*/draft")
        for folder in (found for place in places for found in self.project.glob(place)):
            draft = read_manifest(folder)
            if (draft.recipe_digest, draft.target_digest, draft.corpus_digest) == wanted:
                _LOG.info("recipe=%s state=taken_over from=%s", row.name, folder)
                return folder
        return None

    def _train(self, row: Row, draft: Path, clock: StepClock) -> None:
        bar = Progress(f"distil {row.name}", row.config.steps, unit="steps")

        def on_step(step: int, metrics: dict[str, float]) -> None:
            clock.tick(step)
            bar.on_step(step, metrics)

        corpus = row.corpus(self.corpus)
        job = Distillation(row.slug, row.recipe, row.config, self.target, *corpus, row.source)
        job.run(draft, self.work / "partial", on_step=on_step)

    def _judge(self, draft: Path) -> dict[str, Any]:
        rollouts = self.corpus[1]["eval"]
        stop_ids = make_chat(self.target.model, self.target.tokenizer).stop_ids
        model, identity = self.target.model, self.target.identity
        evaluator = Evaluator(self.evaluation, model, identity, rollouts, stop_ids, count_phase)
        evaluated = evaluator.evaluate(draft)
        bench = Bench(self.benchmark, model, stop_ids, rollouts, count_phase)
        partial = self.work / "partial/benchmark"
        loaded = load_draft(draft, model, target_digest=None)
        measured = bench.measure(loaded, evaluated, device=provenance.device(), partial=partial)
        return summary(evaluated, measured)

    def prompt_lookup(self) -> dict[str, Any]:
        """What copies alone give: the best length by batch size."""
        kept = self.work / f"lookup-{self._judged_by()}.json"
        if not kept.exists():
            write_json(kept, self._copies())
        return read_json(kept)

    def _copies(self) -> dict[str, Any]:
        unique = {r.prompt_id: (r.domain, r.prompt_ids) for r in self.corpus[1]["eval"]}
        prompts = in_turn([(name, domain, ids) for name, (domain, ids) in unique.items()])
        stop_ids = make_chat(self.target.model, self.target.tokenizer).stop_ids
        engines = Copies(self.target.model, stop_ids, self.benchmark)
        rest = prompts[self.benchmark.calibration_prompts :][: self.benchmark.prompts]
        return {str(size): engines.measured(rest, size) for size in self.benchmark.batch_sizes}


class StepClock:
    """Seconds of a training's steps: what comes before the first one is shared by recipes."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)

    def tick(self, step: int) -> None:
        """A step is done."""
        self._last = (step, time.perf_counter())
        self._first = self._first or self._last

    def seconds(self, steps: int) -> float | None:
        """Of so many steps at the pace that was seen; None where none was."""
        if self._first is None or self._first[0] == self._last[0]:
            return None
        (first, start), (last, end) = self._first, self._last
        return (end - start) / (last - first) * steps


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--project", type=Path, default=Path(), help="default: this folder")
    parser.add_argument("--work", type=Path, help="default: build/partial/recipes of the project")
    parser.add_argument("--steps", type=int, help="where a row has none; default: the project's")
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=[*RECIPES],
        metavar="ROW",
        help=f"{FORM}; RECIPE one of {'; '.join(RECIPES)}; default: all of them",
    )
    parser.add_argument(
        "--warm-start", type=Path, help="folder of the draft that warm rows go on from"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON; default: docs/measurements/recipe-table-*.json"
    )
    return parser.parse_args(argv)


def _rows(arguments: argparse.Namespace, project: Path) -> list[Row]:
    config = load_section(project / "build/config.yaml", "distill", DistillConfig)
    if arguments.steps is not None:
        warmup = min(config.warmup_steps, arguments.steps)
        config = dataclasses.replace(config, steps=arguments.steps, warmup_steps=warmup)
    source = arguments.warm_start and DraftSource(arguments.warm_start, "")
    return [row_of(name, config, source) for name in arguments.recipes]


def _comparison(arguments: argparse.Namespace, project: Path) -> Comparison:
    config = project / "build/config.yaml"
    digest = read_json(project / "build/target.json")["digest"]
    benchmark = load_section(config, "benchmark", BenchmarkConfig)
    return Comparison(
        project,
        arguments.work or project / "build/partial/recipes",
        load_by_digest(project / "models/targets", digest),
        read_corpus(project / "data/corpus"),
        load_section(config, "evaluation", EvaluationConfig),
        dataclasses.replace(benchmark, batch_sizes=BATCH_SIZES),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    arguments = _arguments(argv)
    device = provenance.device()
    path = arguments.out or any_pair.place("recipe-table", device)
    entries: dict[str, Any] = {}
    try:
        rows = _rows(arguments, arguments.project)
        comparison = _comparison(arguments, arguments.project)
        for row in rows:
            row.corpus(comparison.corpus)  # what cannot be trained is told before hours have gone
        lookup = comparison.prompt_lookup()
        origin = {
            "schema": 3,
            "device": device,
            "corpus_digest": comparison.corpus[0],
            "target_digest": comparison.target.identity.digest,
            "settings": comparison.settings(rows[0].config),
            "prompt_lookup": lookup,
        }
        for row in rows:
            entries[row.name] = comparison.entry(row)
            changes = alpha_changes(entries)
            written = {"recipes": entries, "alpha_changes": changes}
            write_json(path, origin | written | {"provenance": provenance.collect(0)})
            sys.stdout.write(f"{shown(lookup, entries, changes)}\n")
            sys.stdout.flush()
    except DraftsmithError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"written: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
