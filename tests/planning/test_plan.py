"""The whole plan: disk against real files, verdicts, hours."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from accelerate.state import AcceleratorState

from draftsmith.distillation.building import build_draft, in_float32, objective_of
from draftsmith.distillation.signals import CachedSignals, OnlineSignals
from draftsmith.distillation.topk_signals import TopKSignals
from draftsmith.distillation.trainer import distill
from draftsmith.planning.corpus import CorpusSize
from draftsmith.planning.job import Machine, Rates
from draftsmith.planning.plan import plan
from draftsmith.report.planned import plan_tables, verdict_lines
from tests.distillation.small_training import some_sequences
from tests.drafts.small_models import make_target
from tests.planning.small_plans import RECIPES, make_job

ALL = {name: RECIPES[name] for name in ("student", "eagle", "medusa")}
NO_RATES = Rates()


@pytest.fixture(autouse=True)
def fresh_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)


def size_of(sequences):
    """The corpus that these sequences are."""
    responses = sum(sequence.num_predicted for sequence in sequences)
    prompts = sum(sequence.start + 1 for sequence in sequences)
    return CorpusSize("data/corpus", len(sequences), responses, prompts, 0, responses, 4, 12)


def entry_of(report, name):
    return report["recipes"][name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_signal_cache_has_the_size_of_its_files(config_of, tmp_path, dtype):
    sequences = some_sequences(7)
    job = make_job(config_of(), corpus=size_of(sequences), dtype=dtype, signal="cache")
    report = plan(job, ALL, NO_RATES)
    target = make_target(dtype=getattr(torch, dtype))
    for name, layers in {"student": (), "eagle": (1, 2, 2)}.items():
        folder = tmp_path / name
        CachedSignals(folder, target, sequences, max_gb=1, feature_layers=layers)
        files = sum(path.stat().st_size for path in folder.glob("*.bin"))
        assert entry_of(report, name)["signal_cache"]["total_bytes"] == files
    assert report["disk"]["signal_cache"] == files  # the largest: with features
    TopKSignals(tmp_path / "topk", target, sequences, token_ids=None, k=8, max_gb=1)
    top = sum(path.stat().st_size for path in (tmp_path / "topk").glob("*.bin"))
    assert entry_of(report, "student")["signal_cache"]["by_signal"]["topk"] == top
    assert "topk" not in entry_of(report, "eagle")["signal_cache"]["by_signal"]


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("patience", [0, 9])
def test_a_checkpoint_has_the_size_of_its_files(config_of, tmp_path, name, patience):
    wide = {"hidden_size": 128}
    options = {"early_stop_patience": patience, "early_stop_steps": 1}
    job = make_job(config_of(**wide), steps=3, checkpoint_steps=2, **options)
    target, recipe = make_target(**wide), ALL[name]
    ids = torch.arange(recipe.vocabulary_size)
    layers = {"student": (0, 2), "eagle": (1, 2, 2), "medusa": ()}[name]
    draft = build_draft(recipe, target, layers, ids)
    in_float32(draft)
    checkpoints = tmp_path / "checkpoints"

    distill(
        objective_of(recipe, job.config, draft, target, ids),
        some_sequences(),
        OnlineSignals(target, layers if name == "eagle" else ()),
        config=job.config,
        checkpoints=checkpoints,
        held_out=(1,) if patience else (),
    )
    found = (checkpoints / "step-00000002").glob("*.safetensors")
    sizes = {path.name: path.stat().st_size for path in found}
    report = plan(job, {name: recipe}, NO_RATES)
    planned = {"state.safetensors": entry_of(report, name)["sizes"]["checkpoint"]}
    if patience:
        planned["best.safetensors"] = entry_of(report, name)["sizes"]["trained"]
    assert sizes == {file: pytest.approx(size, rel=0.1) for file, size in planned.items()}
    # One is written before the last step.
    assert report["disk"]["checkpoints"] == sum(planned.values())


def test_two_checkpoints_are_there_while_one_replaces_the_other(config_of):
    for steps, count in ((4, 0), (5, 1), (9, 2), (100, 2)):
        report = plan(make_job(config_of(), steps=steps), ALL, NO_RATES)
        largest = max(entry_of(report, name)["sizes"]["checkpoint"] for name in ALL)
        assert report["disk"]["checkpoints"] == count * largest


def test_parts_of_the_memory_add_up(config_of):
    report = plan(make_job(config_of(), machine=Machine("cuda", processes=2)), ALL, NO_RATES)
    for name in ALL:
        for phase in entry_of(report, name)["memory"].values():
            assert phase["total"] == sum(size for part, size in phase.items() if part != "total")
        training = entry_of(report, name)["memory"]["training"]
        assert training["gradient_buckets"] == training["gradients"] > 0


def test_shards_divide_layers_in_a_training_and_all_of_a_target_in_decoding(config_of):
    whole, half = (
        plan(make_job(config_of(), machine=Machine("cuda", shards=shards)), ALL, NO_RATES)
        for shards in (1, 2)
    )
    target = make_target()
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in target.model.layers]
    outside = sum(p.nbytes for p in target.parameters()) - sum(layers)
    for name in ALL:
        one, two = (entry_of(report, name)["memory"] for report in (whole, half))
        for phase in ("training", "signals"):
            assert two[phase]["target_weights"] == outside + sum(layers) // 2
            assert one[phase]["activations"] == two[phase]["activations"]
        assert one["signals"]["gathered_layers"] == 0
        assert two["signals"]["gathered_layers"] == 2 * max(layers)
        for part in ("target_weights", "target_cache"):
            assert two["decoding"][part] == -(-one["decoding"][part] // 2)
        assert one["decoding"]["draft_cache"] == two["decoding"]["draft_cache"]


def test_a_divided_target_is_planned_with_the_only_signal_that_it_can_have(config_of):
    machine = Machine("cuda", shards=2, processes=2)
    cached, online = (
        plan(make_job(config_of(), machine=machine, signal=signal), ALL, NO_RATES)
        for signal in ("cache", "online")
    )
    for name in ALL:
        assert entry_of(cached, name)["memory"] == entry_of(online, name)["memory"]
        assert entry_of(online, name)["signal_cache"]["fits"]
        assert entry_of(cached, name)["signal_cache"]["remedies"] == ["distill.signal: online"]
    lines = list(verdict_lines({**cached, "source": "small"}))
    assert "student, signal cache: cannot be made; would: distill.signal: online" in lines
    assert cached["disk"]["signal_cache"] == 0


def test_where_nothing_is_said_of_the_memory_there_is_no_verdict(config_of):
    report = plan(make_job(config_of()), ALL, NO_RATES)
    for name in ALL:
        for verdict in entry_of(report, name)["verdicts"].values():
            assert verdict["fits"] is None
            assert verdict["total_bytes"] > 0


def remedied(job, remedy):
    """The job with a remedy's settings."""
    text = remedy.split(" (")[0]
    machine, config = job.machine, job.config
    for part in text.replace(" and ", " with ").split(" with "):
        name, value = part.removeprefix("--").removeprefix("distill.").replace(":", "").split()
        if name == "shards":
            machine = dataclasses.replace(machine, shards=int(value), processes=int(value))
        elif name == "batch-size":
            cache = dataclasses.replace(job.cache, rows=int(value))
            job = dataclasses.replace(job, cache=cache)
        else:
            changed = {name: value == "true" if value == "true" else int(value)}
            config = dataclasses.replace(config, **changed)
    return dataclasses.replace(job, machine=machine, config=config)


@pytest.mark.parametrize("what", ["training", "decoding"])
@pytest.mark.parametrize("share", [0.97, 0.8, 0.65])
def test_what_would_make_it_fit_makes_it_fit(config_of, what, share):
    job = make_job(config_of(num_layers=3, vocab_size=300), batch_size=8)
    job = dataclasses.replace(job, cache=dataclasses.replace(job.cache, rows=6))
    recipe = {"student": RECIPES["student"]}
    needed = entry_of(plan(job, recipe, NO_RATES), "student")["verdicts"][what]["total_bytes"]
    small = Machine("cpu", memory=int(share * needed))
    job = dataclasses.replace(job, machine=small)
    verdict = entry_of(plan(job, recipe, NO_RATES), "student")["verdicts"][what]
    assert verdict["fits"] is False
    assert verdict["remedies"]
    for remedy in verdict["remedies"]:
        again = entry_of(plan(remedied(job, remedy), recipe, NO_RATES), "student")
        assert again["verdicts"][what]["fits"], remedy


def test_a_memory_that_is_enough_fits(config_of):
    machine = Machine("cpu", memory=10**9)
    report = plan(make_job(config_of(), machine=machine), ALL, NO_RATES)
    for name in ALL:
        for verdict in entry_of(report, name)["verdicts"].values():
            assert verdict["fits"]
            assert verdict["remedies"] == []


def test_too_large_a_signal_cache_says_which_signal_fits(config_of):
    job = make_job(config_of(hidden_size=64), signal="cache", topk=2, max_cache_gb=1e-5)
    report = plan(job, ALL, NO_RATES)
    assert entry_of(report, "student")["signal_cache"]["remedies"][:2] == [
        "distill.signal: online",
        "distill.signal: topk",
    ]
    eagle = entry_of(report, "eagle")["signal_cache"]
    assert eagle["fits"] is False
    assert "distill.signal: topk" not in eagle["remedies"]
    no_heads = plan(make_job(config_of(), signal="topk"), ALL, NO_RATES)
    assert entry_of(no_heads, "medusa")["signal_cache"]["fits"] is False


def test_hours_follow_from_rates_and_from_nothing_else(config_of):
    machine = Machine("cuda", shards=2, processes=3)
    job = make_job(config_of(), steps=10, warm_start_steps=5, machine=machine)
    nothing = plan(job, ALL, NO_RATES)["time"]
    assert nothing["rollout_tokens"] == 300
    assert nothing["training_tokens"] == 3 * 10 * 4 * 6
    assert nothing["warm_start_tokens"] == 3 * 5 * 4 * 6
    hours = ("rollout_hours", "training_hours", "warm_start_hours", "device_hours", "cost")
    assert [nothing[key] for key in hours] == [None] * 5
    half = plan(job, ALL, Rates(rollout_tokens_per_s=2.0, price_per_device_hour=3.0))["time"]
    assert half["rollout_hours"] == pytest.approx(300 / 2 / 3600)
    assert [half[key] for key in hours[1:]] == [None] * 4
    whole = plan(job, ALL, Rates(2.0, 4.0, 3.0))["time"]
    devices = (2 * 300 / 2 + 3 * 720 / 4) / 3600
    assert whole["warm_start_hours"] == pytest.approx(360 / 4 / 3600)
    assert whole["device_hours"] == pytest.approx(devices)
    assert whole["cost"] == pytest.approx(3 * devices)


def test_a_plan_is_plain_values_and_every_part_has_its_row(config_of):
    machine = Machine("cuda", memory=50_000)
    report = plan(make_job(config_of(), machine=machine), ALL, Rates(2.0, 4.0, 3.0))
    assert json.loads(json.dumps(report)) == report
    shown = {**report, "source": "models/small"}
    titles = [table.title for table in plan_tables(shown)]
    assert titles[0].startswith("models/small (llama")
    assert len(titles) == 3 + len(ALL)
    lines = list(verdict_lines(shown))
    assert len(lines) == 3 * len(ALL)
    assert any("does not fit" in line for line in lines)
