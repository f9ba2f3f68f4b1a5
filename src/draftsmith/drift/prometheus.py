"""Speculation counters of other servers: vLLM's counters and SGLang's gauges, as Prometheus text.

Aggregates know neither requests nor domains, so the test is coarse: first-position acceptance of a
window is held against the LOWEST registered rate, below which no mix of domains falls, and its
binomial error is widened by what rounds of one request have in common among the eval prompts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from draftsmith.drift.live import Verdict
from draftsmith.drift.live_reference import Level, Registered
from draftsmith.drift.settings import MonitorConfig
from draftsmith.errors import EvidenceError

_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED_BY_POSITION = (
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
)
_ACCEPT_LENGTH = "sglang:spec_accept_length"
_MODEL = "model_name"
_KNOWN = (_DRAFTS, _DRAFT_TOKENS, *_ACCEPTED_BY_POSITION, _ACCEPT_LENGTH)

_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?"
)
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ROUNDS_A_REQUEST = 20  # what a request has at least, as a rule: rounds stand in for requests
_DRAFT_LENGTH_STEP = 0.5
_FEWEST_SCRAPES = 8
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Snapshot:
    """What one scrape says about speculation.

    Attributes:
        rounds: Rounds that drafted, since the server started; None where it does not count them.
        draft_tokens: Tokens drafted in them.
        accepted: Rounds that accepted position 0, 1, ...
        accept_length: Mean tokens a round as a gauge; None where there is none, or it is idle.
    """

    rounds: float | None
    draft_tokens: float
    accepted: tuple[float, ...]
    accept_length: float | None


def scrape(source: str) -> Snapshot:
    """The snapshot that a file or an http(s) address holds.

    Raises:
        EvidenceError: It cannot be read, or is no exposition of one speculating model.
    """
    shown = re.sub(r"://[^/@\s]+@", "://", source)
    is_address = source.startswith(("http://", "https://"))
    return parse_metrics(_fetch(source, shown) if is_address else _read(source), shown)


def parse_metrics(text: str, source: str) -> Snapshot:
    """Read a text exposition; every line must be one, samples of other metrics are left out.

    Args:
        text: The exposition.
        source: Its name, for messages.

    Raises:
        EvidenceError: A line is malformed, nothing is about speculation, or two models are mixed.
    """
    values: dict[str, list[tuple[dict[str, str], float]]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, labels, value = _sample(line.strip(), f"{source}:{number}")
            if name in _KNOWN:
                if name in _ACCEPTED_BY_POSITION and not labels.get("position", "").isdecimal():
                    raise _malformed(f"{source}:{number}", line)
                values.setdefault(name, []).append((labels, value))
    _require_one_model(values, source)
    accepted: dict[int, float] = {}
    for name in _ACCEPTED_BY_POSITION:
        for labels, value in values.get(name, []):
            place = int(labels["position"])
            accepted[place] = accepted.get(place, 0.0) + value
    # An idle SGLang worker shows 0; other ranks of one server show the same rounds again.
    lengths = [value for _, value in values.get(_ACCEPT_LENGTH, []) if value > 0]
    return Snapshot(
        rounds=sum(v for _, v in values[_DRAFTS]) if _DRAFTS in values else None,
        draft_tokens=sum(v for _, v in values.get(_DRAFT_TOKENS, [])),
        accepted=tuple(accepted.get(place, 0.0) for place in range(max(accepted, default=-1) + 1)),
        accept_length=float(np.mean(lengths)) if lengths else None,
    )


def judge_metrics(
    snapshots: Sequence[Snapshot],
    rates: Mapping[str, Registered],
    *,
    config: MonitorConfig,
    margin: float,
) -> dict[str, Any]:
    """The verdict on scrapes of one server, oldest first.

    Counters: the window between the first and the last scrape, or all since the start of the
    server where there is one scrape. Gauges: each scrape is one observation, and only the bound
    that holds for every draft length is tested: survival of position 0 is at most the accept
    length minus one.

    Returns:
        `verdict` and `reasons` in words, and the figures behind them.
    """
    registered = min(rates.values(), key=lambda r: r.levels[r.lowest].survival)
    if snapshots[-1].rounds is None:
        return _judge_gauge(snapshots, registered, config, margin)
    first = snapshots[0]
    window, has_restarted = _between(first, snapshots[-1]) if len(snapshots) > 1 else (first, False)
    notes = ["A counter fell between the scrapes: only what came after the restart counts."]
    report = _judge_counters(window, registered, config, margin)
    if len(snapshots) > 1 and not has_restarted:
        report |= _engine_change(first, window, config)
    return report | {"notes": notes if has_restarted else []}


def _sample(line: str, where: str) -> tuple[str, dict[str, str], float]:
    match = _SAMPLE.fullmatch(line)
    try:
        if match is None:
            raise ValueError(line)
        labels = _labels(match["labels"] or "")
        return match["name"], labels, float(match["value"])
    except ValueError:
        raise _malformed(where, line) from None


def _labels(text: str) -> dict[str, str]:
    labels, place = {}, 0
    while place < len(text):
        match = _LABEL.match(text, place)
        if match is None:
            raise ValueError(text)
        labels[match[1]] = match[2]
        place = match.end()
    return labels


def _require_one_model(
    values: Mapping[str, Sequence[tuple[dict[str, str], float]]], source: str
) -> None:
    if not values:
        found, expected = "no metric of speculative decoding", f"{_DRAFTS} or {_ACCEPT_LENGTH}"
        remedy = "scrape a vLLM or SGLang server that decodes speculatively"
    else:
        samples = [labels for group in values.values() for labels, _ in group]
        models = sorted({labels[_MODEL] for labels in samples if _MODEL in labels})
        if len(models) <= 1:
            return
        found, expected = f"models {', '.join(models)}", "one model: the pair's target"
        remedy = "keep the lines of that model, for instance with grep, in a file"
    raise EvidenceError(f"reading {source}", found=found, expected=expected, remedy=remedy)


def _between(first: Snapshot, last: Snapshot) -> tuple[Snapshot, bool]:
    """What was counted from `first` to `last`, and whether the server restarted in between."""
    rounds = (last.rounds or 0.0) - (first.rounds or 0.0)
    if rounds < 0:
        return last, True
    before = (*first.accepted, *[0.0] * len(last.accepted))
    accepted = tuple(now - was for now, was in zip(last.accepted, before, strict=False))
    return Snapshot(rounds, last.draft_tokens - first.draft_tokens, accepted, None), False


def _judge_counters(
    window: Snapshot, registered: Registered, config: MonitorConfig, margin: float
) -> dict[str, Any]:
    rounds = window.rounds or 0.0
    needed = config.min_requests * _ROUNDS_A_REQUEST
    if rounds < needed or not window.accepted:
        reason = f"{rounds:.0f} rounds with counts by position; {needed} are judged."
        return _report("not enough requests", reason, window)
    survival = window.accepted[0] / rounds
    variance = _shared_rounds(registered) * survival * (1 - survival) / rounds
    subject = f"First-position survival of {rounds:.0f} rounds"
    return _tested(subject, survival, variance, window, (registered, config, margin))


def _judge_gauge(
    snapshots: Sequence[Snapshot], registered: Registered, config: MonitorConfig, margin: float
) -> dict[str, Any]:
    bounds = [s.accept_length - 1 for s in snapshots if s.accept_length is not None]
    if len(bounds) < _FEWEST_SCRAPES:
        reason = f"{len(bounds)} scrapes of a busy server; {_FEWEST_SCRAPES} are judged."
        return _report("not enough requests", reason, snapshots[-1])
    subject = f"First-position survival, at most the accept length minus 1 of {len(bounds)} scrapes"
    variance = float(np.var(bounds, ddof=1)) / len(bounds)
    return _tested(
        subject, float(np.mean(bounds)), variance, snapshots[-1], (registered, config, margin)
    )


def _tested(
    subject: str,
    survival: float,
    variance: float,
    window: Snapshot,
    rule: tuple[Registered, MonitorConfig, float],
) -> dict[str, Any]:
    registered, config, margin = rule
    lowest = registered.levels[registered.lowest]
    against_lowest, against_mean = (
        _drop(survival, variance, level) for level in (lowest, registered.pooled)
    )
    is_below_all, is_below_mean = (
        drop["p_value"] < 1 - config.confidence and drop["change"] < -margin
        for drop in (against_lowest, against_mean)
    )
    verdict: Verdict = "draft decay" if is_below_all else "traffic shift" if is_below_mean else "ok"
    endings = {
        "draft decay": "no mix of the domains explains it",
        "traffic shift": "a mix of harder domains, or a draft that decayed; telemetry can tell",
        "ok": "no drop beyond chance and margin",
    }
    reason = (
        f"{subject}, is {survival:.3f} against {registered.pooled.survival:.3f} over all eval "
        f"prompts (p {against_mean['p_value']:.2g}) and {lowest.survival:.3f} for the lowest "
        f"domain, {registered.lowest} (p {against_lowest['p_value']:.2g}): {endings[verdict]}."
    )
    figures = {"survival": survival, "against_lowest": against_lowest, "against_mean": against_mean}
    return _report(verdict, reason, window) | figures


def _drop(survival: float, variance: float, level: Level) -> dict[str, float]:
    """One-sided test of a drop below a registered level, its own error included."""
    change = survival - level.survival
    error = math.sqrt(variance + level.error**2)
    p_value = float(stats.t.cdf(change / error, level.num_prompts - 1))
    return {"registered": level.survival, "change": change, "error": error, "p_value": p_value}


def _shared_rounds(registered: Registered) -> float:
    """By how much rounds of one request agree: clustered over binomial variance, at least 1."""
    level: Level = registered.pooled
    binomial = level.survival * (1 - level.survival) / max(1, registered.num_rounds)
    return max(1.0, level.error**2 / binomial) if binomial else 1.0


def _engine_change(first: Snapshot, window: Snapshot, config: MonitorConfig) -> dict[str, Any]:
    """Overrides the verdict where the server drafts otherwise than before the window."""
    if min(first.rounds or 0.0, window.rounds or 0.0) < config.min_requests * _ROUNDS_A_REQUEST:
        return {}
    before, after = (side.draft_tokens / (side.rounds or 1.0) for side in (first, window))
    if abs(after - before) < _DRAFT_LENGTH_STEP:
        return {}
    reason = f"The mean draft length changed from {before:.1f} to {after:.1f} tokens a round."
    return {"verdict": "engine change", "reasons": [reason]}


def _report(verdict: Verdict, reason: str, window: Snapshot) -> dict[str, Any]:
    return {"verdict": verdict, "reasons": [reason], "notes": [], "window": asdict(window)}


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
