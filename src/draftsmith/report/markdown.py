"""The short twin of the page, for pull requests: verdict, reasons, checks, numbers, losers."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draftsmith.report.inputs import ReportInputs
from draftsmith.report.tables import (
    change,
    digest,
    draft_lengths,
    interval,
    number,
    percent,
    reasons,
    times,
    words,
)

_MARKUP = re.compile(r"([\\`*_\[\]|~#])")
_SIGNS = {"pass": "pass", "fail": "**FAIL**", "overridden": "**overridden**", "skip": "skip"}


def render_markdown(inputs: ReportInputs) -> str:
    """The report in GitHub's Markdown.

    Raises:
        EvidenceError: A report does not cover the registered recipe.
    """
    decision = inputs.decision
    verdict = "Promote" if decision["verdict"] == "promote" else "Blocked"
    title = f"## {verdict}: {_text(decision['name'])} version {_text(decision['version'])}"
    lines = [
        title,
        "",
        f"Recipe {_text(inputs.recipe)}, pair `{digest(decision['pair_digest'])}`, measured on "
        f"{_text(inputs.benchmark['device']['name'])}. {_target(inputs)}",
        "",
        *(f"- {_text(reason)}" for reason in reasons(decision)),
        "",
        *_table(
            ("check", "severity", "verdict", "measured", "required"),
            map(_check, decision["checks"]),
        ),
        "",
        *_table(("measure", "value (95 % interval)"), _headline(inputs)),
    ]
    losers = inputs.registration["losers"]
    if losers:
        told = ((_text(recipe), _text(why)) for recipe, why in sorted(losers.items()))
        lines += ["", *_table(("recipe that was not chosen", "why"), told)]
    remedies = [
        f"- {_text(words(check['name']))}: {_text(check['remedy'])}"
        for check in decision["checks"]
        if check["remedy"]
    ]
    if remedies:
        lines += ["", "What to do:", "", *remedies]
    return "\n".join(lines) + "\n"


def _target(inputs: ReportInputs) -> str:
    incumbent = inputs.incumbent or {}
    if incumbent.get("changed"):
        version, parts = incumbent["incumbent"]["version"], ", ".join(incumbent["changed"])
        return f"Changed in the target since version {_text(version)}: {_text(words(parts))}."
    if inputs.keeps_target:
        return "The target is the champion's."
    return "No promoted pair of another target to compare with."


def _check(check: Mapping[str, Any]) -> tuple[str, ...]:
    measured = number(check["measured"])
    if check["low"] is not None and check["high"] is not None:
        measured += f" ({number(check['low'])} to {number(check['high'])})"
    return (
        _text(words(check["name"])),
        check["severity"],
        _SIGNS[check["verdict"]],
        _text(measured),
        _text(check["requirement"]),
    )


def _headline(inputs: ReportInputs) -> Iterator[tuple[str, str]]:
    record, speed = inputs.evaluated, inputs.benchmarked
    for key in sorted(record["alpha"], key=float):
        yield f"alpha at temperature {key}", interval(record["alpha"][key])
        yield f"tau at temperature {key}", interval(record["tau"][key], 2)
    if inputs.break_even is not None:
        yield "least alpha that pays, by isolated forwards", number(inputs.break_even)
    yield f"speedup at batch 1 ({draft_lengths(speed)})", interval(speed["speedup"])
    yield "predicted speedup", times(speed["predicted_speedup"])
    for name, estimate in sorted((speed.get("ratios") or {}).items()):
        yield words(name), interval(estimate)
    for point in speed["batch"]:
        yield f"speedup at batch {point['batch_size']}", times(point["speedup"])
        if "adaptive_speedup" in point:
            name = f"speedup at batch {point['batch_size']}, lengths that adapt"
            yield name, times(point["adaptive_speedup"])
    if record["vocabulary_coverage"] is not None:
        yield "vocabulary coverage", percent(record["vocabulary_coverage"])
    if inputs.drift["pooled"] is not None:
        kind = words(inputs.drift["reference"]["kind"])
        yield f"change of alpha against the {kind}", change(inputs.drift["pooled"])


def _table(header: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _text(value: object) -> str:
    """Plain text: neither markup nor a table border, and on one line."""
    flat = " ".join(str(value).split())
    return _MARKUP.sub(r"\\\1", html.escape(flat, quote=False))
