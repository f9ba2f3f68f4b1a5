"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from draftsmith.artifacts import short
from draftsmith.report.tables import (
    MISSING,
    advised,
    draft_lengths,
    interval,
    number,
    percent,
    reasons,
)


def measured_table(result: Mapping[str, Any]) -> Table:
    """Figures of a pair that `draftsmith measure` measured."""
    table = Table(box=None, show_header=False)
    rows = {
        "alpha at temperature 0": result["alpha"],
        "tau (tokens a round)": result["block_efficiency"],
        "speedup": result["speedup"],
        "against Transformers generate": result["ratios"]["speculative_vs_generate"],
        "against assisted generation": result["ratios"].get("speculative_vs_assisted"),
        "against prompt lookup": result["ratios"]["speculative_vs_prompt_lookup"],
    }
    for name, estimate in rows.items():
        if estimate is None:  # Transformers cannot draft with a head on features
            continue
        low, high = (f"{estimate[bound]:.2f}" for bound in ("low", "high"))
        table.add_row(name, f"{estimate['mean']:.2f}", f"{low} to {high}")
    table.add_row("predicted speedup", f"{result['predicted_speedup']:.2f}", "")
    table.add_row("drafts", draft_lengths(result), "")
    copied = result["copied"]["share"]
    table.add_row("rounds copied from the text", f"{copied:.2f}", "")
    survival = " ".join(f"{share:.2f}" for share in result["survival"])
    table.add_row("survival by position", survival, "")
    return table


def advice_tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """What `draftsmith advise` found: a table for each temperature, a column for each length."""
    workloads = report["workloads"]
    lengths = sorted({entry["new_tokens"] for entry in workloads})
    for temperature in sorted({entry["temperature"] for entry in workloads}):
        table = Table(title=f"temperature {temperature}: speedup at draft length", box=None)
        for name in ("batch", "context", *(f"{tokens} tokens" for tokens in lengths)):
            table.add_column(name, justify="right")
        rows: dict[tuple[int, int], list[str]] = {}
        for entry in workloads:
            if entry["temperature"] == temperature:
                cells = rows.setdefault((entry["batch_size"], entry["context"]), [])
                cells.append(_told(entry))
        for (batch_size, context), cells in sorted(rows.items()):
            table.add_row(str(batch_size), str(context), *cells)
        yield table


def _told(entry: Mapping[str, Any]) -> str:
    """As `advised`, with what drafts would give beside what is better: "int8 1.50, drafts 1.25"."""
    is_less = entry["instead"] is not None and entry["speedup"] > 1
    return advised(entry) + (f", drafts {entry['speedup']:.2f}" if is_less else "")


def alternatives_table(report: Mapping[str, Any]) -> Table:
    """Other dtypes and int8 weights against the served target without drafts."""
    title = f"against the target in {report['served_dtype']} without drafts"
    table = Table(title=title, box=None)
    for name in ("target in", "batch", "alone", "with drafts", "greedy tokens the same"):
        table.add_column(name, justify="right")
    for entry in report["alternatives"]:
        if "left_out" in entry:
            table.add_row(entry["scheme"], MISSING, f"left out: {entry['left_out']}")
            continue
        table.add_row(
            entry["scheme"],
            str(entry["batch_size"]),
            "served" if entry["keeps_the_targets_law"] else interval(entry["ratio"], 2),
            interval(entry["ratio_with_drafts"], 2),
            percent(entry["same_greedy_tokens"]),
        )
    return table


def prediction_line(report: Mapping[str, Any]) -> str:
    """How far the predictions were from what was decoded."""
    checked = report["prediction"]
    left_out = "".join(f"Left out: {what}. " for what in report["left_out"])
    if not checked["num_trials"]:
        return f"{left_out}No prediction was checked: give it more time."
    bar = checked["error_bar"]
    wide = "too few to say more" if bar is None else f"nine of ten within {bar:.0%}"
    return (
        f"{left_out}Predictions against {checked['num_trials']} workloads that were decoded: half "
        f"are within {checked['median_error']:.0%}, {wide}; a gain was taken for a loss, or a loss "
        f"for a gain, {checked['sign_errors']} times. A question mark: the gain is within that "
        "error, or too few were decoded. The name of a dtype: decoding in it without drafts is "
        "surely faster than the best drafts, but as another target."
    )


def target_line(target: Mapping[str, Any] | None) -> str:
    """build/target.json in a line."""
    if target is None:
        return "none resolved yet: run `dvc repro`"
    millions = target["num_parameters"] / 1e6
    return (
        f"{short(target['digest'])} ({target['model_type']}, {millions:.0f} M, {target['dtype']})"
    )


def pair_line(pair: Mapping[str, Any] | None) -> str:
    """A registered pair in a line."""
    if pair is None:
        return "none"
    return f"version {pair['version']}, {pair['recipe']}, pair {short(pair['pair_digest'])}"


def decision_line(decision: Mapping[str, Any] | None) -> str:
    """reports/decision.json in a line: verdict, reasons, and what somebody signed off."""
    if decision is None:
        return "none yet"
    told = "; ".join(reasons(decision))
    return f"{decision['verdict']} version {decision['version']}" + (f": {told}" if told else "")


def what_if_table(found: Mapping[str, Any]) -> Table:
    """What `draftsmith what-if` found: how drafts aged, and a new draft against the old one."""
    table = Table("", "new draft", "old draft", box=None)
    rows = {
        "alpha on the new target": ("alpha", 3),
        "speedup": ("speedup", 2),
        "device-hours a day": ("device_hours_per_day", 2),
    }
    for name, (key, digits) in rows.items():
        table.add_row(name, *(number(value, digits) for value in found[key]))
    for entry in found["alpha_by_updates"]:
        age, name = entry["updates"], f"alpha after {entry['updates']} updates, seen"
        cells = (number(entry["alpha"]), "") if age == 0 else ("", number(entry["alpha"]))
        table.add_row(name, *cells)
    return table


def what_if_line(found: Mapping[str, Any]) -> str:
    """Whether the new draft pays."""
    costs = f"Distilling costs {found['cost']:.2f} and saves {found['saved_per_day']:.2f} a day"
    if found["break_even_days"] is None:
        return f"{costs}: it never pays for itself."
    return f"{costs}: it has paid for itself after {found['break_even_days']:.3g} days."
