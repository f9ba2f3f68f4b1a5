"""Every number of a report is one of the artifacts', and every number of theirs is in it.

Each number of the artifacts is replaced by one that occurs nowhere else, so what stands on the page
says where it came from.
"""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import pytest

from draftsmith.report.inputs import ReportInputs
from draftsmith.report.markdown import render_markdown
from draftsmith.report.page import render_page
from tests.report.conftest import build_reports

SHOWN = re.compile(r"(?<![\w.,])[+-]?(\d+(?:,\d{3})*(?:\.\d+)?)(?![\w])")
# Not of this run: the level of intervals, the batch of the headline speedup, the arm gamma 0.
CONSTANTS = {"95", "1", "0"}
# What the page draws, or tells by words alone. Anything else that it leaves out is a fault.
UNSHOWN = {
    "the gate's sentences tell them": r"decision/checks/\d+/(measured|low|high)",
    "drawn as a point": r"benchmark/recipes/small/calibration/\d+/(draft_length|speedup)",
    "drawn as a point, too": r"advice/trials/\d+/.*",
    "of the champion its alpha": r"champion_record/((?!alpha/).*|.*/num_prompts)",
    "of the device that was advised on its name": r"advice/device/.*",
    "tokens/s by draft length, whose ratio is drawn": r".*/calibration/\d+/tokens_per_s",
    "prompts of a ratio are those of the speedup": r".*/ratios/\w+/num_prompts",
    "tau has fewer prompts than alpha": r".*/tau/[\d.]+/(by_domain/\w+/)?num_prompts",
    "prompts of a position": r".*/positions/[\d.]+/\d+/survival/(mean|num_prompts)",
    "accepted over drafted, which survival tells better": r".*/accepted_fraction/.*",
    "a step of a curve": r"manifest/training/history/.*",
    "of a comparison at each temperature its change": (
        r"incumbent/by_temperature/.*/?(proposed|reference|effect_size|num_prompts|p_adjusted"
        r"|shrunken_change)"
    ),
    "the estimate that decides nothing": r".*/shrunken_change",
    "no draft where another scheme is advised": r"advice/workloads/3/(draft_length|speedup)",
    "of another scheme its mean": r"advice/workloads/\d+/instead/ratio/(low|high|num_prompts)",
    "a version of the format": r"(decision|advice)/schema",
}


class Texts(HTMLParser):
    """Words outside style sheets and charts."""

    def __init__(self):
        super().__init__()
        self.words, self.hidden = [], 0

    def handle_starttag(self, tag, attributes):
        self.hidden += tag in ("style", "svg")

    def handle_endtag(self, tag):
        self.hidden -= tag in ("style", "svg")

    def handle_data(self, data):
        if not self.hidden:
            self.words.append(data)


def marked(tree, counter, path=""):
    """The tree with unique numbers, and path -> number; whole numbers stay whole."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        parts = {key: marked(value, counter, f"{path}/{key}") for key, value in items}
        found = dict(item for _, numbers in parts.values() for item in numbers.items())
        kept = {key: part for key, (part, _) in parts.items()}
        return (kept if isinstance(tree, dict) else list(kept.values())), found
    if isinstance(tree, bool) or not isinstance(tree, int | float):
        return tree, {}
    number = next(counter) if isinstance(tree, int) else next(counter) + 0.4321
    return number, {path.removeprefix("/"): number}


def words_in(tree):
    """Texts of the artifacts, keys included: temperatures and positions are keys."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield str(key)
            yield from words_in(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from words_in(value)
    elif isinstance(tree, str):
        yield tree


def means(shown, number):
    """Whether a text of a page is a number of the artifacts, as it is or in percent."""
    value, digits = float(shown.replace(",", "")), len(shown.partition(".")[2])
    return any(abs(scale * number - value) <= 0.5001 * 10**-digits for scale in (1, 100))


@pytest.fixture(scope="module")
def artifacts():
    """Reports with unique numbers, and path -> number."""
    return marked(build_reports(), itertools.count(1000))


@pytest.fixture(scope="module")
def known(artifacts):
    """What may stand on a page beside the artifacts' numbers: their texts, and what follows."""
    reports, numbers = artifacts
    speed = reports["benchmark"]["recipes"]["small"]
    positions = map(str, range(1, 4))
    gap = speed["speedup"]["mean"] - speed["predicted_speedup"]
    said = {n for text in words_in(reports) for n in SHOWN.findall(text.replace("_", " "))}
    return CONSTANTS | said | {*positions, f"{abs(gap):.2f}"}


def shown_in(text, numbers, known):
    """Paths of the numbers that a text shows; strangers are a failure."""
    found, strangers = set(), []
    for shown in SHOWN.findall(text):
        paths = {path for path, number in numbers.items() if means(shown, number)}
        found |= paths
        if not paths and shown not in known:
            strangers.append(shown)
    assert strangers == []
    return found


def test_every_number_on_the_page_is_one_of_the_artifacts_and_none_is_lost(artifacts, known):
    reports, numbers = artifacts
    texts = Texts()
    texts.feed(render_page(ReportInputs(**reports)))
    lost = numbers.keys() - shown_in(" ".join(texts.words), numbers, known)
    meant = {path for path in numbers if re.fullmatch("|".join(UNSHOWN.values()), path)}
    assert sorted(lost - meant) == []


@pytest.mark.parametrize("why", UNSHOWN)
def test_nothing_is_excused_that_does_not_exist(artifacts, why):
    _, numbers = artifacts
    assert any(re.fullmatch(UNSHOWN[why], path) for path in numbers)


def test_every_number_of_the_twin_is_one_of_the_artifacts(artifacts, known):
    reports, numbers = artifacts
    text = render_markdown(ReportInputs(**reports)).replace("\\", "")
    found = shown_in(text, numbers, known)
    wanted = {p for p in numbers if re.fullmatch(r"decision/checks/\d+/(measured|low|high)", p)}
    assert wanted <= found


def test_the_least_alpha_that_pays_follows_from_the_step_times(reports):
    inputs = ReportInputs(**reports)
    cost = inputs.benchmarked["cost"]
    round_ms = 2 * cost["draft_step_ms"] + cost["verify_ms"]["3"]
    alpha = inputs.break_even
    assert (1 + alpha + alpha**2) * cost["target_step_ms"] == pytest.approx(round_ms)
    for text in (render_page(inputs), render_markdown(inputs)):
        assert f"{alpha:.3f}" in text
