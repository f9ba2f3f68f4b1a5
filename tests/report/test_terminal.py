from __future__ import annotations

import pytest

from draftsmith.report.terminal import decision_line
from tests.report.signed import SIGNED, sign_off


def test_the_line_of_a_decision_tells_verdict_reasons_and_what_was_signed_off(reports):
    assert decision_line(sign_off(reports)["decision"]) == (
        f"block version 12: Another reason.; {SIGNED}"
    )


@pytest.mark.parametrize("field", ["checks", "reasons"])
def test_a_decision_without_details_still_has_a_line(reports, field):
    del reports["decision"][field]
    assert decision_line(reports["decision"]).startswith("block version 12")


def test_without_a_decision_the_line_says_so():
    assert decision_line(None) == "none yet"
