"""Descriptions of the registered model and its versions, in Markdown: what a browsing reader needs.

Pure. The model's description is about its champion. A version's is the gate's own report on it;
until the gate has judged it, the figures that its tags state.
"""

from __future__ import annotations

from collections.abc import Mapping

from draftsmith.artifacts import short
from draftsmith.registry.pair import METRIC_TAGS, SOURCE_TAG, PairRecord, PairVersion

_DAY = len("2026-01-01")
_LONGEST = 5000  # characters; MLflow's column on databases that count
_CUT = "\n\nCut here; the whole is `decision/report.md` of the source run.\n"


def model_description(
    name: str, champion: PairVersion | None = None, since: str | None = None
) -> str:
    """What a registered model of pairs is, what its champion does, and where its story stands.

    Args:
        name: The model.
        champion: The version that services load.
        since: ISO time at which it became that.
    """
    return f"""Pairs of a target and its draft for speculative decoding, one version a pair, \
registered by draftsmith.

{_champion(name, champion, since)}

- `models:/{name}@champion` is what services load: `draftsmith serve models:/{name}@champion`.
- `@challenger` is what the last run proposed.
- A version's description is the gate's report on it, its tags are the pair's identity and figures.
- A version's source run holds metrics by domain, draft position, draft length and batch size, the \
training's curves, and under Artifacts `evidence/` with its plots and `decision/report.html`.
- Every promotion and rollback is a run of the same experiment, with its reason.
"""


def _champion(name: str, champion: PairVersion | None, since: str | None) -> str:
    if champion is None:
        return "**No champion yet**: nothing was promoted."
    pair, tags = champion.pair, champion.tags
    day = "" if since is None else f" since {since[:_DAY]}"
    source = f", `{tags[SOURCE_TAG]}`" if SOURCE_TAG in tags else ""
    return (
        f"**Champion{day}: version {pair.version}**, recipe {pair.recipe}, for target "
        f"`{short(pair.target_digest)}`{source}: {_figures(tags)}.\n\n"
        f'Load it: `draftsmith.load_pair("models:/{name}@champion")`'
    )


def _figures(tags: Mapping[str, str]) -> str:
    """Headline figures, as far as they were measured, and where."""
    told = {key: f"{key} {tags[key]}" for key in METRIC_TAGS if key in tags}
    if "alpha" in told and "temperature" in tags:
        told["alpha"] += f" at temperature {tags['temperature']}"
    if "speedup" in told and "speedup_low" in tags:
        told["speedup"] += f" ({tags['speedup_low']} to {tags['speedup_high']})"
    where = f" on {tags['device']}" if "device" in tags else ""
    return f"{', '.join(told.values()) or 'nothing measured'}{where}"


def unjudged(record: PairRecord, tags: Mapping[str, str]) -> str:
    """A version that no gate has judged yet.

    Args:
        record: The pair.
        tags: Its headline figures.
    """
    return (
        f"Not judged yet. Recipe {record.draft.recipe}, pair `{short(record.digest)}`, for target "
        f"`{short(record.target_digest)}`: {_figures(tags)}.\n"
    )


def of_report(report: str) -> str:
    """The gate's report as a description: lists of versions show how it begins, without markup.

    Cut behind a whole line where it is too long.
    """
    report = report.removeprefix("## ")
    if len(report) <= _LONGEST:
        return report
    return report[: report.rindex("\n", 0, _LONGEST - len(_CUT))] + _CUT
