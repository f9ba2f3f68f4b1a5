"""Stage gate: every check with its measured value, requirement and remedy; never fails."""

from datetime import UTC, datetime

from draftsmith.artifacts import read_json, write_json, write_text
from draftsmith.config import load_section, load_value
from draftsmith.console import run_stage
from draftsmith.registry.evidence_files import advice_for_gate, benchmark_for_gate
from draftsmith.registry.gate import GateConfig, GateEvidence, decide
from draftsmith.registry.records import recorded
from draftsmith.report.inputs import ReportInputs
from draftsmith.report.markdown import render_markdown
from draftsmith.report.page import render_page
from pipeline import CHAMPION, CONFIG, DRAFTS, REPORTS, TARGET


def main() -> None:
    names = ("registration", "evaluation", "benchmark", "drift", "incumbent")
    reports = {name: read_json(REPORTS / f"{name}.json") for name in names}
    gate = load_section(CONFIG, "gate", GateConfig)
    reports["target"], champion = read_json(TARGET), read_json(CHAMPION)["champion"]
    reports["benchmark"] = benchmark_for_gate(reports, device=gate.device)
    reports["advice"] = advice_for_gate(reports)
    domains = load_value(CONFIG, "drift.critical_domains", list[str])
    found = GateEvidence(**reports, champion=champion and champion["version"])
    decision = decide(found, config=gate, today=datetime.now(UTC).date(), critical_domains=domains)
    inputs = ReportInputs(
        decision=decision,
        champion=champion,
        champion_record=champion and recorded(champion).record,
        manifest=read_json(DRAFTS / reports["registration"]["recipe"] / "draft.json"),
        **reports,
    )
    write_json(REPORTS / "decision.json", decision)
    write_text(REPORTS / "report.html", render_page(inputs))
    write_text(REPORTS / "report.md", render_markdown(inputs))


if __name__ == "__main__":
    run_stage(main)
