"""The check against real vLLM, as far as it goes without vLLM: its place is taken by our engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import vllm_check, vllm_driver
from draftsmith.decoding.trace import PositionCounts
from draftsmith.errors import ConfigError
from draftsmith.evaluation.acceptance import DecodingPlan, decode
from draftsmith.evaluation.losslessness import SelfTest, greedy
from tests.serving.service import PINNED, QUESTIONS
from tests.tiny_target import write_prompts

NUM_TOKENS = 40
COUNTS = PositionCounts(drafted=[100, 98], reached=[100, 50], accepted=[50, 20])


def stand_in(pair, *, lost=0, changed=False, jobs=None):
    """Does jobs as vLLM would: counts whole rounds, and none before the first token."""

    def vllm(job):
        prompts = [(str(place), ids) for place, ids in enumerate(job["prompts"])]
        test = SelfTest(0, 0, job["num_tokens"], ())
        tokens = greedy(pair.target.model, None, prompts, test)
        done = {"token_ids": list(tokens.values()), "counters": {}, "packages": {"vllm": "0"}}
        if job["speculation"] is not None:
            length = job["speculation"]["num_speculative_tokens"]
            begun = [(name, ids + tokens[name][:1]) for name, ids in prompts]
            plan = DecodingPlan(length, 0, job["num_tokens"] - 1, 8, (), 0)
            results = decode(pair.target.model, pair.draft, begun, temperature=0.0, plan=plan)
            accepted = [n for result in results.values() for n in result.trace.accepted]
            by_place = [sum(n > place for n in accepted) - lost for place in range(length)]
            done["counters"] = {"drafts": len(accepted), "accepted_tokens_per_pos": by_place}
        if changed:
            done["token_ids"][0][3] += 1
        if jobs is not None:
            draft = (job["speculation"] or {}).get("model")
            files = [path.name for path in Path(draft).iterdir()] if draft else []
            jobs.append((job, files))
        return done

    return vllm


@pytest.fixture
def prompts(pair):
    return [(question, pair.encode(question)) for question in QUESTIONS[:12]]


def checked(pair, prompts, **given):
    vllm = stand_in(pair, **given)
    return vllm_check.check(pair, prompts, num_tokens=NUM_TOKENS, vllm=vllm)


def test_engines_that_do_the_same_agree(pair, prompts, monkeypatch):
    monkeypatch.setattr(vllm_check, "MARGIN", 0.08)  # the last round of a short text weighs more
    jobs = []
    found = checked(pair, prompts, jobs=jobs)
    assert found["holds"]
    for part in found["tokens"].values():
        assert part["num_identical"] == len(prompts)
    survival = found["acceptance"]["vllm"]["survival"]
    assert len(survival) == pair.draft_length
    assert 0.1 < survival[0] < 1
    assert found["speculation"] == {
        "method": "draft_model",
        "num_speculative_tokens": pair.draft_length,
    }
    (alone, _), (drafted, files) = jobs
    assert alone["speculation"] is None
    assert drafted["speculation"]["method"] == "draft_model"
    assert drafted["target"] == str(pair.target.directory.resolve())
    assert drafted["dtype"] == "float32"
    assert {"config.json", "model.safetensors"} <= set(files)


def test_an_engine_with_other_tokens_is_noticed(pair, prompts):
    found = checked(pair, prompts, changed=True)
    assert not found["holds"]
    assert not found["tokens"]["drafted"]["holds"]
    assert found["tokens"]["drafted"]["num_identical"] == len(prompts) - 1


def test_an_engine_that_accepts_less_is_noticed(pair, prompts):
    found = checked(pair, prompts, lost=30)
    assert not found["holds"]
    assert not found["acceptance"]["holds"]
    assert found["tokens"]["drafted"]["holds"]


@pytest.mark.parametrize(
    ("accepted", "holds"), [([500, 205], True), ([500, 240], False), ([0, 0], False)]
)
def test_acceptance_is_held_by_position_against_rounds(accepted, holds):
    counters = {"drafts": 1000, "accepted_tokens_per_pos": accepted}
    found = vllm_check.compared(COUNTS, counters)
    assert found["holds"] is holds
    assert found["ours"]["survival"] == [0.5, 20 / 98]
    assert found["vllm"]["survival"] == [a / 1000 for a in accepted]


def test_an_engine_that_never_drafted_does_not_agree():
    empty = PositionCounts([0], [0], [0])
    found = vllm_check.compared(empty, {"drafts": 0, "accepted_tokens_per_pos": [0]})
    assert not found["holds"]


def test_counters_of_all_engines_are_summed_and_others_left_out():
    metrics = [
        SimpleNamespace(name="vllm:spec_decode_num_drafts", value=5),
        SimpleNamespace(name="vllm:spec_decode_num_drafts_total", value=2),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[4, 1]),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[1, 1]),
        SimpleNamespace(name="vllm:num_requests_running", value=9),
    ]
    found = vllm_driver.counters(metrics)
    assert found == {"drafts": 7, "accepted_tokens_per_pos": [5, 2]}


VLLM = """
class SamplingParams:
    def __init__(self, **given):
        self.given = given

class Answer:
    def __init__(self, token_ids):
        self.outputs = [self]
        self.token_ids = token_ids

class Metric:
    name, value = "vllm:spec_decode_num_drafts", 3

class LLM:
    def __init__(self, **given):
        self.given = given
    def generate(self, prompts, params):
        assert params.given["temperature"] == 0 and params.given["ignore_eos"]
        assert self.given["disable_log_stats"] is False
        length = self.given.get("speculative_config", {}).get("num_speculative_tokens", 0)
        told = length, params.given["max_tokens"]
        return [Answer((*p["prompt_token_ids"], *told)) for p in prompts]
    def get_metrics(self):
        return [Metric]
"""


@pytest.mark.parametrize("length", [0, 2])
def test_the_driver_hands_a_job_to_vllm_and_its_answer_back(tmp_path, monkeypatch, length):
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    speculation = {"method": "eagle3", "num_speculative_tokens": length} if length else None
    job = {"target": "t", "dtype": "float32", "prompts": [[1, 2], [3]], "num_tokens": 7}
    job["speculation"] = speculation
    (tmp_path / "job.json").write_text(json.dumps(job))
    vllm_driver.main([str(tmp_path / "job.json"), str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["token_ids"] == [[1, 2, length, 7], [3, length, 7]]
    assert result["counters"] == {"drafts": 3}
    assert result["packages"]["torch"]
    sys.modules.pop("vllm")


def test_vllm_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    script = tmp_path / "driver.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "job = json.loads(pathlib.Path(sys.argv[1]).read_text())\n"
        "pathlib.Path(sys.argv[2]).write_text(json.dumps({'was': job['given']}))\n"
    )
    monkeypatch.setattr(vllm_check, "DRIVER", script)
    assert vllm_check.run_vllm(Path(sys.executable), {"given": [1]}) == {"was": [1]}


@pytest.mark.parametrize(
    ("python", "words"),
    [(Path(sys.executable), "No module named 'vllm'"), (Path("nowhere/python"), "No such file")],
)
def test_an_environment_without_vllm_is_one_clear_error(python, words):
    job = {"prompts": [[1]], "num_tokens": 1, "speculation": None, "target": "", "dtype": ""}
    with pytest.raises(ConfigError, match=words) as caught:
        vllm_check.run_vllm(python, job)
    assert "make vllm-check" in str(caught.value)


def test_the_report_names_machine_and_pair(project, pair, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(project.root)
    monkeypatch.setattr(vllm_check, "MARGIN", 0.2)
    vllm = stand_in(pair)
    monkeypatch.setattr(vllm_check, "run_vllm", lambda python, job: vllm(job))
    write_prompts(tmp_path / "prompts.jsonl")
    out = tmp_path / "check.json"
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--num-prompts", "4"]
    arguments = ["--pair", PINNED, *options, "--num-tokens", "24", "--out", str(out)]
    assert vllm_check.main(arguments) == 0
    report, text = json.loads(out.read_text()), capsys.readouterr().out
    assert report["device"]["name"]
    assert report["num_prompts"] == 4
    assert report["pair"]["draft"] == pair.draft.manifest.digest
    assert str(tmp_path) not in out.read_text()
    assert "draft_model in float32: the engines agree" in text
    assert "4 of 4 answers are ours" in text


def test_without_vllm_the_program_says_how_to_get_it(project, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(project.root)
    write_prompts(tmp_path / "prompts.jsonl")
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--python", "nowhere/python"]
    assert vllm_check.main(["--pair", PINNED, *options]) == 2
    assert "make vllm-check" in capsys.readouterr().err
