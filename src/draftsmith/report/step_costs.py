"""Chart of the step times in `reports/advice.json`, and what each forward waits for.

The shape of a mark carries that, not its colour: a filled one waits for memory, a hollow one for
arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith.report.figures import BLUE, GREEN, GREY, INK, ORANGE, STYLE, WIDTH_INCHES, legend

_PANEL_INCHES, _FRAME_INCHES = 1.6, 1.0
_LOOKS = (("o", BLUE), ("s", ORANGE), ("D", GREEN), ("^", GREY), ("v", INK))


@mpl.rc_context(STYLE)
def step_times(cells: Sequence[Mapping[str, Any]]) -> Figure:
    """Verification by number of positions, beside the target's step and the draft's.

    A panel for every batch size, a line for every length of prompts.

    Args:
        cells: `measured_costs` of advice.json.
    """
    sizes, contexts = (sorted({cell[key] for cell in cells}) for key in ("batch_size", "context"))
    height = _PANEL_INCHES * len(sizes) + _FRAME_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    panels = figure.subplots(len(sizes), sharex=True, squeeze=False)[:, 0]
    for axes, size in zip(panels, sizes, strict=True):
        for cell in cells:
            if cell["batch_size"] == size:
                _curve(axes, cell, _LOOKS[contexts.index(cell["context"]) % len(_LOOKS)])
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"ms, batch {size}")
        axes.grid(axis="y", color=GREY, alpha=0.3)
    panels[0].plot([], [], "x", color=INK, label="target step")
    panels[0].plot([], [], ":", color=INK, label="draft step")
    legend(panels[0])
    panels[-1].set_xlabel("positions verified")
    return figure


def _curve(axes: Axes, cell: Mapping[str, Any], look: tuple[str, str]) -> None:
    marker, colour = look
    widths = sorted(cell["verify_ms"], key=int)
    places, times = [int(width) for width in widths], [cell["verify_ms"][width] for width in widths]
    waits = [place for place, width in enumerate(widths) if cell["bound"][width] == "memory"]
    label = f"{cell['context']:,} tokens"
    axes.plot(places, times, color=colour, marker=marker, markevery=waits, label=label)
    rest = [place for place in range(len(widths)) if place not in waits]
    axes.plot(
        [places[place] for place in rest],
        [times[place] for place in rest],
        linestyle="none",
        color=colour,
        marker=marker,
        markerfacecolor="none",
    )
    axes.plot(1, cell["target_step_ms"], "x", color=INK, zorder=3)  # above the mark of 1
    axes.axhline(cell["draft_step_ms"], color=colour, linestyle=":")
