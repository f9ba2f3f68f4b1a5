"""Prometheus text about speculation, read: counters of vLLM and of our export, gauges of SGLang.

Knows nothing of what the counts mean for a draft.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftsmith.drift.counters import Engine
from draftsmith.errors import EvidenceError

_COUNTER = re.compile(
    r"(?:vllm:|draftsmith_)spec_decode_"
    r"(num_drafts|num_draft_tokens|num_accepted_tokens_per_pos)(_total|_created)?"
)
_BY_POSITION = "num_accepted_tokens_per_pos"
_ACCEPT_LENGTH = "sglang:spec_accept_length"
_PAIR, _MODEL, _POSITION = "pair_digest", "model_name", "position"
# name{labels} value, and what OpenMetrics may add: a time, and an exemplar behind a `#`.
_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"
    r'(?:\{(?P<labels>(?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?'
    r"\s+(?P<value>[^\s#]+)(?:\s+-?[\d.]+)?(?:\s+#\s.*)?"
)
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPE, _ESCAPED = re.compile(r"\\(.)"), {"n": "\n"}
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Snapshot:
    """What one scrape says about speculation.

    Attributes:
        engines: Those that count, by their labels; empty for a server that has gauges.
        accept_length: Mean tokens a round as a gauge; None where there is none, or it is idle.
        notes: What a reader of the scrape must know.
    """

    engines: Mapping[str, Engine]
    accept_length: float | None
    notes: tuple[str, ...] = ()


class _Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def is_address(source: str) -> bool:
    """Whether a source of metrics is fetched and not read from disk."""
    return source.startswith(("http://", "https://"))


def scrape(source: str, *, pair_digest: str) -> Snapshot:
    """The snapshot that a file or an http(s) address holds; see `parse_metrics`.

    Raises:
        EvidenceError: It cannot be read, or is no exposition of one speculating model.
    """
    shown = re.sub(r"://[^/@\s]+@", "://", source)
    text = _fetch(source, shown) if is_address(source) else _read(source)
    return parse_metrics(text, shown, pair_digest=pair_digest)


def parse_metrics(text: str, source: str, *, pair_digest: str) -> Snapshot:
    """Read a text exposition; every line must be one, samples of other metrics are left out.

    Args:
        text: The exposition.
        source: Its name, for messages.
        pair_digest: Samples that name another pair are left out; most servers name none.

    Raises:
        EvidenceError: A line is malformed, nothing is about speculation, or two models are mixed.
    """
    known = [
        sample
        for sample in _samples(text, source)
        if sample.labels.get(_PAIR, pair_digest) == pair_digest
    ]
    _require_one_model(known, source)
    finite = [sample for sample in known if math.isfinite(sample.value)]
    left_out = sorted({sample.name for sample in known if not math.isfinite(sample.value)})
    # An idle SGLang worker shows 0; other ranks of one server show the same rounds again.
    lengths = [s.value for s in finite if s.name == _ACCEPT_LENGTH and s.value > 0]
    return Snapshot(
        engines=_engines(finite),
        accept_length=float(np.mean(lengths)) if lengths else None,
        notes=tuple(f"{source}: {name} is no finite number and is left out." for name in left_out),
    )


def _samples(text: str, source: str) -> Iterable[_Sample]:
    """The samples about speculation."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        sample = _sample(line.strip(), f"{source}:{number}")
        counter = _COUNTER.fullmatch(sample.name)
        has_place = sample.labels.get(_POSITION, "").isdecimal()
        if counter and counter[1] == _BY_POSITION and not has_place:
            raise _malformed(f"{source}:{number}", line)
        if counter or sample.name == _ACCEPT_LENGTH:
            yield sample


def _sample(line: str, where: str) -> _Sample:
    match = _SAMPLE.fullmatch(line)
    try:
        if match is None:
            raise ValueError(line)
        return _Sample(match["name"], _labels(match["labels"] or ""), float(match["value"]))
    except ValueError:
        raise _malformed(where, line) from None


def _labels(text: str) -> dict[str, str]:
    labels, place = {}, 0
    while place < len(text):
        match = _LABEL.match(text, place)
        if match is None:
            raise ValueError(text)
        labels[match[1]] = _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), match[2])
        place = match.end()
    return labels


def _engines(samples: Iterable[_Sample]) -> dict[str, Engine]:
    """Counters by the engine that keeps them: all labels but the position name it."""
    counts: dict[str, dict[str, float]] = {}
    created: dict[str, dict[str, float]] = {}
    for name, labels, value in samples:
        if counter := _COUNTER.fullmatch(name):
            others = {key: text for key, text in labels.items() if key != _POSITION}
            engine = " ".join(f"{key}={others[key]}" for key in sorted(others))
            place = int(labels[_POSITION]) if counter[1] == _BY_POSITION else ""
            key = f"{counter[1]} {place}".strip()
            if counter[2] == "_created":
                created.setdefault(engine, {})[key] = value
            else:
                counts.setdefault(engine, defaultdict(float))[key] += value
    return {
        engine: Engine(dict(found), created.get(engine, {})) for engine, found in counts.items()
    }


def _require_one_model(samples: Sequence[_Sample], source: str) -> None:
    models = sorted({s.labels[_MODEL] for s in samples if _MODEL in s.labels})
    if not samples:
        found = "no metric of speculative decoding, or of other pairs only"
        expected = f"counters such as vllm:spec_decode_num_drafts_total, or {_ACCEPT_LENGTH}"
        remedy = "scrape a vLLM or SGLang server that decodes speculatively, or our own export"
    elif len(models) > 1:
        found, expected = f"models {', '.join(models)}", "one model: the pair's target"
        remedy = "keep the lines of that model, for instance with grep, in a file"
    else:
        return
    raise EvidenceError(f"reading {source}", found=found, expected=expected, remedy=remedy)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from error


def _fetch(address: str, shown: str) -> str:
    import requests  # noqa: PLC0415  rarely needed, and slow to import

    try:
        response = requests.get(address, timeout=_TIMEOUT_S, headers={"Accept": "text/plain"})
        response.raise_for_status()
    except requests.RequestException as error:
        # Not chained: its text may hold the address with a password.
        status = getattr(error.response, "status_code", None)
        raise _unreadable(shown, f"HTTP {status}" if status else type(error).__name__) from None
    return str(response.text)


def _unreadable(source: str, found: str) -> EvidenceError:
    return EvidenceError(
        f"reading the metrics of {source}",
        found=found,
        expected="a file, or an http(s) address that answers Prometheus text",
        remedy="check the path or the address, and that the server exports metrics",
    )


def _malformed(where: str, line: str) -> EvidenceError:
    return EvidenceError(
        f"reading {where}",
        found=repr(line[:80]),
        expected='a sample of the Prometheus text format: name{label="..."} value',
        remedy="give the text that the server's /metrics answers",
    )
