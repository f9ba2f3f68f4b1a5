"""Stage distill (one run a recipe): train a draft, or take over the one that is named."""

import sys

from draftsmith.artifacts import atomic_directory, read_json
from draftsmith.config import load_section, load_value
from draftsmith.console import Progress, run_stage
from draftsmith.corpus.dataset import read_corpus
from draftsmith.distillation.imported import take_over
from draftsmith.distillation.processes import loading_device, written_by_main
from draftsmith.distillation.run import Distillation
from draftsmith.distillation.settings import DistillConfig
from draftsmith.distillation.warm_start import source_of
from draftsmith.drafts.checkpoint import copy_draft
from draftsmith.drafts.settings import CheckpointConfig, RecipeConfig
from draftsmith.targets.identity import read_identity
from draftsmith.targets.loading import load_by_digest
from pipeline import CHAMPIONS, CONFIG, CORPUS, DRAFTS, PARTIAL, START, TARGET, TARGETS


def main() -> None:
    name = sys.argv[1]
    start = read_json(START)["recipes"][name]
    recipe = load_value(CONFIG, "drafts", dict[str, RecipeConfig])[name]
    with written_by_main(DRAFTS / name) as draft:
        if (source := source_of(start, CHAMPIONS)) and start["action"] != "warm_start":
            copy_draft(source.directory, draft)
        elif isinstance(recipe, CheckpointConfig):
            take_over(recipe, read_identity(TARGET), draft)
        else:
            config = load_section(CONFIG, "distill", DistillConfig).reseeded(start["reseed"])
            target = load_by_digest(TARGETS, read_json(TARGET)["digest"], device=loading_device())
            job = Distillation(name, recipe, config, target, *read_corpus(CORPUS), source)
            bar = Progress(f"distil {name}", job.settings.steps, unit="steps")
            with atomic_directory(draft) as folder:
                job.run(folder, PARTIAL / "distill", on_step=bar.on_step)


if __name__ == "__main__":
    run_stage(main)
