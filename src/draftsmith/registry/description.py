"""Descriptions of the registered model and its versions, in Markdown: what a browsing reader needs.

Pure. A version's description is the gate's own report on it; until the gate has judged it, the
figures that its tags state.
"""

from __future__ import annotations

from collections.abc import Mapping

from draftsmith.artifacts import short
from draftsmith.registry.pair import PairRecord

_LONGEST = 5000  # characters; MLflow's column on databases that count
_CUT = "\n\nCut here; the whole is `decision/report.md` of the source run.\n"


def model_description(name: str) -> str:
    """What a registered model of pairs is, and where its story stands."""
    return f"""Pairs of a target and its draft for speculative decoding, one version a pair, \
registered by draftsmith.

- `models:/{name}@champion` is what services load: `draftsmith serve models:/{name}@champion`.
- `@challenger` is what the last run proposed.
- A version's description is the gate's report on it, its tags are the pair's identity and figures.
- A version's source run holds metrics by domain, draft position, draft length and batch size, the \
training's curves, and under Artifacts `evidence/` with its plots and `decision/report.html`.
- Every promotion and rollback is a run of the same experiment, with its reason.
"""


def unjudged(record: PairRecord, tags: Mapping[str, str]) -> str:
    """A version that no gate has judged yet.

    Args:
        record: The pair.
        tags: Its headline figures.
    """
    figures = ", ".join(f"{key} {tags[key]}" for key in ("alpha", "tau", "speedup") if key in tags)
    where = f" on {tags['device']}" if "device" in tags else ""
    return (
        f"Not judged yet. Recipe {record.draft.recipe}, pair `{short(record.digest)}`, for target "
        f"`{short(record.target_digest)}`: {figures or 'nothing measured'}{where}.\n"
    )


def of_report(report: str) -> str:
    """The gate's report as a description: lists of versions show how it begins, without markup.

    Cut behind a whole line where it is too long.
    """
    report = report.removeprefix("## ")
    if len(report) <= _LONGEST:
        return report
    return report[: report.rindex("\n", 0, _LONGEST - len(_CUT))] + _CUT
