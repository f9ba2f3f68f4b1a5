"""Imported speed evidence in the project: evidence/<pair>/<device>-<day>-<content>.json.

These files are in Git and a dependency of stage gate, so importing evidence makes the next
`dvc repro` decide again, on every clone. Nothing is ever overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.artifacts import read_json, short, write_json
from draftsmith.errors import ArtifactError, EvidenceError
from draftsmith.registry.advice_table import ADVICE, read_advice
from draftsmith.registry.device_evidence import (
    PROGRAM,
    Report,
    checked_entries,
    file_name,
    judged_benchmark,
)

EVIDENCE = Path("evidence")


def read_measurement(path: Path) -> dict[str, Any]:
    """Read what the measuring program wrote.

    Raises:
        EvidenceError: There is no such file, or it is no JSON object.
    """
    try:
        return read_json(path)
    except ArtifactError as error:
        raise EvidenceError(
            error.what,
            found=error.found,
            expected=f"the JSON that `{PROGRAM}` writes",
            remedy="name the file that --out of that program wrote, or measure again",
        ) from error


def keep(report: Report, *, root: Path) -> Path:
    """Write evidence with one entry to its place, which it returns; the same file stays as it is.

    Raises:
        ArtifactError: The disk refused.
    """
    (entry,) = report["recipes"].values()
    path = root / EVIDENCE / short(entry["pair_digest"]) / file_name(report)
    if not path.exists():
        write_json(path, report)
    return path


def imported(pair_digest: str, *, root: Path = Path()) -> dict[str, Any]:
    """The evidence of a pair that was imported here, by the name of its file.

    Raises:
        EvidenceError: A file was damaged, or is of another pair.
    """
    folder = root / EVIDENCE / short(pair_digest)
    found = {}
    for path in sorted(folder.glob("*.json")):
        report = read_measurement(path)
        digests = {e["pair_digest"] for e in checked_entries(report, path=str(path)).values()}
        if digests != {pair_digest}:
            raise EvidenceError(
                f"reading {path}",
                found=f"evidence of pair {', '.join(map(short, sorted(digests))) or 'none'}",
                expected=f"evidence of pair {short(pair_digest)}, whose folder this is",
                remedy="remove the file, and import the measurement with `draftsmith evidence "
                "import`",
            )
        found[path.relative_to(root).as_posix()] = report
    return found


def benchmark_for_gate(
    reports: Mapping[str, Report], *, device: str, root: Path = Path()
) -> Report:
    """The benchmark that the gate judges: this machine's, or an imported one.

    Args:
        reports: reports/benchmark.json and reports/registration.json, by their names.
        device: gate.device.
        root: The project's folder.

    Raises:
        EvidenceError: Evidence of the registered pair is damaged.
    """
    registration = reports["registration"]
    return judged_benchmark(
        reports["benchmark"],
        imported(registration["pair_digest"], root=root),
        registration=registration,
        wanted=device,
    )


def advice_for_gate(reports: Mapping[str, Report], *, root: Path = Path()) -> Report | None:
    """What `draftsmith advise` found of the registered pair; None where it was not run for it.

    Args:
        reports: reports/registration.json, by its name.
        root: The project's folder.

    Raises:
        ArtifactError: The file is damaged.
    """
    return read_advice(root / ADVICE, reports["registration"]["pair_digest"])
