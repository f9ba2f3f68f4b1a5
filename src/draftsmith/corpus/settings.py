"""The `corpus` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

_LONGEST_TIMEOUT_S = 86_400


@dataclass(frozen=True)
class SourceConfig:
    """Where prompts come from.

    Attributes:
        kind: bundled (our own prompts), jsonl (a file of `messages` or `prompt`), dataset (a
            `datasets` folder or Hub name), or self (the target writes user turns from its chat
            template).
        path: File, folder or Hub name; empty for bundled and self.
        count: At most so many prompts, the first ones; 0 is all. For self: turns that are sampled.
        split: Split of a dataset.
        domain: Label for prompts that carry none.
        temperature: Sampling temperature of self-written turns.
    """

    kind: Literal["bundled", "jsonl", "dataset", "self"]
    path: str = ""
    count: int = 0
    split: str = "train"
    domain: str = "general"
    temperature: float = 0.8

    def __post_init__(self) -> None:
        """Check that the kind has what it needs."""
        if self.kind in ("jsonl", "dataset") and not self.path:
            raise ValueError(f"a source of kind {self.kind} needs a path")
        if self.kind == "self" and self.count < 1:
            raise ValueError("a source of kind self needs a count of at least 1")
        if self.count < 0 or self.temperature < 0:
            raise ValueError("count and temperature of a source must be 0 or more")


@dataclass(frozen=True)
class CorpusConfig:
    """Prompts and rollouts.

    Attributes:
        sources: Where prompts come from, in order; duplicates are dropped.
        eval_fraction: Share of the prompts that goes to the eval split, by hash, in (0, 1).
        train_temperatures: Training prompts are answered at these, which take turns.
        eval_temperatures: Every eval prompt is answered at each of these.
        max_prompt_tokens: Longer prompts are dropped.
        max_new_tokens: Longest response.
        min_eval_prompts: Fewer eval prompts are an error: verdicts would be empty.
        batch_size: Requests in flight, of the engine or of each endpoint.
        shard_size: Finished responses a shard; a finished shard survives a kill.
        seed: Of sampling.
        train_answers: Answers to a training prompt, each at another of the train_temperatures.
        backend: Who answers: local, the engine here, or openai, endpoints that serve the target.
        endpoints: Addresses of OpenAI-compatible APIs, up to and including /v1.
        endpoint_model: The target's name there.
        endpoint_timeout_s: For a whole answer of an endpoint.
    """

    sources: tuple[SourceConfig, ...]
    eval_fraction: float
    train_temperatures: tuple[float, ...]
    eval_temperatures: tuple[float, ...]
    max_prompt_tokens: int
    max_new_tokens: int
    min_eval_prompts: int
    batch_size: int
    shard_size: int
    seed: int
    train_answers: int = 1
    backend: Literal["local", "openai"] = "local"
    endpoints: tuple[str, ...] = ()
    endpoint_model: str = ""
    endpoint_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Check ranges."""
        if not self.sources:
            raise ValueError("sources must name at least one source of prompts")
        if not 0 < self.eval_fraction < 1:
            raise ValueError("eval_fraction must lie between 0 and 1")
        if not self.train_temperatures or not self.eval_temperatures:
            raise ValueError("train_temperatures and eval_temperatures need at least one entry")
        for name in ("train_temperatures", "eval_temperatures"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name} must differ from one another")
        if not 1 <= self.train_answers <= len(self.train_temperatures):
            raise ValueError("train_answers must be 1 to as many as there are train_temperatures")
        if min(*self.train_temperatures, *self.eval_temperatures) < 0:
            raise ValueError("temperatures must be 0 or more")
        sizes = (self.max_prompt_tokens, self.max_new_tokens, self.batch_size, self.shard_size)
        if min(sizes) < 1:
            raise ValueError("token limits, batch_size and shard_size must be at least 1")
        self._check_endpoints()

    def _check_endpoints(self) -> None:
        """Addresses are not shown: one that is wrong may hold a password."""
        for place, url in enumerate(self.endpoints):
            if not _is_address(url):
                raise ValueError(
                    f"endpoints[{place}] must be http(s)://host:port/v1, without a user, a "
                    "password or a query"
                )
        if len({url.rstrip("/") for url in self.endpoints}) < len(self.endpoints):
            raise ValueError("endpoints must differ from one another")
        if self.backend == "openai" and not (self.endpoints and self.endpoint_model):
            raise ValueError("backend openai needs endpoints and endpoint_model")
        if not 0 < self.endpoint_timeout_s <= _LONGEST_TIMEOUT_S:
            raise ValueError(f"endpoint_timeout_s must be in 0..{_LONGEST_TIMEOUT_S}, above 0")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is none
        return False
    return parts.scheme in ("http", "https") and is_plain and has_host
