"""The table of recipes: its columns, and how far the rows lie apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.measuring import table
from draftsmith.drift.comparison import compare
from draftsmith.drift.prediction import break_even_alpha

ALL = "all"  # domains
_OF_PROMPT = ("prompt_id", "domain", "alpha")
_SEED = 0

Entry = Mapping[str, Any]


def summary(evaluated: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the table and what they come from, of a draft's entries in both reports."""
    taken = (
        *("draft_length", "tree", "tau", "expected_tau", "predicted_speedup", "speedup"),
        *("lookup_length", "chain_length", "calibration", "cost", "ratios", "arms", "batch"),
    )
    return {
        "alpha": evaluated["alpha"],
        "prompts": [{key: prompt[key] for key in _OF_PROMPT} for prompt in evaluated["prompts"]],
        "survival": evaluated["survival"],
        "copied": evaluated["copied"],
        "guesses": evaluated.get("guesses", {}),
        "break_even_alpha": break_even_alpha(measured),
        "digest": evaluated["draft_digest"],
        "losslessness": evaluated["losslessness"]["holds"],
    } | {name: measured[name] for name in taken}


def alpha_changes(entries: Mapping[str, Entry]) -> dict[str, dict[str, Any]]:
    """How far each row's alpha is from the first row's, by temperature, in all and by domain.

    Paired by prompt: intervals of two rows may overlap where one is surely better.
    """
    first, *others = entries
    return {name: _changes(entries[first], entries[name]) for name in others}


def _changes(reference: Entry, entry: Entry) -> dict[str, Any]:
    domains = {prompt["domain"] for prompt in reference["prompts"]}
    groups = {ALL: domains} | {domain: {domain} for domain in sorted(domains)}
    return {
        temperature: {
            name: asdict(compare(*_alphas(reference, entry, temperature, group), seed=_SEED))
            for name, group in groups.items()
        }
        for temperature in reference["alpha"]
    }


def _alphas(
    reference: Entry, entry: Entry, temperature: str, domains: Collection[str]
) -> tuple[dict[str, float], dict[str, float]]:
    first, second = (
        {
            prompt["prompt_id"]: prompt["alpha"][temperature]
            for prompt in side["prompts"]
            if prompt["domain"] in domains
        }
        for side in (reference, entry)
    )
    return first, second


def shown(
    lookup: Mapping[str, Any], entries: Mapping[str, Entry], changes: Mapping[str, Any]
) -> str:
    """The table as text."""
    temperatures = list(next(iter(entries.values()))["alpha"])
    sizes = [size for size in lookup if size != "1"]
    head = ["recipe", "trained", "tokens", "seconds"]
    head += [*(f"alpha at {key}" for key in temperatures), f"beyond {next(iter(entries))}"]
    head += ["pays at"]
    head += ["draft", "tau", "c", "speedup, batch 1", *(f"batch {size}" for size in sizes)]
    single = lookup["1"]
    first = ["prompt lookup", "0", "0", "0", *("" for _ in temperatures), "", ""]
    first += [f"copies {single['copy_length']}", f"{single['tau']:.2f}", "0"]
    first += [_interval(single["speedup"]), *(_times(lookup[n]["speedup"]) for n in sizes)]
    rows = [
        _cells(name, entry, changes.get(name, {}).get(temperatures[0]), sizes)
        for name, entry in entries.items()
    ]
    return table(head, [first, *rows])


def _cells(
    name: str, entry: Entry, change: Mapping[str, Any] | None, sizes: Sequence[str]
) -> list[str]:
    # No drafts are the best choice of a batch: nothing was measured against the baseline.
    batches = {
        str(e["batch_size"]): f"{e['speedup']:.2f}"
        if e["draft_length"] or e["lookup_length"]
        else "no drafts"
        for e in entry["batch"]
    }
    drafts = f"tree {len(entry['tree'])}" if entry["tree"] else str(entry["draft_length"])
    seconds, least = entry["training_s"], entry["break_even_alpha"]
    return [
        name,
        f"{entry['trained_parameters'] / 1e6:.1f} M",
        f"{entry['predicted_tokens']:,}",
        "taken over" if seconds is None else f"{seconds:.0f}",
        *(f"{value['mean']:.3f}" for value in entry["alpha"].values()),
        "" if change is None else _change(change[ALL]),
        "never" if least is None else f"{least:.3f}",
        drafts,
        f"{entry['tau']:.2f}",
        f"{entry['cost']['cost_ratio']:.3f}",
        _interval(entry["speedup"]),
        *(batches[size] for size in sizes),
    ]


def _interval(estimate: Mapping[str, Any]) -> str:
    return "{mean:.2f} ({low:.2f} to {high:.2f})".format(**estimate)


def _change(change: Mapping[str, float]) -> str:
    return "{change:+.3f} ({low:+.3f} to {high:+.3f})".format(**change)


def _times(estimate: Mapping[str, Any]) -> str:
    return f"{estimate['mean']:.2f}"
