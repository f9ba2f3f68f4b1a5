"""The roofline: bytes and arithmetic of a forward against measured ceilings."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.drafts.medusa import HeadShape, build_heads
from draftsmith.evaluation.ceilings import (
    Ceilings,
    ModelSize,
    bound,
    least_ms,
    measure_ceilings,
)
from draftsmith.evaluation.profiling import forward_costs
from tests.planning.small_plans import make_mixture

SIZE = ModelSize(parameters=100, weight_bytes=200, cache_bytes=10)


def test_few_positions_wait_for_memory_and_many_for_arithmetic():
    ceilings = Ceilings(bytes_per_s=1e6, flop_per_s=1e7)
    assert bound(SIZE, ceilings, rows=1, width=1, context=0) == "memory"
    assert bound(SIZE, ceilings, rows=64, width=8, context=0) == "arithmetic"
    assert bound(SIZE, ceilings, rows=64, width=8, context=5000) == "memory"


def test_the_least_time_is_that_of_the_slower_ceiling():
    ceilings = Ceilings(bytes_per_s=1e6, flop_per_s=1e6)
    assert least_ms(SIZE, ceilings, rows=2, width=3, context=7) == pytest.approx(
        1000 * max(200 + 2 * 10 * 10, 2 * 100 * 6) / 1e6
    )


def test_sizes_are_those_of_the_model(target):
    size = ModelSize.of(target)
    config = target.config
    head_dim = config.hidden_size // config.num_attention_heads
    assert size.cache_bytes == 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * (
        head_dim
    )
    embedding = target.get_input_embeddings().weight
    total = sum(parameter.numel() for parameter in target.parameters())
    is_tied = embedding is target.get_output_embeddings().weight
    assert size.parameters == (total if is_tied else total - embedding.numel())
    assert size.weight_bytes == 4 * size.parameters


def test_no_forward_is_faster_than_the_ceilings_allow(target, drafts):
    ceilings = measure_ceilings(torch.device("cpu"), torch.float32)
    costs = forward_costs(target, drafts["trimmed"].model, [4], batch_size=2, context=16, repeats=1)
    size = ModelSize.of(target)
    assert costs.verify_ms[4] > least_ms(size, ceilings, rows=2, width=4, context=16)


def test_attention_over_a_long_context_is_computed_too():
    ceilings = Ceilings(bytes_per_s=1e9, flop_per_s=1e6)
    size = dataclasses.replace(SIZE, attention_flop=4)
    found = least_ms(size, ceilings, rows=2, width=3, context=7)
    assert found == pytest.approx(1000 * 6 * (2 * 100 + 4 * 10) / 1e6)


def test_attention_of_a_live_model_is_counted_by_its_query_heads(target):
    config = target.config
    found = ModelSize.of(target)
    # Scores and their sum over values: a product and a sum each, for every number of a query.
    assert found.attention_flop == 4 * config.hidden_size * config.num_hidden_layers
    assert (found.expert_bytes, found.expert_share) == (0, 1.0)


def test_heads_that_draft_all_positions_at_once_hold_no_keys(target):
    heads = build_heads(target, HeadShape(2, 1, own_heads=False), None)
    found = ModelSize.of(heads)
    assert (found.cache_bytes, found.attention_flop) == (0, 0)
    assert found.parameters > 0


def test_of_experts_a_position_is_multiplied_with_those_it_asks():
    model = AutoModelForCausalLM.from_config(make_mixture())
    found = ModelSize.of(model)
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    all_of_them = sum(p.numel() for p in experts)
    dense = sum(p.numel() for p in model.parameters()) - all_of_them
    dense -= model.get_input_embeddings().weight.numel()
    assert all_of_them > 0
    assert found.parameters == dense + all_of_them // 2
    assert found.weight_bytes == 4 * (dense + all_of_them)
    assert (found.expert_bytes, found.expert_share) == (4 * all_of_them, 0.5)


def test_experts_that_nobody_asks_do_not_move():
    ceilings = Ceilings(bytes_per_s=1e6, flop_per_s=1e12)
    size = dataclasses.replace(SIZE, cache_bytes=0, expert_bytes=160, expert_share=0.25)

    def moved(width):
        return least_ms(size, ceilings, rows=1, width=width, context=0) * 1e6 / 1000

    assert moved(1) == pytest.approx(40 + 160 / 4)
    assert moved(2) == pytest.approx(40 + 160 * (1 - 0.75**2))
    assert moved(100) == pytest.approx(200)
