"""The page of a run: self-contained HTML, verdict first. The layout is in `templates/page.html.j2`.

Numbers come from the reports as they are; three are computed from them: the least alpha that pays,
measured minus predicted speedup, and the caches of the largest batch that was advised on. All text
is escaped by the template engine; only the charts, drawn by this package, are embedded as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from draftsmith.report import boundary, figures, step_costs, tables
from draftsmith.report.inputs import ReportInputs

_SEVERITY_WORDS = {"block": "blocking", "warn": "warning only", "off": "switched off"}
_FILTERS = (
    tables.number, tables.count, tables.signed, tables.percent, tables.times, tables.interval,
    tables.change, tables.digest, tables.words, tables.reasons, tables.draft_lengths,
    tables.predicted_tau, tables.advised, tables.survival, tables.scaled, tables.waits_for,
    tables.memory,
)  # fmt: skip
_FAILED = ("fail", "overridden")  # stand first
_Drawn = tuple[str, Figure, str]


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
        checks=sorted(inputs.decision["checks"], key=lambda check: check["verdict"] not in _FAILED),
        target_facts=list(tables.facts(inputs.target)),
        manifest_facts=list(tables.facts(inputs.manifest or {})),
        device_facts=list(tables.facts(inputs.benchmark["device"])),
        provenance={
            name: list(tables.facts(report.get("provenance") or {}))
            for name, report in (
                ("evaluation", inputs.evaluation),
                ("benchmark", inputs.benchmark),
                ("advice", inputs.advice or {}),
            )
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
    drawn = (*_acceptance(inputs), *_speed(inputs), *_advice(inputs))
    # Built here from numbers and domain names, which matplotlib escapes.
    return {
        name: Markup(figures.inline_svg(figure, f"chart-{index}", description=description))
        for index, (name, figure, description) in enumerate(drawn)
    }


def _acceptance(inputs: ReportInputs) -> Iterator[_Drawn]:
    record = inputs.evaluated
    for key in sorted(record["alpha"], key=float):
        if record["alpha"][key]["by_domain"]:
            figure = figures.alpha_by_domain(
                record, key, champion=inputs.champion_record, break_even=inputs.break_even
            )
            yield f"alpha_{key}", figure, "Acceptance rate by domain"
    if record["survival"]:
        yield "survival", figures.survival_by_position(record), "Survival by draft position"


def _speed(inputs: ReportInputs) -> Iterator[_Drawn]:
    speed = inputs.benchmarked
    if speed["calibration"]:
        yield "calibration", figures.speedup_by_draft_length(speed), "Speedup by draft length"
    if speed["batch"]:
        yield "batch", figures.speedup_by_batch_size(speed), "Speedup by batch size"


def _advice(inputs: ReportInputs) -> Iterator[_Drawn]:
    advice = inputs.advice
    if advice is None:
        return
    for temperature in sorted({entry["temperature"] for entry in advice["workloads"]}):
        figure = boundary.speedup_map(advice["workloads"], temperature)
        yield f"map_{temperature}", figure, "Expected speedup by batch size and prompt"
    if advice["trials"]:
        figure = boundary.predicted_and_measured(advice["trials"], inputs.benchmarked)
        yield "trials", figure, "Measured against predicted speedup"
    figure = step_costs.step_times(advice["measured_costs"])
    yield "steps", figure, "Times of forwards by number of positions"
