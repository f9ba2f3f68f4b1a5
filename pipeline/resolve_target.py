"""Stage resolve_target: which target is it? Content, never location."""

from functools import partial

from draftsmith.artifacts import write_json
from draftsmith.config import load_section
from draftsmith.console import run_stage
from draftsmith.registry.mlflow_target import fetch_model
from draftsmith.targets.resolved import remember_resolved
from draftsmith.targets.settings import TargetConfig
from draftsmith.targets.source import resolve
from pipeline import CONFIG, ROOT, TARGET, TARGETS


def main() -> None:
    config = load_section(CONFIG, "target", TargetConfig)
    fetch = partial(fetch_model, root=ROOT)
    found = resolve(config, root=TARGETS, fetch_model=fetch)
    remember_resolved(TARGETS, config, found.source)
    write_json(TARGET, found.identity)


if __name__ == "__main__":
    run_stage(main)
