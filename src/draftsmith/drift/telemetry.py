"""Telemetry of served requests: one JSON line a request, appended whole and read strictly.

The counts are integers, taken from a request's trace; ratios are for those who judge. Knows neither
who served a request nor what the counts mean for a draft.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.artifacts import writing
from draftsmith.errors import ArtifactError

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
    def usual_draft_length(self) -> int:
        """The draft length of most rounds; of two that are as frequent, the longer."""
        return max(range(len(self.draft_lengths)), key=lambda k: (self.draft_lengths[k], k))


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


def read_telemetry(path: Path) -> list[ServedRequest]:
    """All requests of a file, in its order; a last line that is still being written is left out.

    Raises:
        ArtifactError: The file cannot be read, or a line is not a line of telemetry.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ArtifactError(
            f"reading {path}",
            found=error.strerror or str(error),
            expected="a file of telemetry, one JSON object a line",
            remedy="give the file that `draftsmith generate --telemetry` or the server writes",
        ) from error
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            data = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                continue
            raise _malformed(where, f"no JSON ({error})", "one JSON object") from error
        requests.append(_checked(data, where))
    return requests


def _checked(data: object, where: str) -> ServedRequest:
    if not isinstance(data, Mapping):
        raise _malformed(where, type(data).__name__, "one JSON object")
    for key in data:
        if key not in _FORMS:
            raise _malformed(where, f"the unknown key `{key}`", f"one of {', '.join(_FORMS)}")
    for field in dataclasses.fields(ServedRequest):
        fits, expected = _FORMS[field.name]
        if field.name not in data:
            if field.default is dataclasses.MISSING:
                raise _malformed(where, f"no key `{field.name}`", f"`{field.name}`: {expected}")
        elif not fits(data[field.name]):
            found = f"`{field.name}`: {json.dumps(data[field.name])}"
            raise _malformed(where, found, expected)
    values: dict[str, Any] = {k: tuple(v) if type(v) is list else v for k, v in data.items()}
    request = ServedRequest(**values)
    if fault := _contradiction(request):
        raise _malformed(where, fault, "counts of one request that agree")
    return request


def _contradiction(request: ServedRequest) -> str:
    """What the counts cannot be; empty when they agree."""
    drafted, accepted = request.drafted, request.accepted
    if len(drafted) != len(accepted):
        return f"{len(drafted)} positions in `drafted` and {len(accepted)} in `accepted`"
    if any(a > d for a, d in zip(accepted, drafted, strict=True)):
        return f"more accepted than drafted ({list(accepted)} of {list(drafted)})"
    for name, counts in (("drafted", drafted), ("accepted", accepted)):
        if any(after > before for before, after in zip(counts, counts[1:], strict=False)):
            return f"`{name}` rising with the position ({list(counts)})"
    if sum(request.draft_lengths) != request.rounds:
        return f"{sum(request.draft_lengths)} rounds in `draft_lengths` and {request.rounds} rounds"
    if drafted and drafted[0] > sum(request.draft_lengths[1:]):
        return f"{drafted[0]} rounds that drafted, more than `draft_lengths` holds"
    return ""


def _malformed(where: str, found: str, expected: str) -> ArtifactError:
    return ArtifactError(
        f"reading {where}",
        found=found,
        expected=f"{expected} (docs/monitoring.md lists the keys)",
        remedy="mend or delete that line, or the program that wrote it",
    )


def _is_time(value: object) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]  # just checked


_COUNT = (_is_count, "a whole number, 0 or more")
_COUNTS = (_are_counts, "a list of whole numbers, one a draft position, 0 or more")
_NUMBER = (_is_number, "a number, 0 or more")
_FORMS: dict[str, tuple[Callable[[object], bool], str]] = {
    "time_utc": (_is_time, "an ISO 8601 time with its zone, such as 2026-03-01T12:00:00Z"),
    "pair_digest": (_is_text, "the digest of a pair"),
    "domain": (lambda value: value is None or _is_text(value), "a name, or null"),
    "temperature": _NUMBER,
    "prompt_tokens": _COUNT,
    "rounds": _COUNT,
    "drafted": _COUNTS,
    "accepted": _COUNTS,
    "draft_lengths": (
        lambda value: _are_counts(value) and value != [],
        "a list whose entry k is the number of rounds that drafted k tokens",
    ),
    "committed": _COUNT,
    "latency_s": _NUMBER,
    "shaped_by": (
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
        "a list of names of sampling parameters",
    ),
}
