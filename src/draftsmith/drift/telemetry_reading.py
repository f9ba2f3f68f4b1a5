"""Telemetry, read strictly: every line must be one of a served request, and its counts must agree.

Only lines that were torn when they were written are passed over, and counted.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from draftsmith.drift.telemetry import ServedRequest
from draftsmith.errors import ArtifactError

# Lines that a killed or full writer tore: up to a handful, or up to this share, are left out.
_TORN_HANDFUL = 5
_TORN_SHARE = 0.01


@dataclass(frozen=True)
class Telemetry:
    """What a file holds.

    Attributes:
        requests: In the file's order.
        torn: Numbers of the lines that are no JSON, from 1.
    """

    requests: list[ServedRequest]
    torn: list[int]


def read_telemetry(path: Path) -> Telemetry:
    """All requests of a file; a last line that is still being written is left out.

    A line that was torn when it was written is left out too and counted; it must not blind those
    who read the file ever after.

    Raises:
        ArtifactError: The file cannot be read, a line is JSON but no line of telemetry, or too many
            lines are no JSON: more than 5 and than 1 %, or all.
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
    found = Telemetry([], [])
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except ValueError:
            if number < len(lines):
                found.torn.append(number)
            continue
        found.requests.append(_checked(data, f"{path}:{number}"))
    _require_few_torn(found, path)
    return found


def _require_few_torn(found: Telemetry, path: Path) -> None:
    num_lines = len(found.requests) + len(found.torn)
    allowed = max(_TORN_HANDFUL, int(_TORN_SHARE * num_lines))
    if found.torn and (len(found.torn) > allowed or not found.requests):
        where = f"{path}:{found.torn[0]}"
        count = f"{len(found.torn)} of {num_lines} lines that are no JSON, this the first"
        raise _malformed(where, count, f"one JSON object a line, at most {allowed} torn lines")


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
