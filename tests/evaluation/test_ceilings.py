"""The roofline: bytes and arithmetic of a forward against measured ceilings."""

from __future__ import annotations

import pytest
import torch

from draftsmith.evaluation.ceilings import (
    Ceilings,
    ModelSize,
    bound,
    least_ms,
    measure_ceilings,
)
from draftsmith.evaluation.profiling import forward_costs

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
