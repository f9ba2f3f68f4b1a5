"""Telemetry of served requests: one JSON line a request, appended whole.

The counts are integers, taken from a request's trace; ratios are for those who judge. Knows neither
who served a request nor what the counts mean for a draft.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.artifacts import writing

if TYPE_CHECKING:
    from draftsmith.decoding import SamplingParams
    from draftsmith.decoding.trace import Trace

# Sampling parameters that leave each token's distribution as temperature makes it.
_NO_SHAPE = ("max_new_tokens", "temperature", "seed", "stop_token_ids", "stop_strings")
_NO_SHAPE_IF_GREEDY = ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class ServedRequest:
    """One line of telemetry.

    Attributes:
        time_utc: When the request finished, ISO 8601 with its zone.
        pair_digest: The pair that answered.
        domain: The kind of request, in the words of the eval prompts; None where nobody knows.
        temperature: Of the sampling; 0 is greedy.
        prompt_tokens: Length of the prompt.
        rounds: Target forwards after the prefill.
        drafted: For every draft position the rounds that drafted it.
        accepted: For every draft position the rounds in which it was accepted.
        draft_lengths: Entry k is the number of rounds in which the draft drafted k tokens.
        committed: Tokens of the answer.
        latency_s: Wall time of the request in seconds.
        shaped_by: Names of other sampling parameters that shaped the distribution (`top_k`,
            `repetition_penalty`); such requests are held against nothing that was registered.
    """

    time_utc: str
    pair_digest: str
    domain: str | None
    temperature: float
    prompt_tokens: int
    rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    committed: int
    latency_s: float
    shaped_by: tuple[str, ...] = ()

    @property
    def moment(self) -> datetime:
        """When the request finished."""
        return datetime.fromisoformat(self.time_utc)

    @property
    def has_drafted(self) -> bool:
        """Whether the draft drafted anything; if not, the line says nothing about it."""
        return self.drafted != () and self.drafted[0] > 0

    @property
    def usual_draft_length(self) -> int:
        """The draft length of most rounds that drafted; of two that are as frequent, the longer.

        0 where none drafted. Rounds whose drafts were copied do not count: they are the text's.
        """
        lengths = range(1, len(self.draft_lengths))
        return max(lengths, key=lambda k: (self.draft_lengths[k], k), default=0)


def describe_request(  # noqa: PLR0913  what only the caller knows, each by its name
    trace: Trace,
    params: SamplingParams,
    *,
    time_utc: str,
    pair_digest: str,
    domain: str | None,
    prompt_tokens: int,
    latency_s: float,
) -> ServedRequest:
    """The line of a request that the engine decoded; see `ServedRequest` for the arguments.

    A round that was trimmed counts as far as its last committed token; in one whose drafts were
    copied from the text the draft drafted nothing.
    """
    from draftsmith.decoding.trace import position_counts  # noqa: PLC0415  torch is slow to import

    rounds = zip(trace.drafted, trace.from_text, strict=True)
    lengths = [0 if is_copy else drafted for drafted, is_copy in rounds]
    longest = max(lengths, default=0)
    counts = position_counts([trace], longest)
    return ServedRequest(
        time_utc=time_utc,
        pair_digest=pair_digest,
        domain=domain,
        temperature=float(params.temperature),
        prompt_tokens=prompt_tokens,
        rounds=trace.num_rounds,
        drafted=tuple(counts.drafted),
        accepted=tuple(counts.accepted),
        draft_lengths=tuple(lengths.count(length) for length in range(longest + 1)),
        committed=sum(trace.committed),
        latency_s=latency_s,
        shaped_by=_shaped_by(params),
    )


def _shaped_by(params: SamplingParams) -> tuple[str, ...]:
    """Parameters other than the temperature that change the distribution."""
    ignored = (*_NO_SHAPE, *(_NO_SHAPE_IF_GREEDY if params.temperature == 0 else ()))
    return tuple(
        field.name
        for field in dataclasses.fields(params)
        if field.name not in ignored and getattr(params, field.name) != field.default
    )


def append_telemetry(path: Path, request: ServedRequest) -> None:
    """Add one line in one write; several processes may append to the same file.

    A line that another process left unfinished stays a line of its own.

    Raises:
        ArtifactError: The disk refused; the file is as it was.
    """
    line = json.dumps(dataclasses.asdict(request), separators=(",", ":"), allow_nan=False)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            is_whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
            data = f"{'' if is_whole else chr(10)}{line}\n".encode()
            if os.write(descriptor, data) != len(data):
                os.ftruncate(descriptor, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
