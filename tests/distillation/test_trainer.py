from __future__ import annotations

import os
import shutil
import threading
import time
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.distillation import checkpoints
from draftsmith.distillation.batches import TrainingSequence
from draftsmith.distillation.signals import CachedSignals, OnlineSignals, Signal
from draftsmith.distillation.trainer import learning_rate_factor
from draftsmith.errors import ArtifactError, CorpusError
from tests.distillation.small_training import (
    are_equal,
    make_config,
    make_student,
    some_sequences,
    train,
    weights_of,
)
from tests.drafts.small_models import KINDS, make_target
from tests.full_disk import files_up_to


class Killed(Exception):
    """Ends a run from inside, as a signal would."""


def kill_after(step, seen):
    """A callback that notes every step and ends the run behind one of them."""

    def on_step(number, _metrics):
        seen.append(number)
        if number == step:
            raise Killed

    return on_step


def until_there(path):
    """Wait for what another thread writes."""
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(path)


def without_clock(history):
    measured = ("tokens_per_s", "memory_gb")
    return [{k: v for k, v in entry.items() if k not in measured} for entry in history]


# The schedules


def factors(**changes):
    config = make_config(**({"steps": 100, "warmup_steps": 10} | changes))
    return [learning_rate_factor(step, config) for step in range(config.steps)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_schedule_warms_up_linearly_and_never_leaves_its_range(schedule):
    values = factors(schedule=schedule)
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert all(0 < value <= 1 for value in values)
    assert values[10:] == sorted(values[10:], reverse=True)
    assert values[-1] < 0.06


def test_cosine_is_halfway_down_halfway_through():
    values = factors(schedule="cosine")
    assert values[10] == 1.0
    assert values[55] == pytest.approx(0.5)


def test_wsd_is_stable_until_the_last_fifth():
    values = factors(schedule="wsd")
    assert values[10:83] == pytest.approx([1.0] * 73)
    assert values[91] == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_schedule_may_be_all_warm_up_or_none(schedule):
    assert factors(schedule=schedule, warmup_steps=0)[0] == 1.0
    assert factors(schedule=schedule, warmup_steps=100)[-1] == 1.0


# What is trained


def test_loss_falls_and_alpha_rises(target, tmp_path):
    _, outcome = train(target, tmp_path, steps=40)
    first, last = outcome.history[0], outcome.history[-1]
    assert last["loss"] < first["loss"] / 3
    assert last["alpha"] > first["alpha"] + 0.05


@pytest.mark.parametrize(
    "loss", ["forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "acceptance"]
)
def test_every_loss_falls_and_raises_alpha(loss, target, tmp_path):
    _, outcome = train(target, tmp_path, steps=40, loss=loss)
    first, last = outcome.history[0], outcome.history[-1]
    assert last["loss"] < first["loss"] - 0.05
    assert last["alpha"] > first["alpha"] + 0.05


def test_eight_sequences_are_learned_by_heart(target, tmp_path):
    _, outcome = train(
        target, tmp_path, sequences=some_sequences(8), steps=250, batch_size=8, log_steps=250
    )
    assert outcome.history[-1]["alpha"] > 0.9


def test_a_student_of_all_layers_starts_at_alpha_one(target, tmp_path):
    student = make_student(target, (0, 1, 2))
    _, outcome = train(target, tmp_path, student=student, steps=1)
    assert outcome.history[0]["alpha"] == pytest.approx(1.0, abs=1e-5)
    assert outcome.history[0]["loss"] == pytest.approx(0.0, abs=1e-5)


def test_a_trimmed_student_can_at_best_cover_its_vocabulary(target, tmp_path):
    token_ids = torch.arange(0, 48, 2)
    student = make_student(target, (0, 1, 2), token_ids)
    _, outcome = train(target, tmp_path, student=student, steps=1, batch_size=6)
    sequences = some_sequences()
    masses = []
    for sequence in sequences:
        with torch.no_grad():
            logits = target(input_ids=torch.tensor([sequence.token_ids])).logits[0]
        masses.append(logits[sequence.start : -1].softmax(-1)[:, token_ids].sum(-1))
    assert outcome.history[0]["alpha"] == pytest.approx(float(torch.cat(masses).mean()), abs=1e-5)


def test_embedding_head_and_target_stay_as_they_are(target, tmp_path):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    student = make_student(target)
    start = weights_of(student)
    train(target, tmp_path, student=student)
    assert are_equal(before, target.state_dict())
    changed = {n for n, p in student.named_parameters() if not torch.equal(p, start[n])}
    assert changed == {n for n, p in student.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixed_precision", ["bf16", "no"])
def test_a_bfloat16_target_trains_in_either_precision(kind, mixed_precision, tmp_path):
    target = make_target(kind, dtype=torch.bfloat16)
    student, outcome = train(target, tmp_path, steps=12, mixed_precision=mixed_precision)
    assert outcome.history[-1]["loss"] < outcome.history[0]["loss"]
    trained = {p.dtype for p in student.parameters() if p.requires_grad}
    assert trained == {torch.float32}


def test_cached_signals_train_the_same_student(target, tmp_path):
    sequences = some_sequences()
    signals = CachedSignals(tmp_path / "signals", target, sequences, max_gb=1.0)
    online, _ = train(target, tmp_path / "a", sequences=sequences)
    cached, _ = train(target, tmp_path / "b", sequences=sequences, signals=signals)
    ours, theirs = weights_of(cached), weights_of(online)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=1e-4)


# Repetition and resuming


def test_the_same_seed_gives_the_same_student_bit_for_bit(target, tmp_path):
    first, one = train(target, tmp_path / "a")
    second, two = train(target, tmp_path / "b")
    assert are_equal(weights_of(first), weights_of(second))
    assert without_clock(one.history) == without_clock(two.history)
    other, _ = train(target, tmp_path / "c", seed=1)
    assert not are_equal(weights_of(first), weights_of(other))


def test_dropout_of_the_target_plays_no_part(tmp_path):
    target = make_target("gpt2")
    assert target.config.resid_pdrop > 0
    first, _ = train(target, tmp_path / "a")
    torch.manual_seed(123)
    second, _ = train(target, tmp_path / "b")
    assert are_equal(weights_of(first), weights_of(second))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_killed_run_ends_like_an_unbroken_one(kind, tied, accumulation, tmp_path):
    target = make_target(kind, tied=tied)
    options = {"checkpoint_steps": 4, "gradient_accumulation": accumulation}
    whole, expected = train(target, tmp_path / "whole", **options)
    seen = []
    with pytest.raises(Killed):
        train(target, tmp_path / "run", on_step=kill_after(5, seen), **options)
    assert seen == [0, 1, 2, 3, 4, 5]
    seen.clear()
    resumed, outcome = train(
        target, tmp_path / "run", on_step=lambda step, _metrics: seen.append(step), **options
    )
    assert seen == [4, 5, 6, 7, 8, 9]
    assert outcome.resumed_at == 4
    assert expected.resumed_at == 0
    assert are_equal(weights_of(resumed), weights_of(whole))
    assert without_clock(outcome.history) == without_clock(expected.history)


def test_a_run_may_be_killed_again_and_again(target, tmp_path):
    whole, _ = train(target, tmp_path / "whole", checkpoint_steps=2)
    for step in (2, 4, 5, 8):
        with pytest.raises(Killed):
            train(target, tmp_path / "run", on_step=kill_after(step, []), checkpoint_steps=2)
    resumed, outcome = train(target, tmp_path / "run", checkpoint_steps=2)
    assert outcome.resumed_at == 8
    assert are_equal(weights_of(resumed), weights_of(whole))


def test_a_run_killed_before_its_first_checkpoint_starts_anew(target, tmp_path):
    with pytest.raises(Killed):
        train(target, tmp_path, on_step=kill_after(2, []))
    _, outcome = train(target, tmp_path)
    assert outcome.resumed_at == 0


def test_a_half_written_checkpoint_does_not_count(target, tmp_path):
    whole, _ = train(target, tmp_path / "whole")
    with pytest.raises(Killed):
        train(target, tmp_path / "run", on_step=kill_after(5, []))
    (tmp_path / "run" / "step-00000004").rename(tmp_path / "run" / ".unfinished-00000008")
    resumed, outcome = train(target, tmp_path / "run")
    assert outcome.resumed_at == 0
    assert are_equal(weights_of(resumed), weights_of(whole))


def test_a_checkpoint_of_an_older_version_does_not_count_and_goes(target, tmp_path):
    old = tmp_path / "step-00000099"
    old.mkdir()
    (old / "model.safetensors").write_bytes(b"")
    _, outcome = train(target, tmp_path)
    assert outcome.resumed_at == 0
    assert not old.exists()


def cut(path):
    """What a power cut may leave of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", ["state.safetensors", "history.json", "best.safetensors"])
@pytest.mark.parametrize(("beside", "resumed_at"), [(True, 4), (False, 0)])
def test_a_checkpoint_that_cannot_be_read_does_not_count(
    name, beside, resumed_at, target, tmp_path, caplog
):
    options = {"held_out": (0,), "early_stop_patience": 9}
    whole, expected = train(target, tmp_path / "whole", **options)
    older, newer = (tmp_path / "run" / f"step-{step:08d}" for step in (4, 8))

    def keep(step, _metrics):
        if step == 6 and beside:
            until_there(older)
            shutil.copytree(older, tmp_path / "kept")
        if step == 8:
            raise Killed

    with pytest.raises(Killed):
        train(target, tmp_path / "run", on_step=keep, **options)
    if beside:
        (tmp_path / "kept").rename(older)
    cut(newer / name)
    resumed, outcome = train(target, tmp_path / "run", **options)
    assert str(newer) in caplog.text
    assert outcome.resumed_at == resumed_at
    assert are_equal(weights_of(resumed), weights_of(whole))
    assert without_clock(outcome.history) == without_clock(expected.history)
    assert outcome.evaluations == expected.evaluations


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(target, tmp_path, monkeypatch):
    final, synced = tmp_path / "step-00000008", set()

    def fsync(descriptor):
        if not final.exists():
            synced.add(os.fstat(descriptor).st_ino)
        really(descriptor)

    really = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    train(target, tmp_path, held_out=(0,), early_stop_patience=9)
    files = [path.name for path in final.iterdir()]
    assert {"state.safetensors", "best.safetensors"} < set(files)
    assert {path.stat().st_ino for path in final.iterdir()} <= synced


def test_a_checkpoint_without_room_ends_the_run_and_the_one_before_stays(target, tmp_path):
    whole, _ = train(target, tmp_path / "whole")
    room = (tmp_path / "whole" / "step-00000008" / "state.safetensors").stat().st_size - 1
    disk = ExitStack()

    def fill_the_disk(step, _metrics):
        if step == 5:
            until_there(tmp_path / "run" / "step-00000004")
            disk.enter_context(files_up_to(room))

    with pytest.raises(ArtifactError, match="free disk space"), disk:
        train(target, tmp_path / "run", on_step=fill_the_disk)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000004"]
    resumed, outcome = train(target, tmp_path / "run")
    assert outcome.resumed_at == 4
    assert are_equal(weights_of(resumed), weights_of(whole))


def test_training_goes_on_while_a_checkpoint_is_written(target, tmp_path, monkeypatch):
    """And what is written is the state at its step, not the one that it has meanwhile."""
    whole, _ = train(target, tmp_path / "whole")
    may_write, seen = threading.Event(), []

    def slowly(tensors, path):
        assert may_write.wait(60)
        save_file(tensors, path)

    def on_step(step, _metrics):
        seen.append(step)
        if step == 6:
            assert not (tmp_path / "run" / "step-00000004").exists()
            may_write.set()
            until_there(tmp_path / "run" / "step-00000004")
            raise Killed

    monkeypatch.setattr(checkpoints, "save_file", slowly)
    with pytest.raises(Killed):
        train(target, tmp_path / "run", on_step=on_step)
    assert seen == list(range(7))
    resumed, outcome = train(target, tmp_path / "run")
    assert outcome.resumed_at == 4
    assert are_equal(weights_of(resumed), weights_of(whole))


def test_the_last_checkpoint_is_waited_for_and_its_failure_raised(target, tmp_path, monkeypatch):
    def refuse(_tensors, _path):
        raise RuntimeError("the writer broke")

    monkeypatch.setattr(checkpoints, "save_file", refuse)
    with pytest.raises(RuntimeError, match="the writer broke"):
        train(target, tmp_path, steps=9, checkpoint_steps=8)
    assert not list(tmp_path.iterdir())


def test_only_the_newest_checkpoint_is_kept(target, tmp_path):
    train(target, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000008"]


# Batches cut into parts


@pytest.mark.parametrize("count", [8, 6, 5])
def test_accumulation_gives_the_student_of_whole_batches(count, target, tmp_path):
    """Also where the last batch of an epoch has fewer parts, or parts of unequal size."""
    sequences = some_sequences(count)
    plain, one = train(target, tmp_path / "a", sequences=sequences)
    parts, two = train(target, tmp_path / "b", sequences=sequences, gradient_accumulation=2)
    ours, theirs = weights_of(parts), weights_of(plain)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-4, rtol=1e-3)
    losses = [[entry["loss"] for entry in outcome.history] for outcome in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


# Records and errors


def test_history_has_a_line_every_so_many_steps_and_the_last_one(target, tmp_path):
    calls = []
    _, outcome = train(target, tmp_path, log_steps=4, on_step=lambda *call: calls.append(call))
    assert [entry["step"] for entry in outcome.history] == [4.0, 8.0, 10.0]
    assert [step for step, _ in calls] == list(range(10))
    assert outcome.history[0]["loss"] == calls[3][1]["loss"]
    assert all(metrics["tokens_per_s"] > 0 < metrics["memory_gb"] for _, metrics in calls)


def test_the_outcome_counts_response_tokens(target, tmp_path):
    _, outcome = train(target, tmp_path, steps=1)
    # Six prompts of 4 tokens, responses of 5 to 10.
    assert outcome.num_tokens == 45
    assert outcome.mask_coverage == pytest.approx(45 / 69)


def test_training_on_prompts_only_is_an_error(target, tmp_path):
    prompts = [TrainingSequence([1, 2, 3], 2)] * 4
    with pytest.raises(CorpusError, match=r"step 0(.|\n)*no response position"):
        train(target, tmp_path, sequences=prompts)


def test_a_loss_that_is_not_finite_ends_the_run(target, tmp_path):
    class Broken(OnlineSignals):
        def signal(self, batch):
            good = super().signal(batch)
            return Signal(good.hidden * torch.nan, good.log_normaliser)

    with pytest.raises(CorpusError, match=r"step 0(.|\n)*nan"):
        train(target, tmp_path, signals=Broken(target))
    assert not list(tmp_path.glob("step-*"))
