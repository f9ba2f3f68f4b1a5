"""What the report of a run is made of, read from a project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.artifacts import read_json
from draftsmith.registry.records import CHAMPIONS, recorded

_REPORTS = ("decision", "registration", "evaluation", "benchmark", "drift", "incumbent")


def reports_of(root: Path) -> dict[str, Any]:
    """What stage gate hands to the report, by the names in `ReportInputs`."""
    reports: dict[str, Any] = {n: read_json(root / "reports" / f"{n}.json") for n in _REPORTS}
    champion = read_json(root / "build/champion.json")["champion"]
    held = recorded(champion, root=root / CHAMPIONS)
    recipe = reports["registration"]["recipe"]
    return reports | {
        "target": read_json(root / "build/target.json"),
        "champion": champion,
        "champion_record": held and held.record,
        "manifest": read_json(root / "models/drafts" / recipe / "draft.json"),
    }
