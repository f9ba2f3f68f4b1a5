"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from draftsmith.artifacts import short
from draftsmith.report.tables import reasons


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
    table.add_row("best draft length", str(result["draft_length"]), "")
    copied = result["copied"]["share"]
    table.add_row("rounds copied from the text", f"{copied:.2f}", "")
    survival = " ".join(f"{share:.2f}" for share in result["survival"])
    table.add_row("survival by position", survival, "")
    return table


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
