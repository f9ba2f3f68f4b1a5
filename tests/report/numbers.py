"""Where the numbers of a page come from: of reports that a test makes up, and of those of a run.

Each number of the artifacts is replaced by one that occurs nowhere else, so what stands on the page
says where it came from.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

from draftsmith.report.tables import scaled

SHOWN = re.compile(r"(?<![\w.,])[+-]?(\d+(?:,\d{3})*(?:\.\d+)?)(?![\w])")
# Not of a run: the level of intervals, the batch of the headline speedup, the arm gamma 0.
CONSTANTS = {"95", "1", "0"}
# As it is, in percent, and with a unit a thousand times as large.
SCALES = (1, 100, 1e-3)
# What the page draws, or tells by words alone. Anything else that it leaves out is a fault.
UNSHOWN = {
    "the gate's sentences tell them": r"decision/checks/\d+/(measured|low|high)",
    "drawn as a point": r"benchmark/recipes/\w+/calibration/\d+/(draft_length|speedup)",
    "drawn as a curve": r"advice/measured_costs/\d+/verify_ms/\d+",
    "of the champion its alpha": r"champion_record/((?!alpha/).*|.*/num_prompts)",
    "of the device that was advised on its name": r"advice/device/.*",
    "tokens/s by draft length, whose ratio is drawn": r".*/calibration/\d+/tokens_per_s",
    "prompts of a ratio are those of the speedup": r".*/ratios/\w+/num_prompts",
    "groups of prompts of an alternative": r"advice/alternatives/\d+/\w+/num_prompts",
    "tau has fewer prompts than alpha": r".*/tau/[\d.]+/(by_domain/\w+/)?num_prompts",
    "prompts of a position": r".*/positions/[\d.]+/\d+/survival/(mean|num_prompts)",
    "accepted over drafted, which survival tells better": r".*/accepted_fraction/.*",
    "a step of a curve": r"manifest/training/history/.*",
    "of a comparison at each temperature its change": (
        r"incumbent/by_temperature/.*/?(proposed|reference|effect_size|num_prompts|p_adjusted"
        r"|shrunken_change)"
    ),
    "the estimate that decides nothing": r".*/shrunken_change",
    "of a tree how many nodes it has is told": r"advice/(workloads|trials)/\d+/tree/\d+",
    "batches that there was no time for are told in words": r"advice/alternatives/\d+/late/\d+",
    "of another scheme its mean": r"advice/workloads/\d+/instead/ratio/(low|high|num_prompts)",
    "a version of the format": r"(decision|advice)/schema",
}
# Of the reports of a run, which hold more than a test makes up.
UNSHOWN_OF_A_RUN = {
    "a version of the format": r"\w+/schema",
    "of a tree how many nodes it has": r"benchmark/recipes/\w+/(batch/\d+/)?tree/\d+",
    "the depth of a tree": r"benchmark/recipes/\w+/draft_length",
    "told where the least alpha that pays is": r"benchmark/recipes/\w+/chain_length",
    "of a batch its draft length": r".*/batch/\d+/(lookup_length|adaptive_tokens_per_s)",
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


def text_of(page: str) -> str:
    """What a reader of a page reads."""
    texts = Texts()
    texts.feed(page)
    return " ".join(texts.words)


@dataclass(frozen=True)
class Marked:
    """Reports with unique numbers.

    Attributes:
        reports: By their names in `ReportInputs`.
        numbers: Path -> number.
        known: What may stand on a page beside them: texts of the artifacts, and what follows.
    """

    reports: dict[str, Any]
    numbers: dict[str, float]
    known: set[str]

    def found_in(self, text: str) -> set[str]:
        """Paths of the numbers that a text shows; strangers are a failure."""
        found: set[str] = set()
        strangers = []
        for shown in SHOWN.findall(text):
            paths = {path for path, number in self.numbers.items() if _means(shown, number)}
            found |= paths
            if not paths and shown not in self.known:
                strangers.append(shown)
        if strangers:
            raise AssertionError(f"numbers of no artifact: {', '.join(strangers)}")
        return found

    def lost_in(self, text: str, excuses: Mapping[str, str], *, under: str = "") -> list[str]:
        """Paths below `under` that a text neither shows nor is excused from showing."""
        advised = (self.reports.get("advice") or {}).get("workloads", ())
        other = [
            rf"advice/workloads/{place}/(draft_length{'|speedup' if entry['instead'] else ''})"
            for place, entry in enumerate(advised)
            if entry["instead"] or entry["tree"]
        ]
        meant = re.compile("|".join([*excuses.values(), *other]))
        lost = self.numbers.keys() - self.found_in(text)
        return sorted(p for p in lost if re.match(under, p) and not meant.fullmatch(p))


def mark(reports: Mapping[str, Any]) -> Marked:
    """Replace every number of the reports; whole numbers stay whole."""
    changed, numbers = _marked(dict(reports), itertools.count(1000))
    return Marked(changed, numbers, CONSTANTS | set(_said(changed)) | set(_computed(changed)))


def _marked(tree: Any, counter: Iterator[int], path: str = "") -> tuple[Any, dict[str, float]]:
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        parts = {key: _marked(value, counter, f"{path}/{key}") for key, value in items}
        found = dict(item for _, numbers in parts.values() for item in numbers.items())
        kept = {key: part for key, (part, _) in parts.items()}
        return (kept if isinstance(tree, dict) else list(kept.values())), found
    if isinstance(tree, bool) or not isinstance(tree, int | float):
        return tree, {}
    number = next(counter) if isinstance(tree, int) else next(counter) + 0.4321
    return number, {path.removeprefix("/"): number}


def _said(tree: Any) -> Iterator[str]:
    """Numbers in texts, keys included: temperatures, positions and widths are keys."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _said(str(key))
            yield from _said(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _said(value)
    elif isinstance(tree, str):
        yield from SHOWN.findall(tree.replace("_", " "))


def _computed(reports: Mapping[str, Any]) -> Iterator[str]:
    """Draft positions and lengths of trees, and what the page computes."""
    recipe = reports["registration"]["recipe"]
    record, speed = (reports[name]["recipes"][recipe] for name in ("evaluation", "benchmark"))
    yield from map(str, range(1, 1 + max(map(len, record["survival"].values()))))
    yield str(len(speed.get("tree", ())))
    yield f"{abs(speed['speedup']['mean'] - speed['predicted_speedup']):.2f}"
    if advice := reports.get("advice"):
        yield from (str(len(entry["tree"])) for entry in [*advice["workloads"], *advice["trials"]])
        tokens = max(cell["batch_size"] * cell["context"] for cell in advice["measured_costs"])
        for model in ("target", "draft"):
            yield scaled(tokens * advice[f"{model}_size"]["cache_bytes"], "B").split()[0]


def _means(shown: str, number: float) -> bool:
    value, digits = float(shown.replace(",", "")), len(shown.partition(".")[2])
    return any(abs(scale * number - value) <= 0.5001 * 10**-digits for scale in SCALES)


def fields(tree: Any, path: str = "") -> set[str]:
    """Names of all fields, with # for the place in a list and for a number of positions."""
    if isinstance(tree, list):
        return set().union(*(fields(value, f"{path}/#") for value in tree))
    if not isinstance(tree, dict):
        return set()
    names = {key: f"{path}/{'#' if str(key).isdigit() else key}" for key in tree}
    below = (fields(value, names[key]) for key, value in tree.items())
    return set(names.values()).union(*below)
