"""Speculation counters of other servers, judged: vLLM's and our export's, and SGLang's gauges.

Aggregates know neither requests nor domains nor temperatures, so the test is coarse: first-position
acceptance of a window is held against the LOWEST registered rate, below which no mix of domains and
registered temperatures falls, and its binomial error is widened by what rounds of one request have
in common among the eval prompts. Sampling that was never registered may lie below it all the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from draftsmith.drift.counters import DRAFT_TOKENS, FIRST_ACCEPTED, ROUNDS, counted
from draftsmith.drift.exposition import Snapshot
from draftsmith.drift.live import VERDICTS, Verdict
from draftsmith.drift.live_reference import Level, Registered
from draftsmith.drift.settings import MonitorConfig
from draftsmith.errors import EvidenceError

_ROUNDS_A_REQUEST = 20  # what a request has at least, as a rule: rounds stand in for requests
_DRAFT_LENGTH_STEP = 0.5
_FEWEST_SCRAPES = 8

Window = Mapping[str, float]


def judge_metrics(
    snapshots: Sequence[Snapshot],
    rates: Mapping[str, Registered],
    *,
    config: MonitorConfig,
    margin: float,
) -> dict[str, Any]:
    """The verdict on scrapes of one server, oldest first.

    Counters: what was counted from the first scrape to the last, over restarts, or all since the
    start of the server where there is one scrape. Gauges: each scrape that shows another value is
    one observation, and only the bound that holds for every draft length is tested: survival of
    position 0 is at most the accept length minus one.

    Returns:
        `verdict`, `reasons` and `notes` in words, and the figures behind them.

    Raises:
        EvidenceError: The counts contradict each other.
    """
    rule = (min(rates.values(), key=lambda r: r.levels[r.lowest].survival), config, margin)
    notes = [note for snapshot in snapshots for note in snapshot.notes]
    pooled = _pooled_note(rates)
    if not snapshots[-1].engines:
        return {**_judge_gauge(snapshots, rule), "notes": [*notes, pooled]}
    window, num_restarts = counted([snapshot.engines for snapshot in snapshots])
    if num_restarts:
        notes.append(
            f"A counter started anew between the scrapes ({num_restarts} noticed): what was "
            "counted between the scrape before and the restart is lost."
        )
    report = _judge_counters(window, rule)
    changed = _engine_change(snapshots, window, config)
    if changed and VERDICTS.index(report["verdict"]) < VERDICTS.index("engine change"):
        report["verdict"] = "engine change"
        report["reasons"] = [*changed, *report["reasons"]]
    else:
        report["reasons"] += changed
    return {**report, "notes": [*notes, pooled]}


def _pooled_note(rates: Mapping[str, Registered]) -> str:
    """What aggregates hide."""
    registered = " and ".join(sorted(rates, key=float))
    return (
        "All temperatures and sampling parameters are pooled here; registered is temperature "
        f"{registered} alone. Requests that were sampled otherwise may be accepted less although "
        "the draft is as it was; telemetry tells them apart."
    )


def _judge_counters(
    window: Window, rule: tuple[Registered, MonitorConfig, float]
) -> dict[str, Any]:
    registered, config, _ = rule
    rounds, needed = window.get(ROUNDS, 0.0), config.min_requests * _ROUNDS_A_REQUEST
    if rounds < needed:
        reason = f"{rounds:.0f} rounds that drafted; {needed} are judged."
        return _report("not enough requests", reason, window)
    if FIRST_ACCEPTED not in window:
        reason = f"{rounds:.0f} rounds, but no accepted tokens by position, which are judged."
        return _report("not enough requests", reason, window)
    survival = window[FIRST_ACCEPTED] / rounds
    if not 0 <= survival <= 1:
        raise EvidenceError(
            "judging the counters between the scrapes",
            found=f"{window[FIRST_ACCEPTED]:.0f} accepted first positions of {rounds:.0f} rounds",
            expected="none to one a round",
            remedy="give scrapes of one server, oldest first; begin anew after a restart",
        )
    variance = _shared_rounds(registered) * survival * (1 - survival) / rounds
    subject = f"First-position survival of {rounds:.0f} rounds"
    return _tested(subject, survival, variance, window, rule)


def _judge_gauge(
    snapshots: Sequence[Snapshot], rule: tuple[Registered, MonitorConfig, float]
) -> dict[str, Any]:
    lengths = [s.accept_length for s in snapshots if s.accept_length is not None]
    # The same value again is no new measurement: the gauge was not set in between.
    bounds = [length - 1 for length, _ in itertools.groupby(lengths)]
    if len(bounds) < _FEWEST_SCRAPES:
        reason = (
            f"{len(bounds)} different values of a busy server's gauge in {len(snapshots)} scrapes; "
            f"{_FEWEST_SCRAPES} are judged."
        )
        return _report("not enough requests", reason, {})
    subject = f"First-position survival, at most the accept length minus 1 of {len(bounds)} scrapes"
    variance = float(np.var(bounds, ddof=1)) / len(bounds)
    return _tested(subject, float(np.mean(bounds)), variance, {}, rule)


def _tested(
    subject: str,
    survival: float,
    variance: float,
    window: Window,
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


def _engine_change(
    snapshots: Sequence[Snapshot], window: Window, config: MonitorConfig
) -> list[str]:
    """A sentence where the server drafts otherwise than before the window."""
    if len(snapshots) == 1:
        return []
    first, _ = counted([snapshots[0].engines])
    sides = (first, window)
    needed = config.min_requests * _ROUNDS_A_REQUEST
    if any(side.get(ROUNDS, 0.0) < needed or DRAFT_TOKENS not in side for side in sides):
        return []
    before, after = (side[DRAFT_TOKENS] / side[ROUNDS] for side in sides)
    if abs(after - before) < _DRAFT_LENGTH_STEP:
        return []
    return [f"The mean draft length changed from {before:.1f} to {after:.1f} tokens a round."]


def _report(verdict: Verdict, reason: str, window: Window) -> dict[str, Any]:
    return {"verdict": verdict, "reasons": [reason], "window": dict(window)}
