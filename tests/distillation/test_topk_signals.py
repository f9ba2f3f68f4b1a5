from __future__ import annotations

import numpy as np
import pytest
import torch

from draftsmith.distillation.batches import collate
from draftsmith.distillation.divergences import forward_kl, overlap, reverse_kl, total_variation
from draftsmith.distillation.signals import OnlineSignals
from draftsmith.distillation.topk_signals import TopKSignals
from draftsmith.errors import ArtifactError, DraftError
from tests.distillation.small_training import (
    are_equal,
    make_student,
    some_sequences,
    train,
    weights_of,
)
from tests.drafts.small_models import VOCAB_SIZE, make_target
from tests.full_disk import files_up_to

SPOT_CHECKS = 3
TRIMMED = torch.arange(0, VOCAB_SIZE, 2)


@pytest.fixture
def sequences():
    return some_sequences(7)


def cache(folder, target, sequences, *, token_ids=None, k=8, max_gb=1.0):
    return TopKSignals(folder, target, sequences, token_ids=token_ids, k=k, max_gb=max_gb)


def log_probs_of(model, batch):
    with torch.no_grad():
        return model(input_ids=batch.token_ids).logits[batch.mask].float().log_softmax(-1)


def both(signal, log_q):
    return signal.beside(log_q, slice(None))


@pytest.mark.parametrize("indices", [[0], [6, 2], [3, 1, 5, 4]])
def test_it_holds_the_largest_log_probabilities(tmp_path, target, sequences, indices):
    batch = collate(sequences, indices)
    signal = cache(tmp_path, target, sequences).signal(batch)
    expected = log_probs_of(target, batch).topk(8)
    torch.testing.assert_close(signal.log_probs, expected.values, atol=1e-5, rtol=1e-5)
    assert torch.equal(signal.rows, expected.indices)


@pytest.mark.parametrize("token_ids", [None, TRIMMED], ids=["whole", "trimmed"])
def test_the_entries_and_the_rest_are_distributions(tmp_path, target, sequences, token_ids):
    batch = collate(sequences, [5, 1])
    signal = cache(tmp_path, target, sequences, token_ids=token_ids).signal(batch)
    student = make_student(target, (0,), token_ids)
    log_p, log_q = both(signal, log_probs_of(student, batch))
    assert log_p.shape == log_q.shape == (int(batch.mask.sum()), 9)
    torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(len(log_q)))
    full = log_probs_of(target, batch).exp()
    largest = full.topk(8)
    torch.testing.assert_close(log_p[:, -1].exp(), 1 - largest.values.sum(-1))
    lost = 0 if token_ids is None else (largest.values * (largest.indices % 2)).sum(-1)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(len(log_p)) - lost)


@pytest.mark.parametrize("k", [1, 5, 20])
def test_merging_the_rest_bounds_divergence_and_alpha(tmp_path, target, sequences, k):
    batch = collate(sequences, [6, 0])
    log_q = log_probs_of(make_student(target, (0,)), batch)
    full = log_probs_of(target, batch), log_q
    merged = both(cache(tmp_path, target, sequences, k=k).signal(batch), log_q)
    for divergence in (forward_kl, reverse_kl, total_variation):
        assert (divergence(*merged) <= divergence(*full) + 1e-5).all()
        assert divergence(*merged).sum() > 0
    assert (overlap(*merged) >= overlap(*full) - 1e-5).all()


@pytest.mark.parametrize("token_ids", [None, TRIMMED], ids=["whole", "trimmed"])
def test_all_entries_are_the_whole_distribution(tmp_path, target, sequences, token_ids):
    batch = collate(sequences, [6, 0])
    log_q = log_probs_of(make_student(target, (0,), token_ids), batch)
    log_p = log_probs_of(target, batch)
    log_p = log_p if token_ids is None else log_p[:, token_ids]
    signal = cache(tmp_path, target, sequences, token_ids=token_ids, k=1000).signal(batch)
    for measure in (forward_kl, reverse_kl, overlap):
        torch.testing.assert_close(
            measure(*both(signal, log_q)), measure(log_p, log_q), atol=1e-3, rtol=1e-3
        )


def test_the_gradient_is_finite_where_the_draft_is_sure(tmp_path, target, sequences):
    batch = collate(sequences, [3])
    signal = cache(tmp_path, target, sequences).signal(batch)
    logits = torch.zeros(len(signal.rows), VOCAB_SIZE)
    logits[:, 0] = 60.0
    logits.requires_grad_()
    for divergence in (forward_kl, reverse_kl):
        (gradient,) = torch.autograd.grad(
            divergence(*both(signal, logits.log_softmax(-1))).sum(), logits
        )
        assert gradient.isfinite().all()


@pytest.mark.parametrize("token_ids", [None, TRIMMED], ids=["whole", "trimmed"])
def test_a_student_learns_from_it(target, sequences, tmp_path, token_ids):
    signals = cache(tmp_path / "s", target, sequences, token_ids=token_ids)
    options = {"sequences": sequences, "steps": 60}
    student = make_student(target, (0,), token_ids)
    train(target, tmp_path / "a", student=student, signals=signals, **options)
    before = make_student(target, (0,), token_ids)
    batch = collate(sequences, range(7))
    log_p = log_probs_of(target, batch)
    log_p = log_p if token_ids is None else log_p[:, token_ids]
    alphas = [overlap(log_p, log_probs_of(one, batch)).mean() for one in (before, student)]
    best = log_p.exp().sum(-1).mean()  # what the draft's vocabulary allows
    assert alphas[1] > alphas[0] + (best - alphas[0]) / 3


def test_all_entries_train_the_student_of_the_whole_distribution(target, sequences, tmp_path):
    signals = cache(tmp_path / "s", target, sequences, k=VOCAB_SIZE)
    options = {"sequences": sequences, "steps": 5}
    ours, _ = train(target, tmp_path / "a", signals=signals, **options)
    plain, _ = train(target, tmp_path / "b", signals=OnlineSignals(target), **options)
    ours, plain = weights_of(ours), weights_of(plain)
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], atol=1e-3, rtol=1e-3)
    assert not are_equal(plain, weights_of(make_student(target)))


# The files


def test_the_cache_takes_the_room_it_plans_and_is_refused_above_it(tmp_path, target, sequences):
    positions = sum(sequence.num_predicted for sequence in sequences)
    size_gb = positions * 8 * 8 / 1e9
    with pytest.raises(DraftError, match="distill.max_cache_gb") as refused:
        cache(tmp_path / "no", target, sequences, max_gb=size_gb * 0.99)
    assert f"{positions} positions" in str(refused.value)
    assert not (tmp_path / "no").exists()
    cache(tmp_path / "yes", target, sequences, max_gb=size_gb * 1.01)
    sizes = [(tmp_path / "yes" / name).stat().st_size for name in ("ids.bin", "log_probs.bin")]
    assert sum(sizes) == positions * 8 * 8


def test_a_full_disk_is_an_error_before_the_target_is_asked(tmp_path, target, sequences):
    target.base_model.register_forward_hook(lambda *_: pytest.fail("asked"))
    with files_up_to(64), pytest.raises(ArtifactError, match="signals"):
        cache(tmp_path / "signals", target, sequences)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_cache_serves_every_vocabulary(tmp_path, target, sequences):
    calls = []
    cache(tmp_path, target, sequences)
    target.base_model.register_forward_hook(lambda *_: calls.append(1))
    trimmed = cache(tmp_path, target, sequences, token_ids=TRIMMED)
    assert len(calls) == SPOT_CHECKS
    rows = trimmed.signal(collate(sequences, [4, 2])).rows
    assert set(rows.unique().tolist()) <= {-1, *range(len(TRIMMED))}
    assert (rows == -1).any()


def test_another_k_and_an_unfinished_cache_are_filled_again(tmp_path, target, sequences):
    batch = collate(sequences, [1])
    expected = cache(tmp_path, target, sequences).signal(batch).log_probs.clone()
    assert cache(tmp_path, target, sequences, k=5).signal(batch).log_probs.shape[1] == 5
    (tmp_path / "finished.json").unlink()
    assert torch.equal(cache(tmp_path, target, sequences).signal(batch).log_probs, expected)


@pytest.mark.parametrize("value", [-1, 999, 3])
def test_tampered_ids_are_noticed(tmp_path, target, sequences, value):
    overwrite(tmp_path, target, sequences, "ids.bin", np.int32, value)


@pytest.mark.parametrize("value", [0.0, -2.0, np.nan])
def test_tampered_log_probabilities_are_noticed(tmp_path, target, sequences, value):
    overwrite(tmp_path, target, sequences, "log_probs.bin", np.float32, value)


def overwrite(folder, target, sequences, name, dtype, value):
    cache(folder, target, sequences)
    data = np.fromfile(folder / name, dtype)
    data[:] = value
    data.tofile(folder / name)
    with pytest.raises(DraftError, match="cached target signal of sequence 0"):
        cache(folder, target, sequences)


def test_a_cache_of_another_target_is_noticed(tmp_path, target, sequences):
    cache(tmp_path, make_target("llama", seed=1), sequences)
    with pytest.raises(DraftError, match="build/partial/distill"):
        cache(tmp_path, target, sequences)
