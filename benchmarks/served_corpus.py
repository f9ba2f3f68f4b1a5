"""One corpus made by the engine here, by a server of the target, and by one that is killed midway.

Knows nothing of which server it is. What is finished is kept.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from benchmarks.endpoint_process import EndpointProcess
from draftsmith.artifacts import digest_json, read_json, short, write_json, write_text
from draftsmith.corpus.backend import open_backend
from draftsmith.corpus.build import CorpusBuilder
from draftsmith.corpus.chat import Chat
from draftsmith.corpus.dataset import read_corpus
from draftsmith.corpus.prompts import Prompt, bundled_prompts, distinct
from draftsmith.corpus.rollouts import Rollout, ShardStore
from draftsmith.corpus.settings import CorpusConfig, SourceConfig
from draftsmith.corpus.sources import identity, read_source
from draftsmith.decoding import Event, Request, SamplingParams
from draftsmith.decoding.near_ties import judge_divergences
from draftsmith.errors import CorpusError
from draftsmith.evaluation.acceptance import in_turn
from draftsmith.targets.identity import TargetIdentity

HERE, SERVED, KILLED = "here", "served", "served-killed"
WAYS = (HERE, SERVED, KILLED)
_WIDTH = 8  # of the forwards that rounding is measured with
_ROUNDING_PROMPTS = 24  # at least
_WARM_UP_TOKENS = 8
# Where prompts lie and who is asked decides no response.
_PLACES = ("sources", "backend", "endpoints", "endpoint_model", "endpoint_timeout_s")
_LOG = logging.getLogger(__name__)


def kept(path: Path, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """A finished part: read where it is there, else made and written."""
    if not path.exists():
        write_json(path, make())
    return read_json(path)


def choose_prompts(config: CorpusConfig, count: int) -> list[Prompt]:
    """The first prompts of the configured sources but self-written ones, the domains in turn."""
    sources = [source for source in config.sources if source.kind != "self"]
    sources = sources or [SourceConfig("bundled")]
    found = distinct(prompt for source in sources for prompt in read_source(source))
    # By place: the first ones by id, a hash, would all be held out.
    named = [(f"{place:09d}", prompt.domain, prompt) for place, prompt in enumerate(found)]
    return in_turn(named)[:count]


def greedy_config(config: CorpusConfig, prompts: Sequence[Prompt], folder: Path) -> CorpusConfig:
    """The settings of a corpus of greedy answers to these prompts, which `folder` keeps."""
    rows = [{"messages": p.as_messages(), "domain": p.domain} for p in prompts]
    file = folder / f"prompts-{short(digest_json(rows))}.jsonl"
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    return dataclasses.replace(
        config,
        sources=(SourceConfig("jsonl", str(file), count=len(rows)),),
        train_temperatures=(0.0,),
        eval_temperatures=(0.0,),
        train_answers=1,
        min_eval_prompts=1,
    )


def decisive(config: CorpusConfig) -> dict[str, Any]:
    """What decides the responses, the target aside, and how fast they are made."""
    settings = {key: value for key, value in asdict(config).items() if key not in _PLACES}
    return settings | {"sources": [identity(source) for source in config.sources]}


class Meter:
    """Counts the answers that a stage gets, and the seconds until the last of them.

    Args:
        interrupt: Called once, when there are `after` answers.
        after: 0 is never.

    Attributes:
        outage_s: From then to the next answer.
    """

    def __init__(self, interrupt: Callable[[], None] = lambda: None, after: int = 0) -> None:
        self.num_answers = self.num_tokens = 0
        self.seconds = self.outage_s = 0.0
        self._interrupt, self._after = interrupt, after
        self._last_s = self._interrupted_s = 0.0

    @property
    def is_interrupted(self) -> bool:
        """Whether it happened."""
        return self._interrupted_s > 0

    def on_phase(self, _name: str, _total: int) -> Callable[[Event], None]:
        """As `CorpusBuilder` calls it: responses begin to be made."""
        self._last_s = time.perf_counter()
        return self._on_event

    def _on_event(self, event: Event) -> None:
        now_s = time.perf_counter()
        self.seconds += now_s - self._last_s
        self._last_s = now_s
        self.num_tokens += len(event.token_ids)
        if event.result is None:
            return
        self.num_answers += 1
        if self.is_interrupted and not self.outage_s:
            self.outage_s = now_s - self._interrupted_s
        if self.num_answers == self._after:
            self._interrupted_s = now_s
            self._interrupt()


@dataclass(frozen=True)
class ServedCorpus:
    """One corpus, made in several ways.

    Attributes:
        folder: Where all of it is kept; one folder for what decides it.
        config: Of greedy answers to the prompts of one file, which tells their number.
        identity: Of the target, in the dtype that all answer in.
        targets: Folder of its snapshot.
        server: Makes a server of it, which is not started yet.
        model: The name of the target there.
    """

    folder: Path
    config: CorpusConfig
    identity: TargetIdentity
    targets: Path
    server: Callable[[], EndpointProcess]
    model: str

    def entry(self, way: str) -> dict[str, Any]:
        """What making it took; begun anew where it was not finished."""
        return kept(self.folder / way / "entry.json", lambda: self._made(way))

    def splits(self, way: str) -> tuple[str, dict[str, list[Rollout]]]:
        """Digest and rollouts."""
        return read_corpus(self.folder / way / "corpus")

    def rollouts(self, way: str) -> list[Rollout]:
        """Of both splits."""
        return [rollout for rows in self.splits(way)[1].values() for rollout in rows]

    def compared(self, way: str, target: PreTrainedModel) -> dict[str, Any]:
        """Its responses against those that were made here."""
        path, ours = self.folder / way / "compared.json", self.rollouts(HERE)
        return kept(path, lambda: compared_responses(target, ours, self.rollouts(way)))

    def _made(self, way: str) -> dict[str, Any]:
        shutil.rmtree(self.folder / way, ignore_errors=True)
        if way == HERE:
            return _figures(self._stage(way, Meter()))
        with self.server() as server:
            if way == SERVED:
                return _figures(self._stage(way, Meter(), server))
            return self._killed(way, server)

    def _stage(self, way: str, meter: Meter, server: EndpointProcess | None = None) -> Meter:
        """As stage corpus does it. What is loaded, checked or made once is not timed."""
        config = self.config
        if server is not None:
            config = dataclasses.replace(
                config, backend="openai", endpoints=(server.url,), endpoint_model=self.model
            )
        chat, decoder = open_backend(config, self.identity, self.targets)
        list(decoder.stream([_warm_up(chat, config)]))
        folder, digest = self.folder / way, self.identity.digest
        CorpusBuilder(config, digest, decoder, chat, folder / "partial", meter.on_phase).build(
            folder / "corpus"
        )
        return meter

    def _killed(self, way: str, server: EndpointProcess) -> dict[str, Any]:
        """The server is killed behind half of the answers and started again.

        The stage goes on by itself where the server is back before it gives up, else in a second
        run, as a user would start it.
        """

        def interrupt() -> None:
            _LOG.info("server=killed answers=%d", meter.num_answers)
            server.kill()
            server.start()

        after = max(1, self.config.sources[0].count // 2)
        meter = Meter(interrupt, after)
        stage_runs = 1
        try:
            self._stage(way, meter, server)
        except CorpusError as error:
            if not meter.is_interrupted:
                raise
            _LOG.info("stage=ended error=%s", error.found)
            stage_runs = 2
            server.wait()
            self._stage(way, meter, server)
        return {
            "answers": meter.num_answers,
            "killed_after_answers": after,
            "outage_s": meter.outage_s,
            "stage_runs": stage_runs,
            "stored": stored(self.folder / way, self.splits(way)[0], self.config.shard_size),
        }


def _figures(meter: Meter) -> dict[str, Any]:
    return {
        "answers": meter.num_answers,
        "tokens": meter.num_tokens,
        "seconds": meter.seconds,
        "tokens_per_s": meter.num_tokens / meter.seconds,
    }


def _warm_up(chat: Chat, config: CorpusConfig) -> Request:
    ids = chat.prompt_ids(bundled_prompts()[0])[: config.max_prompt_tokens]
    num_tokens = min(_WARM_UP_TOKENS, config.max_new_tokens)
    params = SamplingParams(max_new_tokens=num_tokens, stop_token_ids=chat.stop_ids)
    return Request("warm-up", ids, params)


def stored(folder: Path, digest: str, shard_size: int) -> dict[str, int]:
    """Responses in the shards of a finished corpus, and how many of them are there again."""
    keys = [
        r.key for r in ShardStore(folder / "partial/rollouts" / short(digest), shard_size).read()
    ]
    return {"responses": len(keys), "again": len(keys) - len(set(keys))}


def compared_responses(
    target: PreTrainedModel, ours: Sequence[Rollout], theirs: Sequence[Rollout]
) -> dict[str, Any]:
    """Greedy responses to the same prompts: which are missing, there again, or differ.

    Rounding is measured on all that differ, and on some that do not where these are few.
    """
    plain = {rollout.key: rollout.response_ids for rollout in ours}
    other = {rollout.key: rollout.response_ids for rollout in theirs}
    wanted = {(r.key, tuple(r.prompt_ids)) for r in ours}
    found = {(r.key, tuple(r.prompt_ids)) for r in theirs}
    prompts = [(r.key, r.prompt_ids) for r in ours if r.key in other]
    differing = [prompt for prompt in prompts if plain[prompt[0]] != other[prompt[0]]]
    equal = [prompt for prompt in prompts if plain[prompt[0]] == other[prompt[0]]]
    chosen = differing + equal[: max(0, _ROUNDING_PROMPTS - len(differing))]
    judged = judge_divergences(target, chosen, plain, other, width=_WIDTH)
    return {
        "responses": len(theirs),
        "missing": len(wanted - found),
        "again": len(theirs) - len(found),
        "identical": len(equal),
        "share_identical": len(equal) / len(ours),
        "holds": judged.holds and wanted == found and len(theirs) == len(found),
        **asdict(judged),
    }
