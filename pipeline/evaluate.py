"""Stage evaluate: acceptance, survival, tau and losslessness of every recipe's draft."""

from draftsmith import provenance
from draftsmith.artifacts import read_json, write_json
from draftsmith.config import load_section, load_value
from draftsmith.console import count_phase, run_stage
from draftsmith.corpus.chat import make_chat
from draftsmith.corpus.dataset import read_facts, read_split
from draftsmith.evaluation.record import Evaluator, evaluation_report
from draftsmith.evaluation.settings import EvaluationConfig
from draftsmith.report.plots import write_evaluation_plots
from draftsmith.targets.loading import load_by_digest
from pipeline import CONFIG, CORPUS, DRAFTS, REPORTS, TARGET, TARGETS


def main() -> None:
    config = load_section(CONFIG, "evaluation", EvaluationConfig)
    recipes = load_value(CONFIG, "recipes", list[str])
    target = load_by_digest(TARGETS, read_json(TARGET)["digest"])
    stop_ids = make_chat(target.model, target.tokenizer).stop_ids
    rollouts = read_split(CORPUS, "eval")
    evaluator = Evaluator(config, target.model, target.identity, rollouts, stop_ids, count_phase)
    records = {name: evaluator.evaluate(DRAFTS / name) for name in recipes}
    report = evaluation_report(records, config, read_facts(CORPUS))
    origin = {"provenance": provenance.collect(config.seed)}
    write_json(REPORTS / "evaluation.json", report | origin)
    write_evaluation_plots(report, REPORTS)


if __name__ == "__main__":
    run_stage(main)
