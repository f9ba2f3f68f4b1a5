"""The page of a run: self-contained HTML, verdict first. The layout is in `templates/page.html.j2`.

Every number comes from the reports; nothing is recomputed here. All text is escaped by the template
engine; only the charts, drawn by this package, are embedded as they are.
"""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from draftsmith.report import figures, tables
from draftsmith.report.inputs import ReportInputs

_SEVERITY_WORDS = {"block": "blocking", "warn": "warning only", "off": "switched off"}
_FILTERS = (
    tables.number, tables.count, tables.signed, tables.percent, tables.times, tables.interval,
    tables.change, tables.digest, tables.words, tables.reasons, tables.draft_lengths,
    tables.predicted_tau,
)  # fmt: skip


def render_page(inputs: ReportInputs) -> str:
    """The report as one HTML document that loads nothing from elsewhere.

    Raises:
        EvidenceError: A report does not cover the registered recipe.
    """
    template = _environment().get_template("page.html.j2")
    record, speed = inputs.evaluated, inputs.benchmarked
    return template.render(
        inputs=inputs,
        record=record,
        speed=speed,
        temperatures=sorted(record["alpha"], key=float),
        champion_alpha=(inputs.champion_record or {}).get("alpha", {}),
        charts=_charts(inputs),
        severity_words=_SEVERITY_WORDS,
        target_facts=list(tables.facts(inputs.target)),
        manifest_facts=list(tables.facts(inputs.manifest or {})),
        device_facts=list(tables.facts(inputs.benchmark["device"])),
        provenance={
            name: list(tables.facts(report.get("provenance") or {}))
            for name, report in (("evaluation", inputs.evaluation), ("benchmark", inputs.benchmark))
        },
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("draftsmith.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in _FILTERS:
        environment.filters[function.__name__] = function
    return environment


def _charts(inputs: ReportInputs) -> dict[str, Markup]:
    """Charts by name; one without data is left out."""
    record, speed = inputs.evaluated, inputs.benchmarked
    drawn = {}
    for index, key in enumerate(sorted(record["alpha"], key=float)):
        if record["alpha"][key]["by_domain"]:
            figure = figures.alpha_by_domain(record, key, champion=inputs.champion_record)
            drawn[f"alpha_{key}"] = (figure, f"alpha-{index}", "Acceptance rate by domain")
    if record["survival"]:
        figure = figures.survival_by_position(record)
        drawn["survival"] = (figure, "survival", "Survival by draft position")
    if speed["calibration"]:
        figure = figures.speedup_by_draft_length(speed)
        drawn["calibration"] = (figure, "calibration", "Speedup by draft length")
    if speed["batch"]:
        figure = figures.speedup_by_batch_size(speed)
        drawn["batch"] = (figure, "batch", "Speedup by batch size")
    # Built here from numbers and domain names, which matplotlib escapes.
    return {
        key: Markup(figures.inline_svg(figure, name, description=description))
        for key, (figure, name, description) in drawn.items()
    }
