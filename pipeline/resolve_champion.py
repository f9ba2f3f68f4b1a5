"""Stage resolve_champion: who is @champion, whom did it replace, who served another target?"""

from draftsmith.artifacts import read_json, write_json
from draftsmith.config import load_section
from draftsmith.console import run_stage
from draftsmith.registry.holders import fetch_holders, first_intact
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.settings import RegistryConfig
from pipeline import CHAMPION, CHAMPIONS, CONFIG, INCUMBENT, ROOT, TARGET


def main() -> None:
    store = PairStore(ROOT, load_section(CONFIG, "registry", RegistryConfig))
    write_json(CHAMPION, fetch_holders(store, CHAMPIONS))
    incumbents = store.incumbents(read_json(TARGET)["digest"])
    write_json(INCUMBENT, {"incumbent": first_intact(store, incumbents, CHAMPIONS)})


if __name__ == "__main__":
    run_stage(main)
