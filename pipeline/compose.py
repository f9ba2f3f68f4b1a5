"""Stage compose: params.yaml and conf/ become build/config.yaml, checked key by key."""

from pathlib import Path

from draftsmith.config import check_agreement, compose, write_config
from draftsmith.console import run_stage
from draftsmith.corpus.settings import CorpusConfig
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.settings import RecipeConfig
from draftsmith.drift.settings import DriftConfig, MonitorConfig
from draftsmith.drift.start import StartConfig
from draftsmith.evaluation.settings import BenchmarkConfig, EvaluationConfig
from draftsmith.registry.gate_settings import GateConfig
from draftsmith.registry.settings import RegistryConfig
from draftsmith.targets.settings import TargetConfig
from pipeline import CONFIG

SCHEMA = {
    "target": TargetConfig,
    "corpus": CorpusConfig,
    "drafts": RecipeConfig,
    "distill": DistillConfig,
    "evaluation": EvaluationConfig,
    "benchmark": BenchmarkConfig,
    "drift": DriftConfig,
    "monitor": MonitorConfig,
    "start": StartConfig,
    "gate": GateConfig,
    "registry": RegistryConfig,
}


def main() -> None:
    config = compose(Path("params.yaml"), Path("conf"), schema=SCHEMA)
    check_agreement(config)
    write_config(CONFIG, config)


if __name__ == "__main__":
    run_stage(main)
