"""Stage distill (one run a recipe): train a draft, or take the one that stage start names."""

import sys

from draftsmith.artifacts import atomic_directory, read_json, short
from draftsmith.config import load_section
from draftsmith.console import Progress, run_stage
from draftsmith.corpus.dataset import SPLITS, read_facts, read_split
from draftsmith.distillation.run import Distillation
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.checkpoint import copy_draft
from draftsmith.drafts.settings import StudentConfig
from draftsmith.targets.loading import load_by_digest
from pipeline import CHAMPIONS, CONFIG, CORPUS, DRAFTS, PARTIAL, START, TARGET, TARGETS


def main() -> None:
    name = sys.argv[1]
    start = read_json(START)["recipes"][name]
    if start["action"] != "retrain":
        copy_draft(CHAMPIONS / short(start["source_pair_digest"]) / "draft", DRAFTS / name)
        return
    config = load_section(CONFIG, "distill", DistillConfig)
    target = load_by_digest(TARGETS, read_json(TARGET)["digest"])
    bar = Progress(f"distil {name}", config.steps, unit="steps")
    job = Distillation(
        name=name,
        recipe=load_section(CONFIG, f"drafts.{name}", StudentConfig),
        config=config,
        target=target,
        corpus_digest=read_facts(CORPUS)["digest"],
        rollouts={split: read_split(CORPUS, split) for split in SPLITS},
    )
    with atomic_directory(DRAFTS / name) as folder:
        job.run(folder, PARTIAL / "distill", on_step=bar.on_step)


if __name__ == "__main__":
    run_stage(main)
