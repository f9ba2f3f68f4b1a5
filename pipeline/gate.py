"""Stage gate: every check with its measured value, requirement and remedy; never fails."""

from draftsmith.artifacts import read_json, write_json, write_text
from draftsmith.config import load_section
from draftsmith.console import run_stage
from draftsmith.drift.settings import DriftConfig
from draftsmith.registry.gate import decide
from draftsmith.registry.promotion_rule import GateConfig, GateEvidence
from draftsmith.registry.records import recorded
from draftsmith.report.inputs import ReportInputs
from draftsmith.report.markdown import render_markdown
from draftsmith.report.page import render_page
from pipeline import CHAMPION, CONFIG, DRAFTS, REPORTS, TARGET


def main() -> None:
    names = ("registration", "evaluation", "benchmark", "drift", "incumbent")
    reports = {name: read_json(REPORTS / f"{name}.json") for name in names}
    target, champion = read_json(TARGET), read_json(CHAMPION)["champion"]
    drift = load_section(CONFIG, "drift", DriftConfig)
    evidence = GateEvidence(target=target, **reports)
    config = load_section(CONFIG, "gate", GateConfig)
    decision = decide(evidence, config=config, critical_domains=drift.critical_domains)
    record = recorded(champion)
    manifest = read_json(DRAFTS / reports["registration"]["recipe"] / "draft.json")
    inputs = ReportInputs(
        decision=decision,
        target=target,
        champion=champion,
        champion_record=None if record is None else record.record,
        manifest=manifest,
        **reports,
    )
    write_json(REPORTS / "decision.json", decision)
    write_text(REPORTS / "report.html", render_page(inputs))
    write_text(REPORTS / "report.md", render_markdown(inputs))


if __name__ == "__main__":
    run_stage(main)
