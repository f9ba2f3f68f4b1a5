"""One real chain on a tiny trained target: promote, settle, block, promote again, point back, load.

The tests of this module are steps of one story and run in their order.
"""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from draftsmith.artifacts import digest_directory
from draftsmith.corpus.dataset import read_split
from draftsmith.drafts.checkpoint import LoadedDraft, load_draft
from draftsmith.drafts.student import empty_student
from draftsmith.evaluation.acceptance import teacher_forced_alpha
from draftsmith.targets.loading import load_by_digest
from tests.end_to_end.conftest import Project

EXIT_REPRO_FAILED = 255
EXIT_BLOCKED = 3

pytestmark = pytest.mark.slow


def _checks(project: Project) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in project.report("reports/decision.json")["checks"]}


def _aliases(project: Project) -> dict[str, list[str]]:
    return {pair["version"]: pair["aliases"] for pair in project.cli("pairs")}


def _point_at(project: Project, checkpoint: Path, **sections: dict[str, object]) -> None:
    project.configure(target={"source": str(checkpoint)}, **sections)


def test_the_first_run_ends_with_a_champion(project: Project, checkpoints: Path) -> None:
    _point_at(project, checkpoints / "home")
    done = project.repro()
    assert done.returncode == 0, done.stderr[-3000:]
    assert _aliases(project) == {"1": ["challenger", "champion"]}
    assert project.report("reports/promotion.json")["promoted"] is True
    assert project.report("reports/evaluation.json")["recipes"]["student"]["losslessness"]["holds"]


def test_a_random_draft_is_rarely_accepted_so_the_draft_did_learn(project: Project) -> None:
    digest = project.report("build/target.json")["digest"]
    target = load_by_digest(project.root / "models/targets", digest)
    trained = load_draft(project.root / "models/drafts/student", target.model, target_digest=digest)
    torch.manual_seed(1)
    random = empty_student(copy.deepcopy(trained.model.config), target.model, trained.token_ids)
    rollouts = [r for r in read_split(project.root / "data/corpus", "eval") if r.temperature == 0]

    def alpha(draft: LoadedDraft) -> float:
        by_prompt = teacher_forced_alpha(target.model, draft, rollouts, temperature=0.0)
        return sum(entry.alpha for entry in by_prompt.values()) / len(by_prompt)

    assert alpha(LoadedDraft(random, trained.token_ids, trained.manifest)) < 0.2
    assert alpha(trained) > 0.5


def test_a_second_run_changes_nothing(project: Project) -> None:
    before = digest_directory(project.root / "models/drafts")
    metrics = project.report("reports/metrics/evaluation.json")
    done = project.repro()
    assert done.returncode == 0, done.stderr[-3000:]
    assert digest_directory(project.root / "models/drafts") == before
    assert project.report("reports/metrics/evaluation.json") == metrics
    assert _aliases(project) == {"1": ["challenger", "champion"]}


def test_the_champion_generates_what_the_target_says(project: Project) -> None:
    answer = project.cli("generate", "models:/tiny-pair@champion", "where does the red fox go?")
    assert answer["text"].startswith("the ")
    assert answer["block_efficiency"] > 1
    script = (
        "import mlflow; model = mlflow.pyfunc.load_model('models:/tiny-pair@champion');"
        "print(model.predict(['where does the red fox go?'])[0])"
    )
    environment_uri = (
        f"import os; os.environ['MLFLOW_TRACKING_URI']='sqlite:///{project.root}/mlflow.db';"
    )
    done = project.run(sys.executable, "-c", environment_uri + script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == answer["text"].strip()


def test_a_stale_draft_forced_on_a_new_target_is_blocked(
    project: Project, checkpoints: Path
) -> None:
    _point_at(project, checkpoints / "away", start={"action": "reuse"})
    done = project.repro()
    assert done.returncode == EXIT_REPRO_FAILED
    assert project.run(sys.executable, "-m", "pipeline.promote").returncode == EXIT_BLOCKED
    checks = _checks(project)
    assert project.report("reports/incumbent.json")["verdict"] == "drifted"
    assert checks["drift"]["verdict"] == "fail"
    detail = checks["drift"]["detail"]
    assert detail in project.report("reports/decision.json")["reasons"]
    assert checks["drift"]["measured"] < -project.report("reports/drift.json")["margin"]
    page = (project.root / "reports/report.html").read_text(encoding="utf-8")
    assert "Block" in page
    assert f"{-checks['drift']['measured']:.3f}" in page
    blocked = {pair["version"]: pair for pair in project.cli("pairs")}
    assert "champion" in blocked["1"]["aliases"]
    assert '"verdict": "block"' in blocked["2"]["tags"]["decision"]


def test_a_draft_distilled_from_the_new_target_is_promoted(
    project: Project, checkpoints: Path
) -> None:
    _point_at(project, checkpoints / "away")
    done = project.repro()
    assert done.returncode == 0, done.stderr[-3000:]
    assert project.report("build/start.json")["recipes"]["student"]["action"] == "retrain"
    assert _aliases(project) == {"1": [], "2": [], "3": ["challenger", "champion"]}


def test_pointing_back_finds_the_old_pair_and_trains_nothing(
    project: Project, checkpoints: Path
) -> None:
    _point_at(project, checkpoints / "home")
    done = project.repro()
    assert done.returncode == 0, done.stderr[-3000:]
    start = project.report("build/start.json")["recipes"]["student"]
    assert (start["action"], start["source_version"]) == ("known", "1")
    assert _aliases(project) == {"1": ["challenger", "champion"], "2": [], "3": []}


def test_a_checkpoint_overwritten_in_place_is_noticed_and_the_old_pair_still_loads(
    project: Project, checkpoints: Path, tmp_path: Path
) -> None:
    before = project.report("build/target.json")["digest"]
    shutil.copytree(checkpoints / "home", tmp_path / "kept")
    shutil.copytree(checkpoints / "away", checkpoints / "home", dirs_exist_ok=True)
    done = project.repro("resolve_target")
    assert done.returncode == 0, done.stderr[-3000:]
    after = project.report("build/target.json")["digest"]
    shutil.copytree(tmp_path / "kept", checkpoints / "home", dirs_exist_ok=True)
    assert after != before
    answer = project.cli("generate", "models:/tiny-pair/1", "where does the red fox go?")
    assert answer["text"].startswith("the ")
