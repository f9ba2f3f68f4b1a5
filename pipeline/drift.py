"""Stage drift: has the proposed draft drifted, against the record that it must be held to?"""

from draftsmith.artifacts import read_json, write_json
from draftsmith.config import load_section
from draftsmith.console import run_stage
from draftsmith.drift.settings import DriftConfig
from draftsmith.drift.verdict import drift_report
from draftsmith.evaluation.choice import best_recipe
from draftsmith.registry.records import known_record, recorded
from pipeline import CHAMPION, CONFIG, INCUMBENT, REPORTS, START


def main() -> None:
    name = best_recipe(read_json(REPORTS / "benchmark.json"))
    holders = read_json(CHAMPION)
    start = read_json(START)["recipes"][name]
    evaluated = read_json(REPORTS / "evaluation.json")["recipes"][name]
    report = drift_report(
        evaluated,
        champion=recorded(holders["champion"]),
        predecessor=recorded(holders["predecessor"]),
        incumbent=recorded(read_json(INCUMBENT)["incumbent"]),
        known=known_record(start, evaluated),
        config=load_section(CONFIG, "drift", DriftConfig),
        seed=0,
    )
    write_json(REPORTS / "drift.json", report)


if __name__ == "__main__":
    run_stage(main)
