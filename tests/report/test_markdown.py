from __future__ import annotations

from draftsmith.report.inputs import ReportInputs
from draftsmith.report.markdown import render_markdown
from tests.report.signed import SIGNED, sign_off


def test_the_twin_shows_verdict_reasons_checks_and_remedies(inputs):
    text = render_markdown(inputs)
    assert text.startswith("## Blocked: demo-pair version 12\n")
    for reason in inputs.decision["reasons"]:
        assert reason in text
    for check in inputs.decision["checks"]:
        assert f"| {check['name'].replace('_', ' ')} | {check['severity']} |" in text
        if check["verdict"] == "fail":
            assert check["remedy"] in text


def test_what_somebody_signed_off_is_marked_and_told(reports):
    text = render_markdown(ReportInputs(**sign_off(reports)))
    assert "| speedup | block | **overridden** |" in text
    assert f"- {SIGNED}" in text
    assert "- speedup: Try a smaller draft." in text


def test_the_headline_numbers_are_those_of_the_reports(inputs):
    text = render_markdown(inputs)
    assert "| alpha at temperature 0.0 | 0.412 (0.392 to 0.432) |" in text
    assert "1.274 (1.224 to 1.324)" in text
    assert "| change of alpha against the champion | -0.032 (-0.043 to -0.021) |" in text


def test_recipes_that_were_not_chosen_are_named_with_why(reports):
    text = render_markdown(ReportInputs(**reports))
    assert "| large | its measured speedup was lower |" in text
    reports["registration"]["losers"] = {"a_b": "in quarantine | as 3", "a": "slower"}
    lines = render_markdown(ReportInputs(**reports)).splitlines()
    place = lines.index(r"| a\_b | in quarantine \| as 3 |")
    assert lines[place - 1] == "| a | slower |"
    reports["registration"]["losers"] = {}
    assert "not chosen" not in render_markdown(ReportInputs(**reports))


def test_every_table_row_has_as_many_cells_as_its_header(reports):
    reports["decision"]["checks"][0]["requirement"] = "a | b\nc"
    lines = render_markdown(ReportInputs(**reports)).splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        if line.startswith("|") and before.startswith("|"):
            count = line.replace("\\|", "").count("|")
            assert count == before.replace("\\|", "").count("|")


def test_markup_from_the_reports_stays_text(reports):
    reports["decision"]["reasons"] = ["<img src=x> **bold** [link](http://x)"]
    text = render_markdown(ReportInputs(**reports))
    assert "<img" not in text
    assert "**bold**" not in text
    assert "[link](" not in text


def test_without_a_reference_there_is_no_change_to_report(reports):
    reports["drift"]["pooled"] = None
    assert "change of alpha" not in render_markdown(ReportInputs(**reports))
