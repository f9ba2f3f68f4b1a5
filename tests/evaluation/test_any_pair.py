from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.corpus.prompts import user_prompt
from draftsmith.errors import CorpusError, DraftError, DraftMisfitError
from draftsmith.evaluation import any_pair
from draftsmith.evaluation.acceptance import decode
from draftsmith.evaluation.any_pair import (
    CONFIG,
    EVAL_FRACTION,
    fitted,
    load_any_draft,
    measure,
    prompts_of,
    verdict,
)
from draftsmith.evaluation.benchmark import PairBench
from tests.tiny_target import conversations, make_tokenizer, save, write_prompts

CONF = Path(__file__).resolve().parents[2] / "conf"
SMALL = dataclasses.replace(
    CONFIG,
    max_draft_length=2,
    calibration_prompts=2,
    calibration_tokens=4,
    prompts=3,
    max_new_tokens=6,
    assisted_lengths=(1,),
    batch_sizes=(1,),
    batch_tokens=4,
    repeats=2,
)


@pytest.fixture(scope="module")
def asked():
    return [user_prompt(text, domain) for domain, text, _ in conversations("home")[:40:6]]


def checkpoint_with(folder, *, vocab_size=None, extra_token=None):
    """A random checkpoint; by default with the target's tokenizer and vocabulary."""
    tokenizer = make_tokenizer()
    if extra_token:
        tokenizer.add_tokens([extra_token])
    config = LlamaConfig(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    save(LlamaForCausalLM(config).eval(), tokenizer, folder)
    return folder


def test_a_checkpoint_that_drafts_for_itself_is_always_accepted(loaded, checkpoint, asked):
    draft = load_any_draft(loaded, checkpoint)
    entry = measure(loaded, draft, asked, SMALL)
    assert entry["family"] == "causal-lm"
    assert entry["draft_digest"] == loaded.identity.digest
    assert entry["alpha"]["mean"] == 1
    assert entry["survival"] == [1.0, 1.0]
    assert entry["verdict"] in ("pays", "does not pay", "unclear")


def test_a_small_model_of_another_width_is_measured_as_a_draft(loaded, asked, tmp_path):
    draft = load_any_draft(loaded, checkpoint_with(tmp_path / "other"))
    entry = measure(loaded, draft, asked, SMALL)
    assert entry["recipe"] == "other"
    assert 0 <= entry["alpha"]["mean"] < 0.5
    assert 1 <= entry["block_efficiency"]["mean"] < 2


def test_a_draft_of_ours_is_loaded_whatever_target_it_was_distilled_from(loaded, save_student):
    folder = save_student("reused", (0,), target_digest="0" * 64)
    assert load_any_draft(loaded, folder).manifest.family == "student"


def test_another_tokenizer_is_refused(loaded, tmp_path):
    with pytest.raises(DraftError, match="tokenizer"):
        load_any_draft(loaded, checkpoint_with(tmp_path / "other", extra_token="zebra"))


def test_other_output_rows_are_refused(loaded, tmp_path):
    rows = len(loaded.model.get_output_embeddings().weight)
    with pytest.raises(DraftMisfitError, match=f"{rows + 8} output rows"):
        load_any_draft(loaded, checkpoint_with(tmp_path / "other", vocab_size=rows + 8))


def test_a_damaged_draft_is_refused(loaded, save_student, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(save_student("sound", (0,)), folder)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(DraftError, match="reading"):
        load_any_draft(loaded, folder)


class Stopped(Exception):
    """What ends a measurement where its bench would begin."""


@pytest.mark.parametrize(("num_asked", "num_confirming"), [(7, 3), (4, 2)])
def test_what_acceptance_and_guesses_are_counted_on_confirms_nothing(  # noqa: PLR0917
    loaded, checkpoint, asked, monkeypatch, num_asked, num_confirming
):
    """Twice as many as calibrate; of four prompts in all the last two must confirm."""
    counted, confirming = [], []

    def noted(target, draft, prompts, **options):
        counted.extend(ids for _, ids in prompts)
        return decode(target, draft, prompts, **options)

    def stop(bench, *_):
        confirming.extend(bench._confirmation_prompts)
        raise Stopped

    monkeypatch.setattr(any_pair, "decode", noted)
    monkeypatch.setattr(PairBench, "run", stop)
    with pytest.raises(Stopped):
        measure(loaded, load_any_draft(loaded, checkpoint), asked[:num_asked], SMALL)
    assert len(confirming) == num_confirming
    assert len(counted) == 2 * 4  # for acceptance, and for guesses
    if num_asked > 4:
        assert not [ids for ids in confirming if ids in counted]


def test_without_prompts_nothing_is_measured(loaded, checkpoint):
    with pytest.raises(CorpusError, match="no prompts"):
        measure(loaded, load_any_draft(loaded, checkpoint), [], SMALL)


def test_the_default_prompts_are_those_that_training_leaves_out():
    held_out = yaml.safe_load((CONF / "corpus/default.yaml").read_text())["eval_fraction"]
    assert held_out == EVAL_FRACTION
    prompts = prompts_of(None)
    assert len(prompts) >= 200
    assert len({prompt.domain for prompt in prompts}) == 6


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(1.1, 1.4, "pays"), (0.6, 0.9, "does not pay"), (0.9, 1.1, "unclear"), (1.0, 1.2, "unclear")],
)
def test_the_verdict_follows_the_interval_of_the_speedup(low, high, word):
    found = verdict(entry_with({"mean": (low + high) / 2, "low": low, "high": high}))
    assert found["verdict"] == word
    assert f"{low:.2f} to {high:.2f}" in found["reasons"][0]


def test_a_faster_prompt_lookup_is_said():
    lookup = {"mean": 0.8, "low": 0.7, "high": 0.9}
    speedup = {"mean": 1.2, "low": 1.1, "high": 1.3}
    assert "Prompt lookup" in verdict(entry_with(speedup, lookup))["reasons"][1]
    assert len(verdict(entry_with(speedup))["reasons"]) == 1


def entry_with(speedup, lookup=None):
    lookup = lookup or {"mean": 1.1, "low": 1.0, "high": 1.2}
    ratios = {"speculative_vs_prompt_lookup": lookup}
    return {"speedup": speedup, "draft_length": 2, "ratios": ratios}


def test_a_larger_budget_buys_prompts_within_bounds():
    counts = [fitted(CONFIG, seconds=s, unit=1.0).prompts for s in (1, 60, 180, 400, 1e6)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (4, 64)
    assert counts[1] < counts[2] < counts[3]
    assert fitted(CONFIG, seconds=180, unit=0.1).prompts == 64


class TestCommand:
    @pytest.fixture
    def command(self, checkpoint, draft_folders, tmp_path):
        write_prompts(tmp_path / "prompts.jsonl")
        return [
            *("measure", "--target", str(checkpoint), "--draft", str(draft_folders["trimmed"])),
            *("--prompts", str(tmp_path / "prompts.jsonl")),
        ]

    def test_it_shows_figures_and_verdict_and_the_same_as_json(self, command):
        done = CliRunner().invoke(app, [*command, "--budget", "1s"])
        assert done.exit_code == 0, done.output
        for words in ("alpha", "tau", "speedup", "prompt lookup", "in the same engine"):
            assert words in done.stdout
        done = CliRunner().invoke(app, [*command, "--budget", "1s", "--json"])
        entry = json.loads(done.stdout)
        assert entry["recipe"] == "trimmed"
        assert entry["speedup"]["num_prompts"] == 4

    @pytest.mark.parametrize("budget", ["", "3", "m", "-1m", "nan s", "2d"])
    def test_a_budget_that_is_no_time_is_one_message(self, command, budget):
        done = CliRunner().invoke(app, [*command, "--budget", budget])
        assert done.exit_code == 2
        assert done.stdout == ""
        assert "--budget" in done.stderr

    def test_a_missing_draft_is_one_message(self, command):
        command[command.index("--draft") + 1] = "nowhere"
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert "nowhere" in done.stderr
