"""Charts of `reports/advice.json`: where speculation pays, and how far that was right.

Colours carry no fact alone: every cell says its figures, and cells where nothing pays are hatched.
They are translucent, so that the ink of a light and of a dark page reads on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from draftsmith.report.figures import (
    BLUE,
    DASHED,
    GREY,
    INK,
    ORANGE,
    STYLE,
    WIDTH_INCHES,
    canvas,
    error_bars,
    legend,
)
from draftsmith.report.tables import advised

_ROW_INCHES, _FRAME_INCHES = 0.3, 0.75
_DEEPEST = 0.55  # opacity of a doubled speed and above
_FAINTEST = 0.08


@mpl.rc_context(STYLE)
def speedup_map(workloads: Sequence[Mapping[str, Any]], temperature: float) -> Figure:
    """Expected speedup by batch size and context, a panel for every length of answers.

    Args:
        workloads: Of advice.json.
        temperature: The one shown.
    """
    shown = [entry for entry in workloads if entry["temperature"] == temperature]
    lengths, contexts, sizes = (
        sorted({int(entry[key]) for entry in shown})
        for key in ("new_tokens", "context", "batch_size")
    )
    height = len(lengths) * (_ROW_INCHES * len(sizes) + _FRAME_INCHES)
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    panels = figure.subplots(len(lengths), squeeze=False)[:, 0]
    for axes, length in zip(panels, lengths, strict=True):
        for entry in shown:
            if entry["new_tokens"] == length:
                place = contexts.index(entry["context"]), sizes.index(entry["batch_size"])
                _cell(axes, place, entry)
        axes.set_xlim(-0.5, len(contexts) - 0.5)
        axes.set_ylim(-0.5, len(sizes) - 0.5)
        axes.set_xticks(range(len(contexts)), contexts)
        axes.set_yticks(range(len(sizes)), sizes)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_ylabel("batch size")
        axes.set_title(f"answers of {length} tokens", fontsize=10, loc="left")
    panels[-1].set_xlabel("tokens of the prompt")
    return figure


def _cell(axes: Axes, place: tuple[int, int], entry: Mapping[str, Any]) -> None:
    column, row = place
    pays = bool(entry["draft_length"] or entry["copy_length"])
    depth = min(_DEEPEST, max(_FAINTEST, _DEEPEST * math.log2(entry["speedup"])))
    axes.add_patch(
        Rectangle(
            (column - 0.48, row - 0.45),
            0.96,
            0.9,
            facecolor=(BLUE, depth) if pays else (ORANGE, 0.25),
            edgecolor=INK,
            linewidth=0,
            hatch=None if pays else "//",
        )
    )
    axes.annotate(advised(entry), (column, row), ha="center", va="center", fontsize=9)


@mpl.rc_context(STYLE)
def predicted_and_measured(
    trials: Sequence[Mapping[str, Any]], benchmarked: Mapping[str, Any]
) -> Figure:
    """Workloads that were decoded: measured against predicted speedup.

    Args:
        trials: Of advice.json.
        benchmarked: RecipeBenchmark, whose speedup stands beside them.
    """
    figure, axes = canvas(height=3.2)
    seen = [
        {"mean": trial["measured"], "low": trial["interval"][0], "high": trial["interval"][1]}
        for trial in trials
    ]
    _points(axes, [trial["predicted"] for trial in trials], seen, ("o", BLUE, "workload"))
    speedup = benchmarked["speedup"]
    _points(axes, [benchmarked["predicted_speedup"]], [speedup], ("D", ORANGE, "benchmark"))
    axes.axline((1, 1), slope=1, label="as predicted", **DASHED)
    axes.set_xlabel("predicted speedup")
    axes.set_ylabel("measured")
    axes.grid(color=GREY, alpha=0.3)
    legend(axes)
    return figure


def _points(
    axes: Axes,
    predicted: Sequence[float],
    measured: Sequence[Mapping[str, Any]],
    style: tuple[str, str, str],
) -> None:
    marker, colour, label = style
    axes.errorbar(
        predicted,
        [estimate["mean"] for estimate in measured],
        yerr=error_bars(measured),
        fmt=marker,
        color=colour,
        markersize=5,
        elinewidth=1,
        label=label,
    )
