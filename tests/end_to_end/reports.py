"""What the report of a run is made of, read from a project, beside advice measured in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith import provenance
from draftsmith.artifacts import read_json, write_json
from draftsmith.corpus.dataset import read_split
from draftsmith.decoding import Lengths
from draftsmith.evaluation.advice import Plan, advice_report
from draftsmith.registry.loading import load_pair
from draftsmith.registry.records import CHAMPIONS, recorded

_REPORTS = ("decision", "registration", "evaluation", "benchmark", "drift", "incumbent")
_PLAN = Plan((1, 2), (16, 32), (8,), Lengths(2, 2), seconds=2.0)


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


def advice_on(uri: str, root: Path, folder: Path) -> dict[str, Any]:
    """What `draftsmith advise` would write of a pair, on a grid that a tiny target has room for."""
    pair = load_pair(uri, root=root)
    rollouts = [row for row in read_split(root / "data/corpus", "eval") if row.temperature == 0]
    found = advice_report(
        pair.contestants(), pair.survivals(), rollouts, plan=_PLAN, folder=folder / "partial"
    )
    origin = {"device": provenance.device(), "provenance": provenance.collect()}
    identity = {"schema": 2, "pair_digest": pair.record.digest}
    write_json(folder / "advice.json", identity | origin | found)
    return read_json(folder / "advice.json")
