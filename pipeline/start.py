"""Stage start: where does each draft come from: a known pair, the incumbent, or training?"""

from draftsmith.artifacts import read_json, write_json
from draftsmith.config import load_section, load_value
from draftsmith.console import run_stage
from draftsmith.distillation.settings import DistillConfig
from draftsmith.drafts.settings import CheckpointConfig, RecipeConfig
from draftsmith.drift.settings import DriftConfig
from draftsmith.drift.start import StartConfig, start_report
from draftsmith.registry.known import fetch_sources, known_pairs, possible_digests
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.settings import RegistryConfig
from pipeline import CHAMPIONS, CONFIG, CORPUS, REPORTS, ROOT, START, TARGET


def main() -> None:
    store = PairStore(ROOT, load_section(CONFIG, "registry", RegistryConfig))
    distill = load_section(CONFIG, "distill", DistillConfig)
    recipes = load_value(CONFIG, "drafts", dict[str, RecipeConfig])
    digests = possible_digests(store, recipes, distill)
    target, corpus = read_json(TARGET)["digest"], read_json(CORPUS / "corpus.json")["digest"]
    is_fetched = False
    while not is_fetched:  # each time one damaged pair fewer is known
        report = start_report(
            {name: held.all for name, held in digests.items()},
            known=known_pairs(store, target, corpus, digests),
            incumbent=read_json(REPORTS / "incumbent.json"),
            config=load_section(CONFIG, "start", StartConfig),
            drift=load_section(CONFIG, "drift", DriftConfig),
            imported=[name for name in recipes if isinstance(recipes[name], CheckpointConfig)],
        )
        is_fetched = fetch_sources(store, report, CHAMPIONS)
    write_json(START, report)


if __name__ == "__main__":
    run_stage(main)
