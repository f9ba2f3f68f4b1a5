"""Stage corpus: prompts, split by hash, answered by the target."""

from collections.abc import Callable

from draftsmith.config import load_section
from draftsmith.console import Progress, run_stage
from draftsmith.corpus.backend import open_backend
from draftsmith.corpus.build import CorpusBuilder
from draftsmith.corpus.settings import CorpusConfig
from draftsmith.decoding import Event
from draftsmith.targets.identity import read_identity
from pipeline import CONFIG, CORPUS, PARTIAL, TARGET, TARGETS


def on_phase(name: str, total: int) -> Callable[[Event], None]:
    bar = Progress(name, total)
    return lambda event: bar.advance(event.result is not None, tokens=len(event.token_ids))


def main() -> None:
    config = load_section(CONFIG, "corpus", CorpusConfig)
    identity = read_identity(TARGET)
    chat, decoder = open_backend(config, identity, TARGETS)
    partial = PARTIAL / "corpus"
    CorpusBuilder(config, identity.digest, decoder, chat, partial, on_phase).build(CORPUS)


if __name__ == "__main__":
    run_stage(main)
