"""Speed that was measured on another machine: when it is evidence of a pair, and when it counts.

Reports in, reports out: pure. A report of the measuring program has the shape of
reports/benchmark.json, so whatever reads the one reads the other.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.artifacts import digest_json, short
from draftsmith.errors import EvidenceError
from draftsmith.registry.pair import RegisteredPair, pair_digest

Report = Mapping[str, Any]

PROGRAM = "python -m draftsmith.evaluation.speed"
IMPORTED_FROM = "imported_from"
_SCHEMA = 1
_ANY = "any"
_SHORT = 8
_WAY_OF_DECODING = ("temperature", "lookup_length")
# What the gate and the report read of an entry, besides its digests and its speedup.
_ENTRY_KEYS = (
    *("draft_length", "calibration", "arms", "ratios"),
    *("batch", "cost", "tau", "predicted_speedup"),
)


def is_device(device: Mapping[str, Any], wanted: str) -> bool:
    """Whether a device is what gate.device asks for: any, its kind or its name."""
    accepted = {_ANY, str(device["kind"]).casefold(), str(device["name"]).casefold()}
    return wanted.casefold() in accepted


def judged_benchmark(
    local: Report, imported: Mapping[str, Report], *, registration: Report, wanted: str
) -> Report:
    """The benchmark that the gate judges.

    The one of this machine when it was measured where the configuration asks for it, otherwise the
    newest imported one that was. Speed of another way of decoding (another temperature, other
    copies from the text) is no evidence of this one.

    Args:
        local: reports/benchmark.json.
        imported: Evidence of the registered pair, by the name of its file; each with one entry.
        registration: reports/registration.json.
        wanted: gate.device.

    Returns:
        The local report, or an imported one whose entry goes by the registered recipe's name and
        whose `imported_from` names the file.
    """
    own = local["recipes"][registration["recipe"]]
    fitting = [
        name
        for name in imported
        if is_device(imported[name]["device"], wanted) and _is_decoded_as(own, imported[name])
    ]
    if is_device(local["device"], wanted) or not fitting:
        return local
    newest = max(fitting, key=lambda name: (measured_at(imported[name]), name))
    (entry,) = imported[newest]["recipes"].values()
    recipes = {registration["recipe"]: entry}
    return {**imported[newest], "recipes": recipes, IMPORTED_FROM: newest}


def _is_decoded_as(own: Report, other: Report) -> bool:
    (entry,) = other["recipes"].values()
    return all(float(own.get(key) or 0) == float(entry.get(key) or 0) for key in _WAY_OF_DECODING)


def served_as(own: Report, others: Sequence[Report], device: Mapping[str, Any]) -> Report:
    """The record whose draft length suits a device: the one that was measured nearest to it.

    Args:
        own: The pipeline's record of the pair, with its `device`; empty where there is none.
        others: Imported evidence of the pair, each with one entry.
        device: `kind` and `name` of where the pair is to be served.

    Returns:
        The pipeline's record where it was measured on this device, or nothing of the device's kind
        was; otherwise the newest entry of the device, or of its kind.
    """

    def nearness(report: Report) -> tuple[bool, bool]:
        measured = report.get("device") or {}
        return measured.get("name") == device["name"], measured.get("kind") == device["kind"]

    fitting = [report for report in others if _is_decoded_as(own, report)]
    newest = max(fitting, key=lambda report: (*nearness(report), measured_at(report)), default=None)
    if newest is None or nearness(newest) <= nearness(own):
        return own
    (entry,) = newest["recipes"].values()
    return dict(entry)


def evidence_of(report: Report, pair: RegisteredPair, *, dtype: str, path: str) -> dict[str, Any]:
    """A report cut down to what it says of a pair.

    Args:
        report: What was measured somewhere.
        pair: The pair that it is to be evidence of.
        dtype: In which the pair's target is served.
        path: For messages.

    Raises:
        EvidenceError: It is no such report, contradicts itself, or is of another pair.
    """
    entries = checked_entries(report, path=path)
    for name, entry in entries.items():
        if entry["pair_digest"] == pair.pair_digest:
            return {**report, "recipes": {name: entry}}
    found = [
        f"pair {short(entry['pair_digest'])} of target {short(report['target_digest'])} and draft "
        f"{short(entry['draft_digest'])} ({name})"
        for name, entry in entries.items()
    ]
    raise EvidenceError(
        f"importing {path} as evidence of version {pair.version} of {pair.name}",
        found=" and ".join(found) or "no measured recipe",
        expected=f"pair {short(pair.pair_digest)} of target {short(pair.target_digest)} and draft "
        f"{short(pair.draft_digest)}",
        remedy="name the version that was measured with --version (`draftsmith pairs` lists them), "
        f"or measure this one: `{PROGRAM}` with --dtype {dtype}, on the target's snapshot and the "
        "version's draft",
    )


def checked_entries(report: Report, *, path: str) -> dict[str, Any]:
    """The entries of a report, by recipe.

    Raises:
        EvidenceError: A part is missing or damaged, or a pair's digest is not that of its models.
    """
    try:
        if report["schema"] != _SCHEMA:
            raise ValueError(f"schema {report['schema']}")
        json.dumps(report, allow_nan=False)
        measured_at(report)
        target = str(report["target_digest"])
        device_label(report["device"])
        for entry in report["recipes"].values():
            _check_entry(entry, target)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        missing = isinstance(error, KeyError)
        raise EvidenceError(
            f"reading {path}",
            found=f"no key {error}" if missing else str(error),
            expected=f"the JSON that `{PROGRAM}` writes",
            remedy="copy the file again from the machine that measured, or measure again",
        ) from error
    return dict(report["recipes"])


def _check_entry(entry: Mapping[str, Any], target: str) -> None:
    if pair_digest(target, entry["draft_digest"]) != entry["pair_digest"]:
        raise ValueError(f"pair {short(entry['pair_digest'])}, which is not that of its models")
    estimate = entry["speedup"]
    low, mean, high = (float(estimate[bound]) for bound in ("low", "mean", "high"))
    if not (0 < low <= mean <= high < math.inf and int(estimate["num_prompts"]) > 0):
        raise ValueError(f"a speedup of {mean} ({low} to {high})")
    for key in _ENTRY_KEYS:
        entry[key]  # a missing one is the caller's KeyError


def measured_at(report: Report) -> datetime.datetime:
    """When it was measured.

    Raises:
        KeyError: It does not say.
        ValueError: It is no time, or has no zone.
    """
    text = report["provenance"]["time_utc"]
    time = datetime.datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text}, a time without its zone")
    return time.astimezone(datetime.UTC)


def device_label(device: Mapping[str, Any]) -> str:
    """A device's name as a part of file names: `NVIDIA H100 80GB` is `nvidia-h100-80gb`.

    Raises:
        KeyError: It has no kind or no name.
    """
    text = str(device["name"]) or str(device["kind"])
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or str(device["kind"])


def file_name(report: Report) -> str:
    """Device, day and content, such as `nvidia-h100-2026-03-01-0a1b2c3d.json`.

    The same measurement has the same name, another one never has it.
    """
    day = measured_at(report).date().isoformat()
    return f"{device_label(report['device'])}-{day}-{digest_json(report)[:_SHORT]}.json"


def summary(report: Report) -> dict[str, Any]:
    """What a list of evidence shows of a report with one entry."""
    (entry,) = report["recipes"].values()
    return {
        "device": report["device"]["name"],
        "kind": report["device"]["kind"],
        "time_utc": measured_at(report).isoformat(timespec="seconds"),
        "draft_length": entry["draft_length"],
        "speedup": entry["speedup"],
    }
