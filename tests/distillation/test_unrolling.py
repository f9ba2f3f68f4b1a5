"""A head is trained as it will draft: unrolled runs equal the decoder's own chain."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from draftsmith.decoding import FeatureProposer
from draftsmith.decoding.batch import Batch, Row
from draftsmith.decoding.request import Request, SamplingParams
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.distillation.batches import TrainingSequence, collate
from draftsmith.distillation.divergences import forward_kl
from draftsmith.distillation.signals import CachedSignals, OnlineSignals
from draftsmith.distillation.trainer import distill
from draftsmith.distillation.unrolling import UnrolledObjective, visible_entries
from draftsmith.drafts.eagle_start import build_head
from draftsmith.drafts.student import head_logits
from draftsmith.errors import DraftError
from tests.distillation.small_training import are_equal, make_config, some_sequences, weights_of
from tests.drafts.small_models import make_target

LAYERS = (1, 2, 2)
CPU = torch.device("cpu")


def make_objective(target, *, unroll=3, token_ids=None, step_decay=0.8):
    head = build_head(target, LAYERS, token_ids)
    for parameter in head.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()

    def target_head(hidden):
        return head_logits(head, hidden)

    return UnrolledObjective(head, target_head, forward_kl, unroll=unroll, step_decay=step_decay)


def train(target, folder, *, sequences=None, signals=None, on_step=None, objective=None, **changes):
    objective = make_objective(target) if objective is None else objective
    outcome = distill(
        objective,
        some_sequences() if sequences is None else sequences,
        OnlineSignals(target, LAYERS) if signals is None else signals,
        config=make_config(**changes),
        checkpoints=folder,
        on_step=on_step or (lambda _step, _metrics: None),
    )
    return objective.head, outcome


# ----------------------------------------------------------------------------------------- the mask


def test_an_entry_sees_what_its_round_would():
    visible = visible_entries(4, 3, None)
    assert [place for place, seen in enumerate(visible[3].tolist()) if seen] == [
        0,
        1,  # true features
        4 + 2,  # run 2
        8 + 3,  # itself
    ]


def test_the_first_run_is_causal():
    assert torch.equal(visible_entries(5, 1, None), torch.ones(5, 5).tril().bool())


def test_a_window_holds_over_all_runs():
    (seen,) = visible_entries(6, 2, 3)[5:].tolist()
    assert [place for place, is_seen in enumerate(seen) if is_seen] == [3, 4, 6 + 5]


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_every_entry_sees_something(step):
    assert visible_entries(5, step, 2).any(1).all()


# ----------------------------------------------------------------------------- training as decoding


@pytest.mark.parametrize("kind", ["llama", "gemma3"])  # gemma3's last layer has a window of 4
@pytest.mark.parametrize("start", [3, 5, 9])
def test_an_unrolled_run_gives_what_the_decoder_drafts(kind, start):
    """A round behind `start` committed tokens drafts the runs' logits on its own diagonal."""
    target = make_target(kind)
    objective = make_objective(target, unroll=4)
    sequence = some_sequences(6)[5]
    text = sequence.token_ids
    head, signals = objective.head, OnlineSignals(target, LAYERS)
    with torch.no_grad():
        fused = head.fuse(signals.signal(collate([sequence], [0])).features)
        runs = list(objective.unrolled(torch.tensor([text[1:]]), fused))
        slots = SlotModel(copy.deepcopy(head))
        slots.reserve(rows=1, slots=32)
        entry = start - 2  # the last one whose feature the target has made
        tokens, features = torch.tensor([text[1 : entry + 2]]), fused[:, : entry + 1]
        places = torch.arange(entry + 1)[None]
        for depth, run in enumerate(runs):
            output = slots.run(tokens, places, span=32, keep=1, features=features)
            expected = head.logits(run[:, entry + depth])
            torch.testing.assert_close(output.logits[:, -1], expected, atol=1e-4, rtol=1e-4)
            # The draft is right: the next entry holds the text's own token.
            tokens = torch.tensor([[text[entry + depth + 2]]])
            places, features = places[:, -1:] + 1, output.features


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("first", [1, 3, 6])
def test_prompts_may_be_left_out_of_later_runs(kind, first):
    objective = make_objective(make_target(kind), unroll=4)
    tokens = torch.tensor([some_sequences(6)[5].token_ids[1:]])
    features = torch.randn(1, tokens.shape[1], 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = list(objective.unrolled(tokens, features))
        short = list(objective.unrolled(tokens, features, first=first))
    assert torch.equal(whole[0], short[0])
    for ours, theirs in zip(short[1:], whole[1:], strict=True):
        assert ours.shape[1] == tokens.shape[1] - first
        right = slice(first + 4, None)
        torch.testing.assert_close(ours[:, 4:], theirs[:, right], atol=1e-5, rtol=1e-4)


def test_eight_sequences_are_learned_by_heart(target, tmp_path):
    _, outcome = train(
        target, tmp_path, sequences=some_sequences(8), steps=250, batch_size=8, log_steps=250
    )
    assert outcome.history[-1]["alpha"] > 0.9


def test_every_depth_it_is_unrolled_to_is_trained(target, tmp_path):
    losses = {}
    sequences = some_sequences(4)
    batch = collate(sequences, range(4))
    for unroll in (1, 3):
        objective = make_objective(target, unroll=unroll)
        train(target, tmp_path / str(unroll), sequences=sequences, objective=objective, steps=80)
        judge = make_objective(target, unroll=3, step_decay=1.0)
        judge.head = objective.head
        judge._weights = [0.0, 0.0, 1.0]  # the third depth alone
        with torch.no_grad():
            signal = OnlineSignals(target, LAYERS).signal(batch)
            losses[unroll] = float(judge(batch, signal, CPU)[0])
    assert losses[3] < losses[1] / 2


def test_alpha_is_that_of_the_first_run(target):
    batch = collate(some_sequences(), [0, 3])
    signal = OnlineSignals(target, LAYERS).signal(batch)
    with torch.no_grad():
        one = make_objective(target, unroll=1)(batch, signal, CPU)
        three = make_objective(target, unroll=3)(batch, signal, CPU)
    assert float(three[1]) == pytest.approx(float(one[1]))
    assert float(three[0]) != pytest.approx(float(one[0]))


def test_padding_changes_nothing(target):
    objective, signals = make_objective(target), OnlineSignals(target, LAYERS)
    sequences = some_sequences()
    with torch.no_grad():
        together = objective(b := collate(sequences, [0, 5]), signals.signal(b), CPU)
        alone = [objective(b := collate(sequences, [i]), signals.signal(b), CPU) for i in (0, 5)]
    for place in (0, 1):
        assert float(together[place]) == pytest.approx(
            sum(float(a[place]) for a in alone), rel=1e-4
        )


def test_a_prompt_of_one_token_trains_the_rest(target):
    """No entry predicts its second token, so that position counts with nothing."""
    text = some_sequences()[3].token_ids
    objective, signals = make_objective(target, unroll=1), OnlineSignals(target, LAYERS)
    found = []
    for start in (0, 1):
        batch = collate([TrainingSequence(text, start)], [0])
        with torch.no_grad():
            found.append([float(x) for x in objective(batch, signals.signal(batch), CPU)])
    assert found[0] == pytest.approx(found[1])


# ----------------------------------------------------------------------------- signals and resuming


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_features_are_the_online_ones(dtype, tmp_path):
    target, sequences = make_target("llama", dtype=dtype), some_sequences(7)
    cached = CachedSignals(tmp_path, target, sequences, max_gb=1.0, feature_layers=LAYERS)
    batch = collate(sequences, [6, 0, 3])
    ours, theirs = cached.signal(batch), OnlineSignals(target, LAYERS).signal(batch)
    assert ours.features.dtype == dtype
    assert ours.features.shape == theirs.features.shape
    for row, index in enumerate(batch.indices):
        length = len(sequences[index].token_ids) - 1
        near = {"atol": 0.1, "rtol": 0.1} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(
            ours.features[row, :length], theirs.features[row, :length], **near
        )
    torch.testing.assert_close(ours.log_normaliser, theirs.log_normaliser, atol=0.1, rtol=0.1)


def test_a_cache_with_features_serves_those_who_want_none_and_not_the_reverse(tmp_path, target):
    sequences, calls = some_sequences(7), []
    target.base_model.register_forward_hook(lambda *_: calls.append(1))

    def num_forwards(layers):
        calls.clear()
        CachedSignals(tmp_path, target, sequences, max_gb=1.0, feature_layers=layers)
        return len(calls)

    filling = num_forwards(())
    finding = num_forwards(())
    assert filling > finding
    assert num_forwards(LAYERS) == filling
    assert num_forwards(LAYERS) == num_forwards(()) == finding
    assert num_forwards((0, 1, 2)) == filling


def test_features_count_in_the_room_that_is_planned(tmp_path, target):
    sequences = some_sequences(7)
    positions = sum(len(sequence.token_ids) - 1 for sequence in sequences)
    plain = sum(sequence.num_predicted for sequence in sequences) * (32 * 4 + 4)
    size_gb = (plain + positions * 3 * 32 * 4) / 1e9
    with pytest.raises(DraftError, match=r"distill\.max_cache_gb"):
        CachedSignals(tmp_path, target, sequences, max_gb=size_gb * 0.99, feature_layers=LAYERS)
    CachedSignals(tmp_path, target, sequences, max_gb=size_gb * 1.01, feature_layers=LAYERS)
    assert (tmp_path / "features.bin").stat().st_size == positions * 3 * 32 * 4


@pytest.mark.parametrize("mixed_precision", ["bf16", "no"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_a_bfloat16_target_trains_in_either_precision(kind, mixed_precision, tmp_path):
    target = make_target(kind, dtype=torch.bfloat16)
    head, outcome = train(target, tmp_path, steps=12, mixed_precision=mixed_precision)
    assert outcome.history[-1]["loss"] < outcome.history[0]["loss"]
    assert {p.dtype for p in head.parameters() if p.requires_grad} == {torch.float32}


def test_all_that_is_trained_gets_a_gradient(target):
    objective = make_objective(target)
    batch = collate(some_sequences(), [0, 3])
    loss, _ = objective(batch, OnlineSignals(target, LAYERS).signal(batch), CPU)
    loss.backward()
    idle = [
        name
        for name, p in objective.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert idle == []


def test_the_same_seed_gives_the_same_head_bit_for_bit(target, tmp_path):
    first, _ = train(target, tmp_path / "a")
    second, _ = train(target, tmp_path / "b")
    other, _ = train(target, tmp_path / "c", seed=1)
    assert are_equal(weights_of(first), weights_of(second))
    assert not are_equal(weights_of(first), weights_of(other))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_killed_run_ends_like_an_unbroken_one(target, accumulation, tmp_path):
    options = {"checkpoint_steps": 4, "gradient_accumulation": accumulation}

    def kill(step, _metrics):
        if step == 5:
            raise KeyboardInterrupt

    whole, _ = train(target, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        train(target, tmp_path / "run", on_step=kill, **options)
    resumed, outcome = train(target, tmp_path / "run", **options)
    assert outcome.resumed_at == 4
    assert are_equal(weights_of(resumed), weights_of(whole))


def test_the_first_draft_of_a_round_is_the_first_runs(target):
    """The proposer asks for what the objective trained, at the same entry."""
    objective = make_objective(target, unroll=1)
    head = objective.head.requires_grad_(requires_grad=False)
    text = some_sequences()[2].token_ids
    signals = OnlineSignals(target, LAYERS)
    sequence = some_sequences()[2]
    fused = head.fuse(signals.signal(collate([sequence], [0])).features)
    (run,) = objective.unrolled(torch.tensor([text[1:]]), fused)
    expected = head.logits(run)[0].argmax(-1)
    own = copy.deepcopy(head)
    proposer = FeatureProposer(own, own)
    for length in (2, 4, 7):
        proposer.reserve(rows=1, slots=32)
        with torch.no_grad():
            features = signals.signal(collate([sequence], [0])).features
        places = torch.arange(length - 1)[None]
        proposer.read(features[:, : length - 1], places, first_row=0)
        proposer.admit([text[:length]], first_row=0)
        batch = Batch(CPU, int(target.config.vocab_size))
        batch.append(
            Row(Request("a", text[:length], SamplingParams(max_new_tokens=9)), text[:length])
        )
        assert proposer.propose(batch, [1]).tokens.tolist() == [[int(expected[length - 2])]]


def test_a_batch_that_masks_nothing_costs_nothing(tmp_path):
    target = make_target("llama")
    sequences = some_sequences()
    signals = CachedSignals(tmp_path, target, sequences, max_gb=1.0, feature_layers=LAYERS)
    batch = collate(sequences, [0])
    batch = dataclasses.replace(batch, mask=torch.zeros_like(batch.mask))
    loss, agreed = make_objective(target)(batch, signals.signal(batch), CPU)
    loss.backward()
    assert (float(loss), float(agreed)) == (0.0, 0.0)
