from __future__ import annotations

import html
import re

import matplotlib as mpl
import pytest

from draftsmith.errors import ArtifactError
from draftsmith.report import boundary, figures, step_costs, tables


@pytest.fixture
def charts(inputs):
    return {
        "alpha": figures.alpha_by_domain(
            inputs.evaluated, "0.0", champion=inputs.champion_record, break_even=0.3817
        ),
        "survival": figures.survival_by_position(inputs.evaluated),
        "calibration": figures.speedup_by_draft_length(inputs.benchmarked),
        "batch": figures.speedup_by_batch_size(inputs.benchmarked),
        "map": boundary.speedup_map(inputs.advice["workloads"], 0.0),
        "trials": boundary.predicted_and_measured(inputs.advice["trials"], inputs.benchmarked),
        "steps": step_costs.step_times(inputs.advice["measured_costs"]),
    }


def test_bars_and_intervals_are_those_of_the_record(inputs, charts):
    (axes,) = charts["alpha"].axes
    domains = inputs.evaluated["alpha"]["0.0"]["by_domain"]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    widths = [bar.get_width() for bar in axes.patches]
    assert dict(zip(labels, widths, strict=True)) == pytest.approx(
        {name: estimate["mean"] for name, estimate in domains.items()}
    )


def test_lines_and_points_are_those_of_the_record(inputs, charts):
    (survival,), (calibration,), (trials,) = (
        charts[name].axes for name in ("survival", "calibration", "trials")
    )
    for line, values in zip(
        survival.get_legend_handles_labels()[0],
        inputs.evaluated["survival"].values(),
        strict=True,
    ):
        assert list(line.lines[0].get_ydata()) == values
    points = {(e["draft_length"], e["speedup"]) for e in inputs.benchmarked["calibration"]}
    assert set(zip(*calibration.lines[0].get_data(), strict=True)) == points
    (trial,), speed = inputs.advice["trials"], inputs.benchmarked
    drawn = [line.get_data() for line in trials.lines if line.get_marker() in ("o", "D")]
    assert [(float(x[0]), float(y[0])) for x, y in drawn] == [
        (trial["predicted"], trial["measured"]),
        (speed["predicted_speedup"], speed["speedup"]["mean"]),
    ]


def test_survival_has_intervals_where_the_record_has_them(inputs):
    for record in (inputs.evaluated, {"survival": inputs.evaluated["survival"]}):
        (axes,) = figures.survival_by_position(record).axes
        assert len(axes.collections) == (2 if "positions" in record else 0)


def test_positions_that_no_round_came_to_have_no_interval(inputs):
    short = {key: entries[:1] for key, entries in inputs.evaluated["positions"].items()}
    record = inputs.evaluated | {"positions": short}
    (axes,) = figures.survival_by_position(record).axes
    for lines, values in zip(axes.collections, record["survival"].values(), strict=True):
        ends = [(low[1], high[1]) for low, high in lines.get_segments()]
        assert ends[0][0] < values[0] < ends[0][1]
        assert ends[1:] == [(value, value) for value in values[1:]]
    told = tables.survival(record, "0.0")
    assert len(told) == 3
    assert "to" in told[0]
    assert "to" not in told[1] + told[2]


def test_a_dashed_line_shows_which_alpha_pays(inputs, charts):
    (axes,) = charts["alpha"].axes
    lines = [line for line in axes.lines if line.get_label() == "pays above"]
    assert [list(line.get_xdata()) for line in lines] == [[0.3817, 0.3817]]
    (plain,) = figures.alpha_by_domain(inputs.evaluated, "0.0").axes
    assert not any(line.get_label() == "pays above" for line in plain.lines)


def test_every_workload_has_a_cell_with_its_figures_and_where_nothing_pays_it_is_hatched(
    inputs, charts
):
    (axes,) = charts["map"].axes
    said = {tuple(text.xy): text.get_text() for text in axes.texts}
    assert said == {
        (0, 0): "1.41 at 2",
        (0, 1): "1.08 at 2?",
        (1, 0): "do not",
        (1, 1): "int8 weights 1.31",
    }
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64", "1024"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["1", "4"]
    hatched = [patch.get_hatch() for patch in axes.patches]
    assert hatched == [None, None, "//", "//"]


def test_step_times_are_drawn_and_marks_say_what_a_forward_waits_for(inputs, charts):
    panels = charts["steps"].axes
    assert [axes.get_ylabel() for axes in panels] == ["ms, batch 1", "ms, batch 4"]
    drawn = {}
    for axes in panels:
        for line in axes.lines:
            empty = line.get_markerfacecolor() == "none"
            places = line.get_markevery()
            points = list(zip(*line.get_data(), strict=True))
            kept = [points[place] for place in places] if places is not None else points
            drawn.setdefault(empty, set()).update(kept)
    for cell in inputs.advice["measured_costs"]:
        for width, milliseconds in cell["verify_ms"].items():
            is_hollow = cell["bound"][width] == "arithmetic"
            assert (int(width), milliseconds) in drawn[is_hollow]
            assert (int(width), milliseconds) not in drawn[not is_hollow]
        assert (1, cell["target_step_ms"]) in drawn[False]
    lines = [line for axes in panels for line in axes.lines]
    dotted = [line.get_ydata() for line in lines if line.get_linestyle() == ":"]
    assert {heights[0] for heights in dotted if len(heights)} == {
        cell["draft_step_ms"] for cell in inputs.advice["measured_costs"]
    }


def test_the_champion_stands_beside_its_domain_only_where_it_was_measured(inputs):
    champion = {"alpha": {"0.0": {"by_domain": {"maths": {"mean": 0.3, "low": 0.2, "high": 0.4}}}}}
    figure = figures.alpha_by_domain(inputs.evaluated, "0.0", champion=champion)
    assert "champion" in figures.inline_svg(figure, "a", description="x")
    elsewhere = figures.alpha_by_domain(inputs.evaluated, "0.7", champion=champion)
    assert "champion" not in figures.inline_svg(elsewhere, "a", description="x")


def test_speedups_show_where_they_break_even(charts):
    for name in ("calibration", "batch"):
        (axes,) = charts[name].axes
        lines = [line for line in axes.lines if line.get_label() == "break-even"]
        assert [list(line.get_ydata()) for line in lines] == [[1.0, 1.0]]


def test_slower_batches_differ_by_more_than_colour(charts):
    hatches = [bar.get_hatch() for bar in charts["batch"].axes[0].patches]
    assert hatches == [None, None, "//"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_files_are_the_same_bytes_for_the_same_numbers(inputs, tmp_path, suffix):
    written = []
    for name in ("first", "second"):
        path = tmp_path / "plots" / f"{name}{suffix}"
        figures.write_figure(figures.survival_by_position(inputs.evaluated), path)
        written.append(path.read_bytes())
    assert written[0] == written[1]
    assert len(written[0]) > 1000


def test_inline_ink_follows_the_page_and_ids_carry_the_name(charts):
    text = figures.inline_svg(charts["survival"], "chart-1", description="Survival")
    assert text.startswith('<svg role="img" aria-label="Survival"')
    assert "currentColor" in text
    assert "#1b1f24" not in text
    assert 'id="chart-1-' in text


def test_every_word_of_an_inline_chart_has_the_ink_of_the_page(charts):
    for name, chart in charts.items():
        texts = re.findall(r"<text[^>]*>", figures.inline_svg(chart, name, description="x"))
        assert texts
        assert all("currentColor" in text for text in texts)


def test_a_domain_name_is_never_read_as_a_formula_or_markup(inputs):
    names = [r"$\nothing$", "<b>&", "a_b"]
    record = {
        "alpha": {
            "0.0": {"by_domain": {name: {"mean": 0.3, "low": 0.2, "high": 0.4} for name in names}}
        }
    }
    text = figures.inline_svg(figures.alpha_by_domain(record, "0.0"), "a", description="x")
    for name in names:
        assert f">{html.escape(name)}</text>" in text


def test_drawing_leaves_global_settings_alone(inputs):
    before = dict(mpl.rcParams)
    figures.inline_svg(figures.survival_by_position(inputs.evaluated), "a", description="x")
    assert dict(mpl.rcParams) == before


def test_a_folder_that_cannot_be_made_is_one_clear_error(charts, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="writing"):
        figures.write_figure(charts["batch"], tmp_path / "file" / "batch.png")
