"""The corpus stage: prompts from all sources, split by hash, answered by the target."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.artifacts import digest_json, keep_only, read_json, short, write_json
from draftsmith.corpus.chat import Chat
from draftsmith.corpus.dataset import write_corpus
from draftsmith.corpus.prompts import Prompt, distinct, is_eval, user_prompt
from draftsmith.corpus.rollouts import (
    Decoder,
    Limits,
    Rollout,
    RolloutJob,
    ShardStore,
    roll_out,
)
from draftsmith.corpus.self_prompting import SELF_DOMAIN, self_prompts, self_requests
from draftsmith.corpus.settings import CorpusConfig, SourceConfig
from draftsmith.corpus.sources import read_source
from draftsmith.decoding import Event
from draftsmith.errors import CorpusError

_LOG = logging.getLogger(__name__)

OnPhase = Callable[[str, int], Callable[[Event], None]]


def _silent(_phase: str, _total: int) -> Callable[[Event], None]:
    return lambda _event: None


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt with its exact token ids, template included."""

    prompt: Prompt
    token_ids: list[int]


@dataclass(frozen=True)
class CorpusBuilder:
    """Builds the corpus of one target.

    Attributes:
        config: The corpus section.
        target_digest: Identity of the target.
        decoder: Decodes with the target.
        chat: Its chat template.
        partial: Folder for unfinished work.
        on_phase: Called with a name and the number of requests when a decoding phase starts;
            returns what is called with its events.
    """

    config: CorpusConfig
    target_digest: str
    decoder: Decoder
    chat: Chat
    partial: Path
    on_phase: OnPhase = _silent

    def build(self, directory: Path) -> dict[str, Any]:
        """Write the corpus; returns `corpus.json`.

        Raises:
            CorpusError: A source is unusable, or too few eval prompts are left.
        """
        train, held_out = self._split(self._encode(distinct(self._collect())))
        digest = self._digest(train, held_out)
        given, answers = self.config.train_temperatures, self.config.train_answers
        train_jobs = _jobs(train, lambda item: in_turn(item.prompt.prompt_id, given, answers))
        jobs = [*train_jobs, *_jobs(held_out, lambda _: self.config.eval_temperatures)]
        store = ShardStore(self.partial / "rollouts" / short(digest), self.config.shard_size)
        limits = Limits(self.config.max_new_tokens, self.chat.stop_ids, self.config.seed)
        progress = partial(self.on_phase, "rollouts")
        rollouts = roll_out(self.decoder, jobs, limits=limits, store=store, on_start=progress)
        splits = {"train": rollouts[: len(train_jobs)], "eval": rollouts[len(train_jobs) :]}
        made = {"digest": digest, "target_digest": self.target_digest, **self._backend()}
        facts = {**made, **_facts(splits)}
        write_corpus(directory, splits, facts)
        keep_only(self.partial / "rollouts", short(digest))
        return facts

    def _collect(self) -> Iterator[Prompt]:
        for source in self.config.sources:
            is_self = source.kind == "self"
            prompts = self._self_written(source) if is_self else read_source(source)
            _LOG.info("source=%s prompts=%d", source.kind, len(prompts))
            yield from prompts

    def _self_written(self, source: SourceConfig) -> list[Prompt]:
        """Sampled once for a target and kept, so a killed run does not sample again."""
        seed = self.config.seed
        made = {"target": self.target_digest, "source": asdict(source), "seed": seed}
        settings = {**made, **self._backend()}
        kept = self.partial / "self" / f"{short(digest_json(settings))}.json"
        if not kept.exists():
            requests = self_requests(
                self.chat, source.count, temperature=source.temperature, seed=seed
            )
            progress = self.on_phase("self-written prompts", len(requests))
            prompts = self_prompts(self.decoder, self.chat, requests, progress)
            write_json(kept, {"prompts": [prompt.messages[0][1] for prompt in prompts]})
        return [user_prompt(text, SELF_DOMAIN) for text in read_json(kept)["prompts"]]

    def _encode(self, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
        encoded = [EncodedPrompt(prompt, self.chat.prompt_ids(prompt)) for prompt in prompts]
        kept = [e for e in encoded if len(e.token_ids) <= self.config.max_prompt_tokens]
        _LOG.info("prompts=%d too_long=%d", len(kept), len(encoded) - len(kept))
        return kept

    def _split(
        self, encoded: Sequence[EncodedPrompt]
    ) -> tuple[list[EncodedPrompt], list[EncodedPrompt]]:
        """Train and eval by hash; self-written prompts are for eval only if there are no others."""
        others = any(source.kind != "self" for source in self.config.sources)
        train: list[EncodedPrompt] = []
        held_out: list[EncodedPrompt] = []
        for item in encoded:
            may_evaluate = item.prompt.domain != SELF_DOMAIN or not others
            chosen = may_evaluate and is_eval(item.prompt, self.config.eval_fraction)
            (held_out if chosen else train).append(item)
        if len(held_out) < self.config.min_eval_prompts or not train:
            raise CorpusError(
                "splitting the prompts",
                found=f"{len(held_out)} eval and {len(train)} training prompts",
                expected=f"at least {self.config.min_eval_prompts} eval prompts and 1 for training",
                remedy="add prompts to corpus.sources or change corpus.eval_fraction",
            )
        return train, held_out

    def _digest(self, train: Sequence[EncodedPrompt], held_out: Sequence[EncodedPrompt]) -> str:
        """Everything the rollouts depend on: target, exact prompts, sampling, kind of backend.

        Self-written prompts are the target's own work, as rollouts are: their settings count, not
        their words, which differ in near-ties between machines.
        """
        written = [asdict(source) for source in self.config.sources if source.kind == "self"]
        return digest_json(
            {
                "target": self.target_digest,
                "train": _given(train),
                "eval": _given(held_out),
                "self": written,
                "temperatures": [self.config.train_temperatures, self.config.eval_temperatures],
                **self._answers(),
                "max_new_tokens": self.config.max_new_tokens,
                "stop_ids": self.chat.stop_ids,
                "seed": self.config.seed,
                **self._backend(),
            }
        )

    def _answers(self) -> dict[str, int]:
        """How many of the temperatures a training prompt gets; all of them go without saying."""
        number = self.config.train_answers
        return {} if number == len(self.config.train_temperatures) else {"train_answers": number}

    def _backend(self) -> dict[str, str]:
        """Which kind made the responses, never where; the engine here goes without saying.

        So corpora from before there were others keep their digests.
        """
        return {} if self.config.backend == "local" else {"backend": self.config.backend}


def _given(items: Sequence[EncodedPrompt]) -> list[list[int]]:
    """Token ids of the prompts that come from outside."""
    return [item.token_ids for item in items if item.prompt.domain != SELF_DOMAIN]


def in_turn(prompt_id: str, temperatures: Sequence[float], answers: int) -> list[float]:
    """So many of the temperatures, from one on that follows from the prompt alone; all in order."""
    if answers == len(temperatures):
        return list(temperatures)
    first = int(digest_json(["temperature", prompt_id])[:8], 16)
    return [temperatures[(first + place) % len(temperatures)] for place in range(answers)]


def _jobs(
    items: Sequence[EncodedPrompt], temperatures: Callable[[EncodedPrompt], Sequence[float]]
) -> list[RolloutJob]:
    """A response to every prompt at each of its temperatures."""
    return [
        RolloutJob(item.prompt.prompt_id, item.prompt.domain, temperature, item.token_ids)
        for item in items
        for temperature in temperatures(item)
    ]


def _facts(splits: dict[str, list[Rollout]]) -> dict[str, Any]:
    """Counts by split: prompts by domain, response tokens, and the temperatures actually used."""
    return {
        "prompts": {
            name: dict(Counter(domain for _, domain in {(r.prompt_id, r.domain) for r in rows}))
            for name, rows in splits.items()
        },
        "response_tokens": {
            name: sum(len(r.response_ids) for r in rows) for name, rows in splits.items()
        },
        "temperatures": {
            name: dict(Counter(str(r.temperature) for r in rows)) for name, rows in splits.items()
        },
    }
