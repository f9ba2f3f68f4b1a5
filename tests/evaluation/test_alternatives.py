"""Int8 weights and other dtypes: what they compute, what is left out, and when they pay."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn

from draftsmith.decoding import Lengths
from draftsmith.evaluation import alternatives
from draftsmith.evaluation.alternatives import (
    SCHEMES,
    AlternativeRun,
    as_scheme,
    left_out,
    pays_instead,
    same_greedy_tokens,
)
from draftsmith.evaluation.arms import Contestants
from draftsmith.evaluation.deadline import Deadline
from draftsmith.evaluation.int8 import Int8Linear, can_be_int8, with_int8_linears
from draftsmith.evaluation.trial_plan import conversations
from tests.evaluation.clock import Clock

GROUP_S = 1.0  # that a batch is expected to take


@pytest.fixture
def greedy(rollouts):
    return [rollout for rollout in rollouts if rollout.temperature == 0]


def entry(scheme, batch_size, low, mean, reading=None):
    decoded = {"mean": mean, "low": low, "high": mean + 0.1}
    ratios = {"reading_ratio": reading or decoded, "decoding_ratio": decoded}
    is_served = scheme == "bfloat16"
    facts = {"scheme": scheme, "batch_size": batch_size, "keeps_the_targets_law": is_served}
    return facts | ratios


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 5, 40])
@pytest.mark.parametrize("has_bias", [True, False])
def test_an_int8_layer_is_the_layer_up_to_rounding(dtype, has_bias, num_rows):
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 96, bias=has_bias)
    for parameter in linear.parameters():
        parameter.data.normal_(generator=generator)
    inputs = torch.randn(1, num_rows, 64, generator=generator)
    found = Int8Linear(linear.to(dtype))(inputs.to(dtype))
    expected = linear.float()(inputs)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    error = (found.float() - expected).norm() / expected.norm()
    assert 0 < error < 0.03


def test_an_int8_layer_takes_no_rows():
    assert Int8Linear(nn.Linear(64, 32))(torch.empty(2, 0, 64)).shape == (2, 0, 32)


def test_a_row_of_zeros_stays_zero():
    linear = nn.Linear(64, 32, bias=False)
    linear.weight.data[0] = 0
    assert Int8Linear(linear)(torch.ones(1, 64))[0, 0] == 0


@pytest.mark.parametrize("scheme", ["int8", "bfloat16"])
def test_an_alternative_leaves_the_served_target_as_it_is(target, scheme):
    before = copy.deepcopy(target.state_dict())
    modules = {name: type(module) for name, module in target.named_modules()}
    other = as_scheme(target, scheme)
    assert other is not target
    assert {name: type(module) for name, module in target.named_modules()} == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert target.dtype == torch.float32


def test_linear_layers_that_the_kernel_takes_are_int8_and_nothing_else(target):
    other = with_int8_linears(target)
    kinds = {name: type(module) for name, module in other.named_modules()}
    for name, module in target.named_modules():
        assert (kinds[name] is Int8Linear) == can_be_int8(module)
    assert sum(kind is Int8Linear for kind in kinds.values()) >= 7
    assert other.get_input_embeddings().weight is target.get_input_embeddings().weight


@pytest.mark.parametrize(("columns", "rows"), [(33, 64), (64, 50)])
def test_sizes_behind_which_the_kernel_would_read_are_left_alone(columns, rows):
    assert not can_be_int8(nn.Linear(columns, rows))
    assert can_be_int8(nn.Linear(64, 32))


def test_the_served_dtype_is_the_target_itself(target, greedy):
    assert as_scheme(target, "float32") is target
    assert same_greedy_tokens(target, greedy) == 1.0


def test_agreement_is_that_of_the_answers_own_tokens(target, greedy):
    assert same_greedy_tokens(with_int8_linears(target), greedy) > 0.5
    broken = copy.deepcopy(target)
    broken.base_model.norm.weight.data.neg_()  # the least likely token becomes the most likely
    assert same_greedy_tokens(broken, greedy) < 0.2
    assert same_greedy_tokens(target, []) is None


def test_what_cannot_be_measured_says_why(target, monkeypatch):
    assert left_out(target, "int8") is None
    assert left_out(target, "float32") is None
    monkeypatch.setattr(alternatives, "available_bytes", lambda: 1)
    assert "GB" in left_out(target, "bfloat16")
    assert left_out(target, "float32") is None


def test_the_fastest_alternative_that_surely_gains_at_the_batch_size_is_named():
    entries = [
        entry("int8", 1, 1.1, 1.2),
        entry("float32", 1, 1.2, 1.4),
        entry("int8", 16, 0.9, 1.3),
        entry("bfloat16", 1, 1.01, 1.5),
        {"scheme": "bfloat16", "left_out": "no room"},
    ]
    assert pays_instead(entries, 1, 0.1)["scheme"] == "float32"
    assert pays_instead(entries, 4, 0.1) is None
    assert pays_instead(entries, 64, 0.1) is None
    assert pays_instead(entries[:2], 4, 0.1)["scheme"] == "float32"
    assert pays_instead(entries[3:], 1, 0.1) is None


def test_nothing_is_named_for_batches_that_there_was_no_time_for():
    late = {"scheme": "float32", "left_out": "no time", "late": [4, 16]}
    entries = [entry("float32", 1, 1.2, 1.4), late]
    assert pays_instead(entries, 1, 0.1)["scheme"] == "float32"
    assert pays_instead(entries, 4, 0.1) is None


def test_a_workload_that_mostly_reads_is_judged_by_how_fast_prompts_are_read():
    slow = {"mean": 0.5, "low": 0.4, "high": 0.6}
    entries = [entry("int8", 1, 1.5, 2.0, reading=slow)]
    assert pays_instead(entries, 1, 0.0)["ratio"]["mean"] == pytest.approx(2.0)
    assert pays_instead(entries, 1, 0.1)["ratio"]["mean"] == pytest.approx(1 / (0.2 + 0.45))
    assert pays_instead(entries, 1, 0.9) is None


@pytest.fixture
def measure(target, drafts, stop_ids, greedy, tmp_path):
    """Measure all schemes at two batch sizes within so many seconds."""
    pair = Contestants(target, drafts["trimmed"], stop_ids=(), lookup_length=2)
    run = AlternativeRun(
        pair, partial(conversations, greedy, 16), greedy, 6, lambda _size: GROUP_S, tmp_path
    )
    lengths = {1: Lengths(2, 2), 2: Lengths(1, 0)}
    return lambda seconds: run.run(lengths, Deadline.after(seconds, Clock()))


def test_every_scheme_is_measured_alone_and_with_drafts_at_every_batch_size(measure):
    entries = measure(seconds=30.0)
    found = {(entry["scheme"], entry["batch_size"]): entry for entry in entries}
    assert set(found) == set(itertools.product(SCHEMES, (1, 2)))
    for (scheme, _), entry in found.items():
        assert entry["keeps_the_targets_law"] == (scheme == "float32")
        assert 0 <= entry["same_greedy_tokens"] <= 1
        for name in ("ratio", "ratio_with_drafts", "reading_ratio", "decoding_ratio"):
            assert 0 < entry[name]["low"] <= entry[name]["mean"] <= entry[name]["high"]
    served = found["float32", 1]
    for bound in (served["ratio"]["low"], served["decoding_ratio"]["high"]):
        assert bound == pytest.approx(1.0)
    assert served["same_greedy_tokens"] == 1.0


def test_without_time_nothing_is_measured_and_every_scheme_says_so(measure):
    entries = measure(seconds=0.0)
    assert [entry["scheme"] for entry in entries] == list(SCHEMES)
    assert all("budget for batches of 1, 2" in entry["left_out"] for entry in entries)
    assert pays_instead(entries, 1, 0.1) is None


def test_what_was_measured_before_needs_no_time(measure):
    whole = measure(seconds=30.0)
    assert measure(seconds=0.0) == whole


def test_a_group_that_began_in_time_is_the_last(target, drafts, greedy, tmp_path):
    clock = Clock(step=1.0)
    pair = Contestants(target, drafts["trimmed"], stop_ids=(), lookup_length=2)
    run = AlternativeRun(
        pair, partial(conversations, greedy, 16), greedy, 6, lambda _size: GROUP_S, tmp_path
    )
    entries = run.run({1: Lengths(1, 0)}, Deadline.after(15.0, clock))
    assert entries[0]["scheme"] == "int8"
    assert entries[0]["ratio"]["num_prompts"] < 8
    assert "budget" in entries[-1]["left_out"]


def test_an_alternative_is_named_only_where_it_surely_beats_the_drafts_too():
    entries = [entry("int8", 1, 1.3, 1.5)]
    assert pays_instead(entries, 1, 0.0, least=1.29)["scheme"] == "int8"
    assert pays_instead(entries, 1, 0.0, least=1.31) is None
