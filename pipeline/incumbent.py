"""Stage incumbent: does the draft of the newest promoted pair still match the new target?"""

from draftsmith import provenance
from draftsmith.artifacts import read_json, write_json
from draftsmith.config import load_section
from draftsmith.console import count_phase, run_stage
from draftsmith.corpus.dataset import read_split
from draftsmith.drift.incumbent import SHAPE, identity_changes, incumbent_report, rules_out_reuse
from draftsmith.drift.settings import DriftConfig
from draftsmith.errors import DraftMisfitError
from draftsmith.evaluation.record import Evaluator
from draftsmith.evaluation.settings import EvaluationConfig
from draftsmith.registry.records import pair_folder, recorded
from draftsmith.targets.loading import load_by_digest
from pipeline import CONFIG, CORPUS, INCUMBENT, REPORTS, TARGET, TARGETS


def main() -> None:
    drift = load_section(CONFIG, "drift", DriftConfig)
    config = load_section(CONFIG, "evaluation", EvaluationConfig)
    incumbent, new = recorded(read_json(INCUMBENT)["incumbent"]), read_json(TARGET)
    changed, measured = [], None
    if incumbent is not None:
        folder = pair_folder(incumbent.pair)
        changed = identity_changes(read_json(folder / "evidence/target.json"), new)
        if not rules_out_reuse(changed):
            target = load_by_digest(TARGETS, new["digest"])
            rollouts = read_split(CORPUS, "eval")
            evaluator = Evaluator(config, target.model, target.identity, rollouts, (), count_phase)
            try:
                measured = evaluator.acceptance(evaluator.join(folder / "draft"))
                measured["packages"] = provenance.collect()["packages"]
            except DraftMisfitError:
                changed.append(SHAPE)
    report = incumbent_report(incumbent, measured, changed=changed, config=drift, seed=config.seed)
    write_json(REPORTS / "incumbent.json", report)


if __name__ == "__main__":
    run_stage(main)
