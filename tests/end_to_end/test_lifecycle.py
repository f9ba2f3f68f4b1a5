"""A pair's life on one trained target: promote, settle, reuse, block, distil again, point back.

The tests of this module are steps of one story and run in their order. Each begins with what the
step before left; the first runs as a user's would, the others with stages that start at once.
"""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.artifacts import digest_directory, read_json
from draftsmith.corpus.dataset import read_split
from draftsmith.corpus.prompts import Prompt
from draftsmith.decoding import Request, SamplingParams
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.drafts.joined import LoadedDraft
from draftsmith.drafts.student import empty_student
from draftsmith.drift.comparison import Comparison
from draftsmith.drift.telemetry import append_telemetry, describe_request
from draftsmith.evaluation.acceptance import teacher_forced_alpha
from draftsmith.evaluation.intervals import Estimate
from draftsmith.registry.loading import load_pair
from draftsmith.report.inputs import ReportInputs
from draftsmith.report.page import render_page
from draftsmith.targets.loading import load_by_digest
from tests.end_to_end.conftest import REPOSITORY, Project
from tests.end_to_end.reports import reports_of
from tests.end_to_end.worlds import Update, with_other_template, with_other_tokenizer
from tests.report.conftest import advice as made_advice
from tests.report.numbers import UNSHOWN, UNSHOWN_OF_A_RUN, fields, mark, text_of

EXIT_REPRO_FAILED = 255
EXIT_BLOCKED = 3

pytestmark = pytest.mark.slow


def _checks(project: Project) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in project.report("reports/decision.json")["checks"]}


def _aliases(project: Project) -> dict[str, list[str]]:
    return {pair["version"]: pair["aliases"] for pair in project.cli("pairs")}


def _start(project: Project) -> tuple[str, str | None]:
    decided = project.report("build/start.json")["recipes"]["student"]
    return decided["action"], decided["source_version"]


def _draft_digest(project: Project) -> str:
    """Of the draft that the last run proposed."""
    return str(read_json(project.root / "models/drafts/student/draft.json")["digest"])


def _has_trained(project: Project) -> bool:
    """Whether the last command was a run that trained a draft."""
    return "phase=distil_student" in project.said[-1]


def _point_at(project: Project, checkpoint: Path, **sections: dict[str, object]) -> None:
    project.configure(target={"source": str(checkpoint)}, **sections)


def _succeeds(project: Project, *arguments: str) -> None:
    done = project.repro(*arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def _update(project: Project, checkpoints: Path, kind: Update) -> Path:
    """The checkpoint of an update; made from the target and its corpus when first asked for."""
    folder = checkpoints / kind
    if not folder.exists():
        corpus = project.root / "data/corpus"
        project.world.make_update(kind, target=checkpoints / "home", corpus=corpus, folder=folder)
    return folder


def test_the_first_run_ends_with_a_champion(project: Project, checkpoints: Path) -> None:
    _point_at(project, checkpoints / "home")
    _succeeds(project)
    assert _has_trained(project)
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

    assert alpha(LoadedDraft(random, trained.token_ids, trained.manifest)) < min(
        0.2, project.world.least_alpha / 2
    )
    assert alpha(trained) > project.world.least_alpha


def test_a_second_run_changes_nothing(warm: Project) -> None:
    before = digest_directory(warm.root / "models/drafts")
    metrics = warm.report("reports/metrics/evaluation.json")
    _succeeds(warm)
    assert not _has_trained(warm)
    assert _start(warm) == ("known", "1")
    assert digest_directory(warm.root / "models/drafts") == before
    assert warm.report("reports/metrics/evaluation.json") == metrics
    assert _aliases(warm) == {"1": ["challenger", "champion"]}


@pytest.fixture(scope="module")
def advice(warm: Project) -> dict[str, Any]:
    """Taken away again: what was advised would choose the lengths of the story's engines."""
    limits = ("--max-batch", "2", "--max-context", "32")
    found: dict[str, Any] = warm.cli("advise", "--budget", "20s", *limits)
    (warm.root / "reports/advice.json").unlink()
    return found


def test_every_number_of_the_report_is_one_of_the_artifacts(
    warm: Project, advice: dict[str, Any]
) -> None:
    reports = reports_of(warm.root)
    page = (warm.root / "reports/report.html").read_text(encoding="utf-8")
    assert text_of(render_page(ReportInputs(**reports))) == text_of(page)
    marked = mark(reports | {"advice": advice})
    text = text_of(render_page(ReportInputs(**marked.reports)))
    excuses = UNSHOWN | UNSHOWN_OF_A_RUN
    assert marked.lost_in(text, excuses, under="(advice|benchmark|drift)/") == []


def test_what_the_tests_of_the_report_make_up_is_what_advise_writes(
    advice: dict[str, Any],
) -> None:
    origin = {"device", "provenance"}
    real, made_up = (
        fields({key: value for key, value in found.items() if key not in origin})
        for found in (advice, made_advice())
    )
    assert real - made_up == set()
    depends = ("/alternatives/#/", "/workloads/#/instead/")
    assert {name for name in made_up - real if not name.startswith(depends)} == set()


def test_every_field_of_the_reports_of_a_run_is_documented(
    warm: Project, advice: dict[str, Any]
) -> None:
    text = (REPOSITORY / "docs/formats.md").read_text(encoding="utf-8")
    generated = set(Estimate.__dataclass_fields__) | set(Comparison.__dataclass_fields__)
    known = generated | set(re.findall(r"`(\w+)`", text))
    named_by_the_run = re.compile(r"/(by_domain|recipes|arms|ratios|packages)/[^/]+$")
    reports = reports_of(warm.root) | {"advice": advice}
    missing = {
        f"{name}{path}"
        for name in ("evaluation", "benchmark", "drift", "advice")
        for path in fields(reports[name])
        if not named_by_the_run.search(path)
        and (field := path.rpartition("/")[2]).isidentifier()
        and field not in known
    }
    assert missing == set()


def test_dvc_shows_plots_and_metrics_of_the_run(warm: Project) -> None:
    def shown(*command: str) -> dict[str, Any]:
        done = warm.run("dvc", *command, "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    plots = shown("plots", "show")
    assert "errors" not in plots
    survival = warm.report("reports/evaluation.json")["recipes"]["student"]["survival"]["0.0"]
    (drawn,) = plots["data"]["survival"]
    assert str(survival[0]) in json.dumps(drawn["content"])
    assert plots["data"]["alpha"]
    assert plots["data"]["speedup"]
    path = "reports/metrics/benchmark.json"
    assert shown("metrics", "show")[""]["data"][path]["data"] == warm.report(path)
    changed = shown("metrics", "diff")  # nothing was measured when the project was committed
    assert "student" in json.dumps(changed[path])


def test_the_champion_generates_what_the_target_says(warm: Project) -> None:
    question = warm.world.question
    answer = warm.cli("generate", "models:/story-pair@champion", question)
    assert answer["text"].startswith(warm.world.answer_start)
    assert answer["block_efficiency"] > 1
    script = warm.root / "predict.py"
    script.write_text(
        "import os, sys, mlflow\n"
        "os.environ['MLFLOW_TRACKING_URI'] = f'sqlite:///{os.getcwd()}/mlflow.db'\n"
        "model = mlflow.pyfunc.load_model('models:/story-pair@champion')\n"
        "print(model.predict(sys.argv[1:])[0])\n",
        encoding="utf-8",
    )
    done = warm.run("python", "-m", "predict", question)
    script.unlink()
    assert done.returncode == 0, done.stderr[-3000:]
    assert answer["text"].strip() in done.stdout


def test_a_light_update_keeps_the_draft_and_trains_nothing(
    warm: Project, checkpoints: Path
) -> None:
    draft = _draft_digest(warm)
    _point_at(warm, _update(warm, checkpoints, "light"))
    _succeeds(warm)
    assert not _has_trained(warm)
    incumbent = warm.report("reports/incumbent.json")
    assert (incumbent["verdict"], incumbent["changed"]) == ("matched", ["weights"])
    assert _start(warm) == ("reuse", "1")
    assert _draft_digest(warm) == draft
    assert _aliases(warm) == {"1": [], "2": ["challenger", "champion"]}


def test_a_stale_draft_forced_on_a_new_target_is_blocked(warm: Project, checkpoints: Path) -> None:
    _point_at(warm, _update(warm, checkpoints, "heavy"), start={"action": "reuse"})
    assert warm.repro().returncode == EXIT_REPRO_FAILED
    assert warm.run("python", "-m", "pipeline.promote").returncode == EXIT_BLOCKED
    checks = _checks(warm)
    assert warm.report("reports/incumbent.json")["verdict"] == "drifted"
    assert checks["drift"]["verdict"] == "fail"
    detail = checks["drift"]["detail"]
    assert detail in warm.report("reports/decision.json")["reasons"]
    assert checks["drift"]["measured"] < -warm.report("reports/drift.json")["margin"]
    page = (warm.root / "reports/report.html").read_text(encoding="utf-8")
    assert "Block" in page
    assert f"{-checks['drift']['measured']:.3f}" in page
    pairs = {pair["version"]: pair for pair in warm.cli("pairs")}
    assert "champion" in pairs["2"]["aliases"]
    assert '"verdict": "block"' in pairs["3"]["tags"]["decision"]


def _two_like_halves(prompts: list[Prompt]) -> list[Prompt]:
    """In an order without a shift: of each domain, short and long ones go to both halves."""
    ordered = sorted(prompts, key=lambda p: (p.domain, sum(len(text) for _, text in p.messages)))
    chance = random.Random(0)
    halves = ordered[::2], ordered[1::2]
    return [prompt for half in halves for prompt in chance.sample(half, len(half))]


def _serve(project: Project, version: str, file: Path, *, under: str) -> None:
    """Answer the eval prompts with a version; its telemetry names the pair `under`."""
    pair = load_pair(f"models:/story-pair/{version}", root=project.root)
    held_out = {r.prompt_id for r in read_split(project.root / "data/corpus", "eval")}
    asked = [prompt for prompt in project.world.prompts() if prompt.prompt_id in held_out]
    asked = project.world.rounds_of_traffic * _two_like_halves(asked)
    params = SamplingParams(max_new_tokens=24, stop_token_ids=pair.stop_token_ids())
    requests = []
    for number, prompt in enumerate(asked):
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        requests.append(Request(str(number), pair.encode(messages), params))
    engine = pair.engine(pair.draft_length, max_rows=8)
    for request, prompt, result in zip(requests, asked, engine.generate(requests), strict=True):
        line = describe_request(
            result.trace,
            params,
            time_utc="2026-01-01T00:00:00+00:00",
            pair_digest=under,
            domain=prompt.domain,
            prompt_tokens=len(request.prompt_ids),
            latency_s=1.0,
        )
        append_telemetry(file, line)


def test_traffic_raises_an_alarm_once_the_target_has_changed_below_the_draft(
    warm: Project, tmp_path: Path
) -> None:
    digest = {p["version"]: p["pair_digest"] for p in warm.cli("pairs")}["2"]
    verdicts = {}
    for version, name in (("2", "own"), ("3", "changed")):
        _serve(warm, version, tmp_path / name, under=digest)
        found = warm.cli("monitor", str(tmp_path / name), "--version", "2", "--no-tag")
        verdicts[name] = found["verdict"]
    assert verdicts == {"own": "ok", "changed": "draft decay"}
    # The same draft on the same target, but what is asked has changed: the mix of domains.
    requests = (tmp_path / "own").read_text(encoding="utf-8").splitlines()
    by_domain = sorted(requests, key=lambda line: json.loads(line)["domain"])
    (tmp_path / "shifted").write_text("\n".join(by_domain) + "\n", encoding="utf-8")
    found = warm.cli("monitor", str(tmp_path / "shifted"), "--version", "2", "--no-tag")
    assert found["verdict"] == "traffic shift"


def test_a_draft_distilled_from_the_new_target_is_promoted(
    warm: Project, checkpoints: Path
) -> None:
    stale = warm.report("reports/incumbent.json")["pooled"]["proposed"]
    _point_at(warm, checkpoints / "heavy")
    _succeeds(warm)
    assert _start(warm)[0] == "retrain"
    assert _aliases(warm) == {"1": [], "2": [], "3": [], "4": ["challenger", "champion"]}
    regained = warm.report("reports/evaluation.json")["recipes"]["student"]["alpha"]
    assert regained["0.0"]["mean"] > stale + warm.report("reports/drift.json")["margin"]


def _eval_prompts(project: Project) -> dict[str, list[int]]:
    corpus = read_split(project.root / "data/corpus", "eval")
    return {rollout.prompt_id: rollout.prompt_ids for rollout in corpus}


def test_another_chat_template_is_another_target_and_the_verdict_says_what_changed(
    warm: Project, checkpoints: Path
) -> None:
    before, asked = warm.report("build/target.json")["digest"], _eval_prompts(warm)
    with_other_template(checkpoints / "heavy", checkpoints / "template")
    _point_at(warm, checkpoints / "template")
    _succeeds(warm, "start")
    assert warm.report("build/target.json")["digest"] != before
    now = _eval_prompts(warm)
    assert now.keys() == asked.keys()
    assert all(now[name] != ids for name, ids in asked.items())
    incumbent = warm.report("reports/incumbent.json")
    assert incumbent["changed"] == ["chat_template"]
    assert (
        "What changed in the target: chat template; its weights are the same."
        in (incumbent["reasons"])
    )
    assert incumbent["verdict"] in ("matched", "drifted")  # other prompts, other answers


def test_a_draft_of_another_tokenizer_is_refused(warm: Project, checkpoints: Path) -> None:
    with_other_tokenizer(checkpoints / "heavy", checkpoints / "tokenizer")
    _point_at(warm, checkpoints / "tokenizer", start={"action": "reuse"})
    done = warm.repro("start")
    assert done.returncode == EXIT_REPRO_FAILED
    assert "tokenizer" in done.stderr + done.stdout
    incumbent = warm.report("reports/incumbent.json")
    assert (incumbent["verdict"], incumbent["changed"]) == ("drifted", ["tokenizer"])
    _point_at(warm, checkpoints / "tokenizer")
    _succeeds(warm, "start")
    assert _start(warm) == ("retrain", None)


def test_pointing_back_finds_the_old_pair_and_trains_nothing(
    warm: Project, checkpoints: Path
) -> None:
    _point_at(warm, checkpoints / "home")
    _succeeds(warm)
    assert not _has_trained(warm)
    assert _start(warm) == ("known", "1")
    assert _aliases(warm) == {"1": ["challenger", "champion"], "2": [], "3": [], "4": []}
    registered = {pair["version"]: pair for pair in warm.cli("pairs")}["1"]
    assert _draft_digest(warm) == registered["draft_digest"]
    served = load_pair("models:/story-pair@champion", root=warm.root)
    assert served.draft.manifest.digest == registered["draft_digest"]
    assert served.record.digest == registered["pair_digest"]


def test_a_pair_that_was_rolled_back_stays_out(warm: Project) -> None:
    moved = warm.cli("rollback", "--reason", "answers were slow")
    assert (moved["quarantined"], moved["champion"]["version"]) == ("1", "4")
    assert warm.repro().returncode == EXIT_REPRO_FAILED
    assert _start(warm) == ("known", "1")
    assert _checks(warm)["quarantine"]["verdict"] == "fail"
    aliases = _aliases(warm)
    assert ("champion" in aliases["4"], aliases["1"]) == (True, ["challenger"])


def test_a_checkpoint_overwritten_in_place_is_noticed_and_the_old_pair_still_loads(
    warm: Project, checkpoints: Path, tmp_path: Path
) -> None:
    before = warm.report("build/target.json")["digest"]
    shutil.copytree(checkpoints / "home", tmp_path / "kept")
    shutil.copytree(checkpoints / "heavy", checkpoints / "home", dirs_exist_ok=True)
    _succeeds(warm, "resolve_target")
    after = warm.report("build/target.json")["digest"]
    shutil.copytree(tmp_path / "kept", checkpoints / "home", dirs_exist_ok=True)
    assert after != before
    answer = warm.cli("generate", "models:/story-pair/1", warm.world.question)
    assert answer["text"].startswith(warm.world.answer_start)


def test_after_an_alarm_the_next_run_trains_another_draft_and_promotes_it(
    warm: Project, checkpoints: Path, tmp_path: Path
) -> None:
    _point_at(warm, checkpoints / "heavy")
    before = {pair["version"]: pair for pair in warm.cli("pairs")}["4"]
    _serve(warm, "3", tmp_path / "stale", under=before["pair_digest"])
    alarm = warm.cli("monitor", str(tmp_path / "stale"), "--version", "4")
    assert (alarm["verdict"], alarm["tagged"]) == ("draft decay", True)
    assert warm.run("python", "-m", "draftsmith.cli", "promote", "4").returncode == 0  # it is that
    _succeeds(warm)
    assert warm.report("build/start.json")["recipes"]["student"]["reseed"] == 1
    pairs = {pair["version"]: pair for pair in warm.cli("pairs")}
    assert "champion" in pairs["5"]["aliases"]
    assert pairs["5"]["draft_digest"] != before["draft_digest"]
    assert pairs["4"]["state"] == "live drift"
    refused = warm.run("python", "-m", "draftsmith.cli", "promote", "4")
    assert refused.returncode == EXIT_BLOCKED
    assert "live-drift" in refused.stderr


def test_what_an_alarm_had_trained_stays_out_after_a_rollback_until_it_is_released(
    warm: Project,
) -> None:
    moved = warm.cli("rollback", "--from", "5", "--reason", "answers were slow")
    assert (moved["quarantined"], moved["champion"]["version"]) == ("5", "2")
    assert warm.repro().returncode == EXIT_REPRO_FAILED
    assert not _has_trained(warm)
    assert _start(warm) == ("known", "5")
    assert _checks(warm)["quarantine"]["verdict"] == "fail"
    warm.cli("release", "5", "--reason", "it was the disk")
    _succeeds(warm)
    assert not _has_trained(warm)
    assert _aliases(warm)["5"] == ["challenger", "champion"]
    assert [move["kind"] for move in warm.cli("history")][-3:] == [
        "rollback",
        "release",
        "promotion",
    ]
