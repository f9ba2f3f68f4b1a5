"""Every number of a report is one of the artifacts', and every number of theirs is in it."""

from __future__ import annotations

import re

import pytest

from draftsmith.report.inputs import ReportInputs
from draftsmith.report.markdown import render_markdown
from draftsmith.report.page import render_page
from tests.report.conftest import build_reports
from tests.report.numbers import UNSHOWN, mark, text_of


@pytest.fixture(scope="module")
def marked():
    return mark(build_reports())


def test_every_number_on_the_page_is_one_of_the_artifacts_and_none_is_lost(marked):
    text = text_of(render_page(ReportInputs(**marked.reports)))
    assert marked.lost_in(text, UNSHOWN) == []


@pytest.mark.parametrize("why", UNSHOWN)
def test_nothing_is_excused_that_does_not_exist(marked, why):
    assert any(re.fullmatch(UNSHOWN[why], path) for path in marked.numbers)


def test_a_number_that_is_of_no_artifact_is_noticed(marked):
    with pytest.raises(AssertionError, match="0\\.4321"):
        marked.found_in("a stranger: 0.4321")


def test_every_number_of_the_twin_is_one_of_the_artifacts(marked):
    text = render_markdown(ReportInputs(**marked.reports)).replace("\\", "")
    checks = r"decision/checks/\d+/(measured|low|high)"
    wanted = {path for path in marked.numbers if re.fullmatch(checks, path)}
    assert wanted <= marked.found_in(text)


def test_the_least_alpha_that_pays_follows_from_the_step_times(reports):
    inputs = ReportInputs(**reports)
    cost = inputs.benchmarked["cost"]
    round_ms = 2 * cost["draft_step_ms"] + cost["verify_ms"]["3"]
    alpha = inputs.break_even
    assert (1 + alpha + alpha**2) * cost["target_step_ms"] == pytest.approx(round_ms)
    for text in (render_page(inputs), render_markdown(inputs)):
        assert f"{alpha:.3f}" in text
