"""Int8 weights and other dtypes: what they compute, what is left out, and when they pay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from draftsmith.evaluation.alternatives import (
    as_scheme,
    left_out,
    pays_instead,
    same_greedy_tokens,
)
from draftsmith.evaluation.int8 import Int8Linear, can_be_int8, with_int8_linears


@pytest.fixture
def greedy(rollouts):
    return [rollout for rollout in rollouts if rollout.temperature == 0]


def entry(scheme, batch_size, low, mean):
    ratio = {"mean": mean, "low": low, "high": mean + 0.1, "num_prompts": 8}
    return {"scheme": scheme, "batch_size": batch_size, "ratio": ratio}


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
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    assert "GB" in left_out(target, "bfloat16")
    assert left_out(target, "float32") is None


def test_the_fastest_alternative_that_surely_gains_at_the_batch_size_is_named():
    entries = [
        entry("int8", 1, 1.1, 1.2),
        entry("float32", 1, 1.2, 1.4),
        entry("int8", 16, 0.9, 1.3),
        {"scheme": "bfloat16", "left_out": "no room"},
    ]
    assert pays_instead(entries, 1)["scheme"] == "float32"
    assert pays_instead(entries, 4) is None
    assert pays_instead(entries, 64) is None
    assert pays_instead(entries[:2], 4)["scheme"] == "float32"
    assert pays_instead(entries[3:], 1) is None
