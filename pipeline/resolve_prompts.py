"""Stage resolve_prompts: which prompts are they? Every source is checked; content, not location."""

from draftsmith.artifacts import write_json
from draftsmith.config import load_value
from draftsmith.console import run_stage
from draftsmith.corpus.settings import SourceConfig
from draftsmith.corpus.sources import identity
from pipeline import CONFIG, PROMPTS


def main() -> None:
    sources = load_value(CONFIG, "corpus.sources", list[SourceConfig])
    write_json(PROMPTS, {"sources": [identity(source) for source in sources]})


if __name__ == "__main__":
    run_stage(main)
