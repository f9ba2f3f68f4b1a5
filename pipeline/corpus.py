"""Stage corpus: prompts, split by hash, answered by the target."""

from collections.abc import Callable

from draftsmith.artifacts import read_json
from draftsmith.config import load_section
from draftsmith.console import Progress, run_stage
from draftsmith.corpus.build import CorpusBuilder
from draftsmith.corpus.chat import make_chat
from draftsmith.corpus.settings import CorpusConfig
from draftsmith.decoding import Event
from draftsmith.targets.loading import load_by_digest
from pipeline import CONFIG, CORPUS, PARTIAL, TARGET, TARGETS


def on_phase(name: str, total: int) -> Callable[[Event], None]:
    bar = Progress(name, total)
    return lambda event: bar.advance(event.result is not None, tokens=len(event.token_ids))


def main() -> None:
    config = load_section(CONFIG, "corpus", CorpusConfig)
    digest = read_json(TARGET)["digest"]
    target = load_by_digest(TARGETS, digest)
    chat = make_chat(target.model, target.tokenizer)
    partial = PARTIAL / "corpus"
    CorpusBuilder(config, digest, target.model, chat, partial, on_phase).build(CORPUS)


if __name__ == "__main__":
    run_stage(main)
