"""Speed evidence of a registered version, by device and day: attached to its run, and listed.

What was attached once is never replaced. Knows nothing of which evidence the gate takes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from draftsmith.artifacts import read_json, write_json
from draftsmith.registry.device_evidence import Report, file_name, summary
from draftsmith.registry.mlflow_connection import translated
from draftsmith.registry.mlflow_upload import DEVICE_EVIDENCE, HISTORY

if TYPE_CHECKING:
    from draftsmith.registry.mlflow_catalog import Catalog

_BENCHMARK = "benchmark.json"
_DAY = len("2026-01-01")


@translated("attaching evidence of a device")
def attach(catalog: Catalog, version: str, report: Report) -> None:
    """Attach imported evidence to a version; its name tells other evidence apart from it."""
    run_id = str(catalog.client.get_model_version(catalog.name, version).run_id)
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        path = Path(folder) / file_name(report)
        write_json(path, report)
        catalog.client.log_artifact(run_id, str(path), DEVICE_EVIDENCE)


@translated("listing the evidence of a version")
def attached(catalog: Catalog, version: str) -> list[dict[str, Any]]:
    """Every measurement of a version's speed, oldest first.

    Returns:
        Each with `device`, `kind`, `time_utc` (a day only, where the pipeline measured),
        `draft_length`, `speedup`, `origin` (imported or pipeline) and `artifact`.
    """
    run_id = str(catalog.client.get_model_version(catalog.name, version).run_id)
    found = [
        summary(_read(catalog, run_id, item.path)) | {"origin": "imported", "artifact": item.path}
        for item in _items(catalog, run_id, DEVICE_EVIDENCE)
    ]
    for folder in _items(catalog, run_id, HISTORY):
        names = [item.path for item in _items(catalog, run_id, folder.path)]
        path = f"{folder.path}/{_BENCHMARK}"
        if path in names:
            found.append(_of_pipeline(_read(catalog, run_id, path), path))
    return sorted(found, key=lambda entry: (entry["time_utc"], entry["artifact"]))


def _of_pipeline(record: dict[str, Any], path: str) -> dict[str, Any]:
    """The record of a run of the pipeline, whose folder begins with the day."""
    device = record.get("device") or {}
    return {
        "device": device.get("name"),
        "kind": device.get("kind"),
        "time_utc": PurePosixPath(path).parent.name[:_DAY],
        "draft_length": record.get("draft_length"),
        "speedup": record["speedup"],
        "origin": "pipeline",
        "artifact": path,
    }


def _items(catalog: Catalog, run_id: str, folder: str) -> list[Any]:
    return list(catalog.client.list_artifacts(run_id, folder))


def _read(catalog: Catalog, run_id: str, path: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        return read_json(Path(catalog.client.download_artifacts(run_id, path, folder)))
