"""Stage benchmark: the speed of every recipe's draft on this device."""

from draftsmith import provenance
from draftsmith.artifacts import read_json, write_json
from draftsmith.config import load_section, load_value
from draftsmith.console import count_phase, run_stage
from draftsmith.corpus.chat import make_chat
from draftsmith.corpus.dataset import read_split
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.evaluation.benchmark import Bench
from draftsmith.evaluation.settings import BenchmarkConfig
from draftsmith.report.plots import write_benchmark_plots
from draftsmith.targets.loading import load_by_digest
from pipeline import CONFIG, CORPUS, DEVICE, DRAFTS, PARTIAL, REPORTS, TARGET, TARGETS


def main() -> None:
    config = load_section(CONFIG, "benchmark", BenchmarkConfig)
    recipes = load_value(CONFIG, "recipes", list[str])
    digest, device = read_json(TARGET)["digest"], read_json(DEVICE)
    evaluated = read_json(REPORTS / "evaluation.json")["recipes"]
    target = load_by_digest(TARGETS, digest)
    stop_ids = make_chat(target.model, target.tokenizer).stop_ids
    bench = Bench(config, target.model, stop_ids, read_split(CORPUS, "eval"), count_phase)
    records = {}
    for name in recipes:
        draft = load_draft(DRAFTS / name, target.model, target_digest=None)
        records[name] = bench.measure(
            draft, evaluated[name], device=device, partial=PARTIAL / "benchmark"
        )
    report = {"schema": 1, "target_digest": digest, "device": device, "recipes": records}
    write_json(REPORTS / "benchmark.json", report | {"provenance": provenance.collect(config.seed)})
    write_benchmark_plots(report, REPORTS)


if __name__ == "__main__":
    run_stage(main)
