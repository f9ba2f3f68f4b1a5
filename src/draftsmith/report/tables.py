"""How numbers read in a report: one place for digits, signs and what stands for a missing value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from draftsmith.artifacts import short

MISSING = "–"
_PREFIXES = ("", "k", "M", "G", "T")


def number(value: float | str | None, digits: int = 3) -> str:
    """A number with fixed digits; words stay, None becomes a dash."""
    if value is None:
        return MISSING
    if isinstance(value, str | bool):
        return str(value)
    return f"{value:,.{digits}f}"


def count(value: int | None) -> str:
    """A whole number with thousands separated."""
    return MISSING if value is None else f"{value:,d}"


def scaled(value: float, unit: str) -> str:
    """A large quantity with its unit: 269.030 MB; below a thousand it stays whole."""
    power = 0
    while value >= 1000 and power < len(_PREFIXES) - 1:  # noqa: PLR2004  as the prefixes
        value, power = value / 1000, power + 1
    return f"{value:,.{3 if power else 0}f} {_PREFIXES[power]}{unit}"


def signed(value: float | None, digits: int = 3) -> str:
    """A change, always with its sign."""
    return MISSING if value is None else f"{value:+.{digits}f}"


def percent(value: float | None) -> str:
    """A share in percent with one decimal."""
    return MISSING if value is None else f"{100 * value:.1f} %"


def times(value: float | None) -> str:
    """A ratio as a factor: 1.27×."""
    return MISSING if value is None else f"{value:.2f}×"


def interval(estimate: Mapping[str, Any] | None, digits: int = 3) -> str:
    """Mean and bounds of an estimate: 0.412 (0.398 to 0.427)."""
    if estimate is None:
        return MISSING
    mean, low, high = (number(estimate[key], digits) for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def survival(record: Mapping[str, Any], temperature: str) -> list[str]:
    """Survival by position, each with its interval where the record has it.

    It has none of positions that no round came to.
    """
    known = record.get("positions", {}).get(temperature, ())
    return [
        number(value) if entry is None else interval({**entry["survival"], "mean": value})
        for value, entry in zip_longest(record["survival"][temperature], known)
    ]


def change(comparison: Mapping[str, Any] | None, digits: int = 3) -> str:
    """Change and bounds of a comparison: -0.012 (-0.020 to -0.004)."""
    if comparison is None:
        return MISSING
    value, low, high = (signed(comparison[key], digits) for key in ("change", "low", "high"))
    return f"{value} ({low} to {high})"


def predicted_tau(by_temperature: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Predicted changes of tau as entries like those of alpha; those without one are left out."""
    return {
        key: {
            **entry["predicted"]["tau"],
            "by_domain": {d: part["tau"] for d, part in entry["predicted"]["by_domain"].items()},
        }
        for key, entry in by_temperature.items()
        if entry.get("predicted")
    }


def digest(value: str | None) -> str:
    """The short form of a digest."""
    return MISSING if value is None else short(value)


def words(name: str) -> str:
    """An identifier as words: engine_vs_generate -> engine vs generate."""
    return name.replace("_", " ")


def reasons(decision: Mapping[str, Any]) -> list[str]:
    """The reasons of a decision, and every failure that somebody signed off."""
    checks = decision.get("checks", [])
    signed_off = [check["detail"] for check in checks if check["verdict"] == "overridden"]
    return list(dict.fromkeys([*decision.get("reasons", []), *signed_off]))


def draft_lengths(speed: Mapping[str, Any]) -> str:
    """How a pair was decoded with: "draft length 1, copies up to 5", "trees of 6 tokens"."""
    copies, nodes = speed.get("lookup_length") or 0, len(speed.get("tree", ()))
    drafts = f"trees of {nodes} tokens" if nodes else f"draft length {speed['draft_length']}"
    return drafts + (f", copies up to {copies}" if copies else "")


def advised(entry: Mapping[str, Any]) -> str:
    """What advice.json says of a workload, with a "?" where that is in doubt.

    "1.40 at 2", "1.52 by a tree of 3", "1.10 copies alone", "do not", "int8 1.50".
    """
    instead = entry["instead"]
    if instead is not None:
        return f"{instead['scheme']} {instead['ratio']['mean']:.2f}"
    doubt = "?" if entry["verdict"] == "about even" else ""
    if entry["tree"]:
        return f"{entry['speedup']:.2f} by a tree of {len(entry['tree'])}{doubt}"
    if entry["draft_length"]:
        return f"{entry['speedup']:.2f} at {entry['draft_length']}{doubt}"
    alone = f"{entry['speedup']:.2f} copies alone" if entry["copy_length"] else "do not"
    return alone + doubt


def waits_for(cell: Mapping[str, Any]) -> str:
    """What verifications of so many positions wait for: "memory up to 8, then arithmetic"."""
    widths = sorted(cell["bound"], key=int)
    waiting = [width for width in widths if cell["bound"][width] == "memory"]
    if not waiting:
        return "arithmetic"
    if len(waiting) == len(widths):
        return "memory"
    return f"memory up to {waiting[-1]}, then arithmetic"


def memory(advice: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sizes of target and draft in advice.json, with the caches of its largest measured batch."""
    tokens = max(cell["batch_size"] * cell["context"] for cell in advice["measured_costs"])
    return {
        name: {**size, "largest": tokens * size["cache_bytes"]}
        for name, size in (("target", advice["target_size"]), ("draft", advice["draft_size"]))
    }


def facts(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested plain values as rows of (dotted name, text), in the order of the mapping.

    Lists of mappings and of lists are left out.
    """
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from facts(value, f"{name}.")
        elif isinstance(value, list | tuple):
            if not any(isinstance(item, Mapping | list) for item in value):  # no curve in words
                yield name, ", ".join(str(item) for item in value) or MISSING
        elif isinstance(value, float):
            yield name, f"{value:.6g}"
        else:
            yield name, MISSING if value is None else str(value)
