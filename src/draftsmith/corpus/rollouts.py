"""The target's own responses, in shards that survive a kill.

Results are written as they finish; a rerun reads the finished shards and decodes what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from draftsmith.artifacts import digest_json, read_json, write_json
from draftsmith.decoding import Event, Request, SamplingParams
from draftsmith.errors import ArtifactError

_LOG = logging.getLogger(__name__)

OnEvent = Callable[[Event], None]


class Decoder(Protocol):
    """What makes responses: an engine here, or endpoints elsewhere."""

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode all requests; the last event of each carries its result."""


@dataclass(frozen=True)
class Rollout:
    """One response: exact token ids, and the temperature that was actually used."""

    prompt_id: str
    domain: str
    temperature: float
    prompt_ids: list[int]
    response_ids: list[int]
    finished: bool

    @property
    def key(self) -> str:
        """Names the response among all of a corpus."""
        return rollout_key(self.prompt_id, self.temperature)


@dataclass(frozen=True)
class RolloutJob:
    """A response to be made."""

    prompt_id: str
    domain: str
    temperature: float
    prompt_ids: list[int]

    @property
    def key(self) -> str:
        """Names the response among all of a corpus."""
        return rollout_key(self.prompt_id, self.temperature)


def rollout_key(prompt_id: str, temperature: float) -> str:
    """Name of the response to a prompt at a temperature."""
    return f"{prompt_id}@{temperature}"


class ShardStore:
    """Finished responses in numbered JSON shards, each with the digest of its rows.

    Args:
        folder: One folder for everything that the responses depend on.
        shard_size: Responses a shard.
    """

    def __init__(self, folder: Path, shard_size: int) -> None:
        self._folder, self._size = folder, shard_size
        self._open: list[Rollout] = []

    def read(self) -> list[Rollout]:
        """All finished responses; a damaged shard is dropped and decoded again."""
        rollouts: list[Rollout] = []
        for path in sorted(self._folder.glob("shard-*.json")):
            rows = _sound_rows(path)
            if rows is None:
                _LOG.warning("shard=%s state=damaged action=decode_again", path.name)
                path.unlink()
                continue
            rollouts += [Rollout(**row) for row in rows]
        return rollouts

    def add(self, rollout: Rollout) -> None:
        """Keep a finished response; written with the shard it fills."""
        self._open.append(rollout)
        if len(self._open) >= self._size:
            self.flush()

    def flush(self) -> None:
        """Write the unfilled shard."""
        if not self._open:
            return
        rows: list[dict[str, Any]] = [asdict(rollout) for rollout in self._open]
        shards = self._folder.glob("shard-*.json")
        numbers = [int(shard.stem.removeprefix("shard-")) for shard in shards]
        path = self._folder / f"shard-{max(numbers, default=-1) + 1:05d}.json"
        write_json(path, {"rows": rows, "digest": digest_json(rows)})
        self._open = []


def _sound_rows(path: Path) -> list[dict[str, Any]] | None:
    """The rows of a shard; None when it is not the JSON that was written."""
    try:
        data = read_json(path)
    except ArtifactError:
        return None
    rows: list[dict[str, Any]] | None = data.get("rows")
    return rows if digest_json(rows) == data.get("digest") else None


@dataclass(frozen=True)
class Limits:
    """Sampling limits that all responses share."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    seed: int


def roll_out(
    decoder: Decoder,
    jobs: Sequence[RolloutJob],
    *,
    limits: Limits,
    store: ShardStore,
    on_start: Callable[[int], OnEvent] = lambda _missing: lambda _event: None,
) -> list[Rollout]:
    """Make all responses, in the order of `jobs`.

    Args:
        decoder: Decodes them.
        jobs: What is wanted.
        limits: Shared by all.
        store: Finished responses; those found there are not made again. Their domains, which no
            response depends on, are those of `jobs`.
        on_start: Called with the number of missing responses; returns what is called with every
            event of the decoder.

    Raises:
        DraftsmithError: Of the decoder; what it finished is stored, as it is whatever ends this.
    """
    wanted = {job.key: job for job in jobs}
    finished = {
        rollout.key: replace(rollout, domain=wanted[rollout.key].domain)
        for rollout in store.read()
        if rollout.key in wanted
    }
    missing = [job for job in jobs if job.key not in finished]
    _LOG.info("rollouts_found=%d rollouts_missing=%d", len(finished), len(missing))
    try:
        for rollout in _decode(decoder, missing, limits, on_start(len(missing))):
            store.add(rollout)
            finished[rollout.key] = rollout
    except (Exception, KeyboardInterrupt):
        store.flush()
        raise
    store.flush()
    return [finished[job.key] for job in jobs]


def _decode(
    decoder: Decoder, jobs: Sequence[RolloutJob], limits: Limits, on_event: OnEvent
) -> Iterator[Rollout]:
    by_key = {job.key: job for job in jobs}
    requests = [
        Request(
            job.key,
            job.prompt_ids,
            SamplingParams(
                max_new_tokens=limits.max_new_tokens,
                temperature=job.temperature,
                seed=limits.seed,
                stop_token_ids=limits.stop_ids,
            ),
        )
        # Greedy requests together, sampled ones together: a mixed batch pays for both. Prompts of
        # like length together: a prefill pads to the longest, attention reads as far.
        for job in sorted(jobs, key=lambda job: (job.temperature, -len(job.prompt_ids)))
    ]
    for event in decoder.stream(requests):
        on_event(event)
        if event.result is not None:
            job = by_key[event.request_id]
            yield Rollout(
                **asdict(job),
                response_ids=event.result.token_ids,
                finished=event.result.finish_reason == "stop",
            )
