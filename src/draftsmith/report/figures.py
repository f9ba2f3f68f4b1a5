"""Charts of the reports, as matplotlib figures, inline SVG or files.

Colours are those of Okabe and Ito (2008), which the usual forms of colour blindness keep apart;
series also differ by shape. Inline charts draw their ink in the page's text colour, so they
follow light and dark. No global matplotlib state: figures are built without pyplot.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith.artifacts import write_failure

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#888888"
INK = "#1b1f24"
WIDTH_INCHES = 5.2
STYLE: dict[Any, Any] = {  # matplotlib types the keys as literals
    "svg.fonttype": "none",
    "svg.hashsalt": "draftsmith",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.parse_math": False,  # a domain may be called $x$
}
_DODGE = 0.08  # between the lines of two temperatures, in positions
_BATCH_COLOURS = (GREEN, ORANGE)
DASHED: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1}


@mpl.rc_context(STYLE)
def alpha_by_domain(
    record: Mapping[str, Any],
    temperature: str,
    *,
    champion: Mapping[str, Any] | None = None,
    break_even: float | None = None,
) -> Figure:
    """Bars of alpha by domain with their intervals, the champion's as diamonds beside them.

    Args:
        record: RecipeEvaluation.
        temperature: Key of the temperature shown.
        champion: RecipeEvaluation of the champion, where it was measured at that temperature.
        break_even: Least alpha that pays; a dashed line.
    """
    own = record["alpha"][temperature]["by_domain"]
    names = sorted(own, reverse=True)
    figure, axes = canvas(height=0.36 * len(names) + 1.1)
    axes.barh(
        range(len(names)),
        [own[name]["mean"] for name in names],
        height=0.55,
        color=BLUE,
        alpha=0.75,
        label="proposed",
        xerr=error_bars([own[name] for name in names]),
        ecolor=INK,
        capsize=2.5,
    )
    theirs = _domains_of(champion, temperature)
    shared = [(position, name) for position, name in enumerate(names) if name in theirs]
    if shared:
        axes.errorbar(
            [theirs[name]["mean"] for _, name in shared],
            [position + 0.38 for position, _ in shared],
            xerr=error_bars([theirs[name] for _, name in shared]),
            fmt="D",
            color=ORANGE,
            markersize=4,
            label="champion",
        )
    if break_even is not None:
        axes.axvline(break_even, label="pays above", **DASHED)
    if shared or break_even is not None:
        legend(axes)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"alpha at temperature {temperature}")
    axes.grid(axis="x", color=GREY, alpha=0.3)
    return figure


@mpl.rc_context(STYLE)
def survival_by_position(record: Mapping[str, Any]) -> Figure:
    """Share of rounds in which each draft position was accepted, a line for every temperature.

    With 95 % intervals where the record has them; lines stand side by side, so that they differ.
    """
    figure, axes = canvas(height=2.6)
    styles = zip("osD^v", (BLUE, ORANGE, GREEN, GREY, INK), strict=True)
    longest = 1
    curves = sorted(record["survival"].items(), key=lambda item: float(item[0]))
    for index, ((marker, colour), (key, survival)) in enumerate(zip(styles, curves, strict=False)):
        shift = _DODGE * (index - (len(curves) - 1) / 2)
        places = [place + shift for place in range(1, len(survival) + 1)]
        longest = max(longest, len(survival))
        bounds = [entry["survival"] for entry in record.get("positions", {}).get(key, ())]
        axes.errorbar(
            places,
            survival,
            yerr=error_bars(bounds) if bounds else None,
            marker=marker,
            color=colour,
            capsize=2.5,
            label=f"temperature {key}",
        )
    axes.set_xticks(range(1, longest + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft position")
    axes.set_ylabel("survival")
    axes.grid(axis="y", color=GREY, alpha=0.3)
    if axes.lines:
        legend(axes)
    return figure


@mpl.rc_context(STYLE)
def speedup_by_draft_length(record: Mapping[str, Any]) -> Figure:
    """Calibration: measured speedup against draft length, with the break-even line."""
    figure, axes = canvas(height=2.6)
    points = sorted(record["calibration"], key=lambda point: int(point["draft_length"]))
    lengths = [point["draft_length"] for point in points]
    axes.plot(lengths, [point["speedup"] for point in points], marker="o", color=BLUE)
    length = record.get("chain_length", record["draft_length"])
    chosen = [point for point in points if point["draft_length"] == length]
    for point in chosen:
        axes.plot(
            point["draft_length"],
            point["speedup"],
            "D",
            color=ORANGE,
            markersize=8,
            label=f"chosen: {length}" if not record.get("tree") else f"best chain: {length}",
        )
    mark_break_even(axes)
    axes.set_xticks(lengths)
    axes.set_xlabel("draft length")
    axes.set_ylabel("speedup")
    axes.grid(axis="y", color=GREY, alpha=0.3)
    legend(axes)
    return figure


@mpl.rc_context(STYLE)
def speedup_by_batch_size(record: Mapping[str, Any]) -> Figure:
    """Bars of the speedup by batch size; those below break-even differ in colour and hatch."""
    figure, axes = canvas(height=2.6)
    points = sorted(record["batch"], key=lambda point: int(point["batch_size"]))
    for position, point in enumerate(points):
        is_slower = point["speedup"] < 1
        axes.bar(
            position,
            point["speedup"],
            width=0.55,
            color=_BATCH_COLOURS[is_slower],
            alpha=0.75,
            hatch="//" if is_slower else None,
        )
        axes.annotate(
            f"{point['speedup']:.2f}×",
            (position, max(point["speedup"], 1.01 if is_slower else 0)),
            ha="center",
            va="bottom",
        )
    axes.set_xticks(
        range(len(points)),
        [f"{point['batch_size']}\ngamma {point['draft_length']}" for point in points],
    )
    axes.margins(y=0.18)
    mark_break_even(axes)
    axes.set_xlabel("batch size")
    axes.set_ylabel("speedup")
    return figure


def inline_svg(figure: Figure, name: str, *, description: str) -> str:
    """SVG for embedding: ink in the page's text colour, ids that start with `name`, a label.

    Args:
        figure: What to draw.
        name: Unique within the page; letters, digits and dashes.
        description: What the chart shows; plain text without markup characters.
    """
    text = _svg(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = text.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)
    return text.replace(INK, "currentColor")


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, by the suffix of `path`, on a white ground.

    Raises:
        ArtifactError: The disk refused.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(STYLE):
            figure.savefig(path, facecolor="white", dpi=150, metadata=_metadata(path.suffix))
    except OSError as error:
        raise write_failure(path, error) from error


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(stream, format="svg", transparent=True, metadata=_metadata(".svg"))
    return stream.getvalue()


def _metadata(suffix: str) -> dict[str, Any]:
    """No dates and versions in the files: the same numbers give the same bytes."""
    return {"Date": None, "Creator": None} if suffix == ".svg" else {"Software": None}


def canvas(height: float) -> tuple[Figure, Axes]:
    """A figure as wide as a page's column, with its axes; `height` is in inches."""
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    return figure, figure.add_subplot()


def legend(axes: Axes) -> None:
    """The legend, above the plot on the left."""
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0, ncols=3)


def mark_break_even(axes: Axes) -> None:
    """A dashed line at a speedup of 1."""
    axes.axhline(1.0, label="break-even", **DASHED)


def _domains_of(record: Mapping[str, Any] | None, temperature: str) -> Mapping[str, Any]:
    domains: Mapping[str, Any] = (
        {} if record is None else record["alpha"].get(temperature, {}).get("by_domain", {})
    )
    return domains


def error_bars(estimates: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Distances [2, n] from the means down to `low` and up to `high`."""
    return [
        [max(0.0, estimate["mean"] - estimate["low"]) for estimate in estimates],
        [max(0.0, estimate["high"] - estimate["mean"]) for estimate in estimates],
    ]
