"""Stage promote: attach the decision to the version, then move @champion, or exit 3 and say why.

An experiment does neither: its gate may be one under trial, and `draftsmith promote` goes by the
attached decision.
"""

import os
from datetime import UTC, datetime

from draftsmith.artifacts import read_json, write_json
from draftsmith.config import load_section
from draftsmith.console import run_stage
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.overrides import as_of
from draftsmith.registry.registration import carry_out
from draftsmith.registry.settings import RegistryConfig
from pipeline import CONFIG, REPORTS, ROOT

EXIT_BLOCKED = 3


def main() -> int:
    store = PairStore(ROOT, load_section(CONFIG, "registry", RegistryConfig))
    decision = as_of(read_json(REPORTS / "decision.json"), datetime.now(UTC).date())
    is_experiment = "DVC_EXP_NAME" in os.environ
    if not is_experiment:
        files = (REPORTS / name for name in ("decision.json", "report.html", "report.md"))
        store.attach_decision(decision["version"], *files)
    report = carry_out(store, decision, is_experiment=is_experiment)
    write_json(REPORTS / "promotion.json", report)
    is_held_back = is_experiment and decision["verdict"] == "promote"
    return 0 if report["promoted"] or is_held_back else EXIT_BLOCKED


if __name__ == "__main__":
    run_stage(main)
