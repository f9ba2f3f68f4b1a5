"""Stage register: the best recipe's pair becomes a version of the model, and @challenger."""

from draftsmith.artifacts import read_json, write_json
from draftsmith.config import load_section
from draftsmith.console import run_stage
from draftsmith.registry.mlflow_store import PairStore
from draftsmith.registry.registration import Proposal, register_proposal
from draftsmith.registry.settings import RegistryConfig
from draftsmith.targets.settings import TargetConfig
from pipeline import CHAMPION, CONFIG, DRAFTS, PARTIAL, REPORTS, ROOT, TARGET


def main() -> None:
    store = PairStore(ROOT, load_section(CONFIG, "registry", RegistryConfig))
    proposal = Proposal(
        target=read_json(TARGET),
        evaluation=read_json(REPORTS / "evaluation.json"),
        benchmark=read_json(REPORTS / "benchmark.json"),
        drift=read_json(REPORTS / "drift.json"),
        drafts=DRAFTS,
        plots=REPORTS / "plots",
        source=load_section(CONFIG, "target", TargetConfig),
        quarantined=read_json(CHAMPION)["quarantined"],
    )
    report = register_proposal(store, proposal, root=ROOT, staging=PARTIAL / "register")
    write_json(REPORTS / "registration.json", report)


if __name__ == "__main__":
    run_stage(main)
