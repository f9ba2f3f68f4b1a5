"""The figures of the live verdict that docs/statistics.md shows are those that were simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.live_calibration import (
    AFTER,
    COUNTED,
    COUNTED_DROPS,
    DROPS,
    LOOK,
    OUTPUT,
    PARTS,
    PER_DOMAIN,
    SCHEMA,
    WEEK,
)
from draftsmith.artifacts import read_json

REPORT = read_json(OUTPUT)
SPANS = (200, 400, 800, AFTER)
FEWEST_STREAMS = 20


def document(name="statistics.md"):
    return (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")


def num_streams(part, case):
    return REPORT[part][case]["num_streams"]


def within(part, case, span):
    alarms = REPORT[part][case]["alarms"]
    return f"{sum(alarm <= span for alarm in alarms) / num_streams(part, case):.2f}"


def ended(part, case, verdict):
    return f"{REPORT[part][case]['last_verdicts'].get(verdict, 0) / num_streams(part, case):.2f}"


def row(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def quiet_rows():
    day = WEEK // 7
    for every, week in ((LOOK, True), (10 * LOOK, False)):
        case = f"a look every {every} requests"
        spans = [day * every, *([WEEK * every] if week else [])]
        shares = [within("quiet", case, span) for span in spans]
        yield row(case, num_streams("quiet", case), *shares, *([] if week else ["-"]))


def drop_rows():
    for drop in DROPS:
        for prompts in (6 * per_domain for per_domain in PER_DOMAIN):
            case = f"{drop}, {prompts} prompts"
            shares = [within("drops", case, span) for span in SPANS]
            yield row(drop, prompts, num_streams("drops", case), *shares)


def shift_rows():
    for case in PARTS["shifts"]:
        verdicts = ("draft decay", "engine change", "traffic shift", "ok")
        shares = [ended("shifts", case, verdict) for verdict in verdicts]
        yield row(case, num_streams("shifts", case), *shares)


def counter_rows():
    for case in ("unchanged, all domains", "unchanged, the hardest domain"):
        spans = (WEEK // 7 * LOOK, WEEK * LOOK)
        shares = [within("counters", case, span) for span in spans]
        yield row(case, num_streams("counters", case), *shares)
    for drop in COUNTED_DROPS:
        cases = [f"{drop}, {size} requests" for size in COUNTED]
        yield row(drop, *(both("counters", case) for case in cases))


def gauge_rows():
    for drop in (0.0, *COUNTED_DROPS):
        yield row(drop, *(both("gauges", f"{drop}, draft length {n}") for n in (1, 4)))


def both(part, case):
    return f"{ended(part, case, 'draft decay')} / {ended(part, case, 'traffic shift')}"


def test_the_committed_figures_are_of_the_script_as_it_is():
    assert REPORT["schema"] == SCHEMA
    for part, cases in PARTS.items():
        assert REPORT[part].keys() == cases.keys(), part
        for case in cases:
            assert num_streams(part, case) >= FEWEST_STREAMS, (part, case)


@pytest.mark.parametrize(
    "rows", [quiet_rows, drop_rows, shift_rows, counter_rows, gauge_rows], ids=lambda f: f.__name__
)
def test_the_document_shows_these_figures(rows):
    text = document()
    for line in rows():
        assert line in text


def test_the_document_names_the_machine_and_the_measurement():
    processor = REPORT["provenance"]["processor"]
    section = document().partition("## Telemetry, looked at again and again")[2]
    assert processor in section
    assert REPORT["measured"] in section


def test_the_page_on_monitoring_says_the_same():
    text = document("monitoring.md").replace("\n", " ")
    shares = [
        within("drops", f"{drop}, {prompts} prompts", span)
        for prompts in (66, 180)
        for drop, span in ((0.1, 400), (0.05, AFTER))
    ]
    assert (
        "a drop of 0.1 was found in {} of the streams within 400 requests, one of 0.05 in {} "
        "within 1,600; with 180 decoded prompts in {} and {}.".format(*shares) in text
    )
    weeks = num_streams("quiet", "a look every 40 requests")
    assert f"No unchanged draft raised an alarm in {weeks} simulated weeks" in text
    assert REPORT["quiet"]["a look every 40 requests"]["alarms"] == []
    tenth, fifth, third = (f"{drop}, 400 requests" for drop in (0.1, 0.2, 0.3))
    decays = [ended("counters", case, "draft decay") for case in (tenth, fifth, third)]
    shift = ended("counters", tenth, "traffic shift")
    assert (
        f"a drop of 0.1 was `draft decay` in {decays[0]} and `traffic shift` in {shift}, one of "
        f"0.2 `draft decay` in {decays[1]}, one of 0.3 in {decays[2]}" in text
    )
