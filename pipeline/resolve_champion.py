"""Stage resolve_champion: who is @champion, whom did it replace, who served another target?"""

from draftsmith.artifacts import read_json, write_json
from draftsmith.config import load_section
from draftsmith.console import run_stage
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.settings import RegistryConfig
from pipeline import CHAMPION, CHAMPIONS, CONFIG, INCUMBENT, ROOT, TARGET


def main() -> None:
    store = PairStore(ROOT, load_section(CONFIG, "registry", RegistryConfig))
    champion, predecessor = store.champion(), store.predecessor()
    incumbent = store.incumbent(read_json(TARGET)["digest"])
    for pair in (champion, predecessor, incumbent):
        if pair is not None:
            store.fetch(pair, CHAMPIONS)
    write_json(CHAMPION, {"champion": champion, "predecessor": predecessor})
    write_json(INCUMBENT, {"incumbent": incumbent})


if __name__ == "__main__":
    run_stage(main)
