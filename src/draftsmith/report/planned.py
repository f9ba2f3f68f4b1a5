"""The tables of `draftsmith plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

_BYTES_PER_GB = 1e9
# What a part of the memory is called, in the order of the table.
_PARTS = {
    "target_weights": "target, weights",
    "target_rows": "target, output rows held again",
    "gathered_layers": "target, layers gathered whole",
    "target_cache": "target, key/value cache",
    "draft_weights": "draft, weights",
    "draft_cache": "draft, cache",
    "gradients": "gradients",
    "gradient_buckets": "gradients being exchanged",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint being written",
    "best_weights": "best weights so far",
    "activations": "activations and working memory",
    "total": "total",
}
_PHASES = {"signals": "signals", "training": "training step", "decoding": "decoding"}


def plan_tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """Sizes, memory of each recipe, disk, tokens and time."""
    yield _models(report)
    for name, entry in report["recipes"].items():
        yield _memory(name, entry["memory"])
    yield _disk(report)
    yield _time(report)


def verdict_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """What fits and what does not, and what would make it fit."""
    for name, entry in report["recipes"].items():
        verdicts = {**entry["verdicts"], "signal cache": entry["signal_cache"]}
        for what, verdict in verdicts.items():
            yield f"{name}, {what}: {_judged(verdict)}"


def _judged(verdict: Mapping[str, Any]) -> str:
    total, limit = verdict["total_bytes"], verdict["limit_bytes"]
    if total is None and verdict["fits"] is None:
        return "not known"
    ways = " | ".join(verdict["remedies"])
    if total is None:
        return f"cannot be made; would: {ways}"
    if limit is None:
        return f"{_gb(total)} GB; --device-memory says whether that fits"
    if verdict["fits"]:
        return f"fits ({_gb(total)} of {_gb(limit)} GB)"
    return f"does not fit ({_gb(total)} of {_gb(limit)} GB); would: {ways}"


def _models(report: Mapping[str, Any]) -> Table:
    target = report["target"]
    title = f"{report['source']} ({target['model_type']}, {target['dtype']})"
    table = Table(title=title, box=None)
    for name in ("", "parameters", "trained", "frozen, the target's", "GB stored"):
        table.add_column(name, justify="left" if not name else "right")
    stored = _gb(target["weights_bytes"])
    table.add_row("target", _millions(target["num_parameters"]), "", "", stored)
    for name, entry in report["recipes"].items():
        sizes = entry["sizes"]
        total, trained = sizes["num_parameters"], sizes["num_trained"]
        counts = (_millions(count) for count in (total, trained, total - trained))
        table.add_row(name, *counts, _gb(sizes["stored"]))
    return table


def _memory(name: str, memory: Mapping[str, Any]) -> Table:
    table = Table(title=f"{name}: GB of a device", box=None)
    table.add_column("")
    for phase in _PHASES.values():
        table.add_column(phase, justify="right")
    for part, label in _PARTS.items():
        phases = [memory[phase] for phase in _PHASES]
        if any(part in phase and phase[part] != 0 for phase in phases):
            table.add_row(label, *(_gb(phase[part]) if part in phase else "" for phase in phases))
    return table


def _disk(report: Mapping[str, Any]) -> Table:
    table = Table(title="GB of disk", box=None, show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, size in report["disk"].items():
        table.add_row(name.replace("_", " "), _gb(size))
    return table


def _time(report: Mapping[str, Any]) -> Table:
    time, corpus = report["time"], report["corpus"]
    bound = "" if corpus["origin"] != "limits" else "at most "
    table = Table(title="tokens and time", box=None, show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("responses to train on", f"{bound}{corpus['train_responses']:,}")
    table.add_row("their tokens", f"{bound}{corpus['train_tokens']:,}")
    table.add_row("tokens that the target decodes", f"{bound}{time['rollout_tokens']:,}")
    table.add_row("tokens learned in all steps", f"{bound}{time['training_tokens']:,}")
    table.add_row("tokens learned in a warm start", f"{bound}{time['warm_start_tokens']:,}")
    for key in ("rollout_hours", "training_hours", "device_hours", "cost", "warm_start_hours"):
        if time[key] is not None:
            table.add_row(key.replace("_", " "), f"{bound}{time[key]:,.1f}")
    return table


def _gb(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else f"{num_bytes / _BYTES_PER_GB:,.2f}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M"
