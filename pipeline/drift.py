"""Stage drift: has the proposed draft drifted, against the record that it must be held to?"""

from draftsmith.artifacts import read_json, write_json
from draftsmith.config import load_section
from draftsmith.console import run_stage
from draftsmith.drift.settings import DriftConfig
from draftsmith.drift.verdict import Records, drift_report
from draftsmith.evaluation.choice import best_recipe, unusable_recipes
from draftsmith.registry.records import known_record, recorded
from pipeline import CHAMPION, CONFIG, INCUMBENT, REPORTS, START


def main() -> None:
    evaluation, held = read_json(REPORTS / "evaluation.json"), read_json(CHAMPION)
    unusable = unusable_recipes(evaluation, held["quarantined"])
    name = best_recipe(read_json(REPORTS / "benchmark.json"), unusable)
    start, evaluated = read_json(START)["recipes"][name], evaluation["recipes"][name]
    records = Records(
        target_digest=evaluation["target_digest"],
        champion=recorded(held["champion"]),
        predecessor=recorded(held["predecessor"]),
        incumbent=recorded(read_json(INCUMBENT)["incumbent"]),
        known=known_record(start, evaluated, evaluation["target_digest"]),
        history=held["history"],
        tagged=held["tagged"],
    )
    config = load_section(CONFIG, "drift", DriftConfig)
    write_json(REPORTS / "drift.json", drift_report(evaluated, records, config=config, seed=0))


if __name__ == "__main__":
    run_stage(main)
