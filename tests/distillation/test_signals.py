from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from draftsmith.distillation.batches import collate
from draftsmith.distillation.signals import CachedSignals, OnlineSignals
from draftsmith.drafts.student import head_logits
from draftsmith.errors import ArtifactError, DraftError
from tests.distillation.small_training import some_sequences
from tests.drafts.small_models import make_target
from tests.full_disk import files_up_to

SPOT_CHECKS = 3


@pytest.fixture
def sequences():
    return some_sequences(7)


@pytest.fixture
def num_forwards(target):
    """A list that grows by one with every forward of the target."""
    calls = []
    target.base_model.register_forward_hook(lambda *_: calls.append(1))
    return calls


def cache(folder, target, sequences, max_gb=1.0):
    return CachedSignals(folder, target, sequences, max_gb=max_gb)


def test_logits_and_normaliser_give_the_targets_distribution(target, sequences):
    batch = collate(sequences, [5, 1])
    signal = OnlineSignals(target).signal(batch)
    log_p = head_logits(target, signal.hidden) - signal.log_normaliser[:, None]
    with torch.no_grad():
        expected = target(input_ids=batch.token_ids).logits[batch.mask].log_softmax(-1)
    torch.testing.assert_close(log_p, expected)
    assert signal.log_normaliser.dtype == torch.float32


def test_padding_changes_no_signal(target, sequences):
    alone = OnlineSignals(target).signal(collate(sequences, [0]))
    padded = OnlineSignals(target).signal(collate(sequences, [0, 6]))
    count = sequences[0].num_predicted
    torch.testing.assert_close(padded.hidden[:count], alone.hidden)
    torch.testing.assert_close(padded.log_normaliser[:count], alone.log_normaliser)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("indices", [[0], [6, 2], [3, 1, 5, 4]])
def test_cached_signals_are_the_online_ones(tmp_path, sequences, dtype, tolerance, indices):
    target = make_target("llama", dtype=dtype)
    batch = collate(sequences, indices)
    cached = cache(tmp_path, target, sequences).signal(batch)
    online = OnlineSignals(target).signal(batch)
    assert cached.hidden.dtype == dtype
    assert cached.hidden.shape == online.hidden.shape
    near = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(cached.hidden, online.hidden, **near)
    torch.testing.assert_close(cached.log_normaliser, online.log_normaliser, **near)


def test_the_cache_takes_the_room_it_plans(tmp_path, sequences):
    cache(tmp_path, make_target("llama", dtype=torch.bfloat16), sequences)
    positions = sum(sequence.num_predicted for sequence in sequences)
    assert (tmp_path / "hidden.bin").stat().st_size == positions * 32 * 2
    assert (tmp_path / "normaliser.bin").stat().st_size == positions * 4


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_too_large_a_cache_is_refused_with_its_numbers(tmp_path, sequences, dtype, width):
    target = make_target("llama", dtype=dtype)
    positions = sum(sequence.num_predicted for sequence in sequences)
    size_gb = positions * (32 * width + 4) / 1e9
    with pytest.raises(DraftError, match=f"{positions} positions") as caught:
        cache(tmp_path / "no", target, sequences, max_gb=size_gb * 0.99)
    assert "distill.max_cache_gb" in str(caught.value)
    assert not (tmp_path / "no").exists()
    cache(tmp_path / "yes", target, sequences, max_gb=size_gb * 1.01)


def test_a_finished_cache_is_found_again(tmp_path, target, sequences, num_forwards):
    first = cache(tmp_path, target, sequences)
    num_forwards.clear()
    second = cache(tmp_path, target, sequences)
    assert len(num_forwards) == SPOT_CHECKS
    batch = collate(sequences, [4, 2])
    assert torch.equal(second.signal(batch).hidden, first.signal(batch).hidden)


def test_an_unfinished_cache_is_filled_again(tmp_path, target, sequences):
    expected = cache(tmp_path, target, sequences).signal(collate(sequences, [1])).hidden.clone()
    (tmp_path / "finished.json").unlink()
    (tmp_path / "hidden.bin").write_bytes(b"\0" * 100)
    again = cache(tmp_path, target, sequences).signal(collate(sequences, [1])).hidden
    assert torch.equal(again, expected)


def test_a_cache_of_other_sequences_is_filled_again(tmp_path, target, sequences):
    cache(tmp_path, target, sequences[:4])
    batch = collate(sequences, [6])
    signal = cache(tmp_path, target, sequences).signal(batch)
    torch.testing.assert_close(signal.hidden, OnlineSignals(target).signal(batch).hidden)


def test_a_cache_with_a_file_cut_short_is_filled_again(tmp_path, target, sequences):
    expected = cache(tmp_path, target, sequences).signal(collate(sequences, [6])).hidden.clone()
    os.truncate(tmp_path / "hidden.bin", 512)
    again = cache(tmp_path, target, sequences).signal(collate(sequences, [6])).hidden
    assert torch.equal(again, expected)


def test_all_blocks_are_there_before_the_first_is_written(tmp_path, target, sequences):
    """A write to a hole in a mapped file would kill the process where the disk is full."""
    is_reserved = []

    def look(*_):
        status = (tmp_path / "hidden.bin").stat()
        is_reserved.append(status.st_blocks * 512 >= status.st_size)

    target.base_model.register_forward_hook(look)
    cache(tmp_path, target, sequences)
    assert is_reserved
    assert all(is_reserved)


def test_a_full_disk_is_an_error_before_the_target_is_asked(
    tmp_path, target, sequences, num_forwards
):
    with files_up_to(4096), pytest.raises(ArtifactError, match=r"signals: found File too large"):
        cache(tmp_path / "signals", target, sequences)
    assert not num_forwards
    assert list(tmp_path.iterdir()) == []


def overwrite(path, value):
    data = np.fromfile(path, np.float32)
    data[:] = value
    data.tofile(path)


@pytest.mark.parametrize("value", [0.0, 3.0, np.nan])
@pytest.mark.parametrize("name", ["hidden.bin", "normaliser.bin"])
def test_a_tampered_cache_is_noticed(tmp_path, target, sequences, name, value):
    cache(tmp_path, target, sequences)
    overwrite(tmp_path / name, value)
    with pytest.raises(DraftError, match="cached target signal of sequence 0"):
        cache(tmp_path, target, sequences)


def test_a_cache_of_another_target_is_noticed(tmp_path, target, sequences):
    cache(tmp_path, make_target("llama", seed=1), sequences)
    with pytest.raises(DraftError, match="build/partial/distill"):
        cache(tmp_path, target, sequences)


def test_the_marker_is_written_last(tmp_path, target, sequences):
    target.base_model.register_forward_hook(lambda *_: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        cache(tmp_path, target, sequences)
    assert not (tmp_path / "finished.json").exists()


def test_the_marker_says_what_is_there(tmp_path, target, sequences):
    cache(tmp_path, target, sequences)
    positions = sum(sequence.num_predicted for sequence in sequences)
    marker = json.loads((tmp_path / "finished.json").read_text())
    assert marker == {"positions": positions, "width": 32, "feature_layers": []}
