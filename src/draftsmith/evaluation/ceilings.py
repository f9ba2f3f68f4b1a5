"""What limits a forward: memory or arithmetic, against ceilings measured on this device.

Source: Williams et al. 2009, the roofline model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.evaluation.timing import median_ms

_COPY_BYTES = 1 << 28
_MATMUL_WIDTH = 2048
_REPEATS = 5
_EXPERTS = ".experts."  # in the names of weights that not every position asks

Bound = Literal["memory", "arithmetic"]


@dataclass(frozen=True)
class Ceilings:
    """The most that this device does.

    Attributes:
        bytes_per_s: Read and written by copying a large tensor.
        flop_per_s: Of a large matrix product in the dtype of the models.
    """

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True)
class ModelSize:
    """What a forward of a model moves and computes.

    Attributes:
        parameters: That a position is multiplied with; an embedding is only looked up, and of
            experts each position asks a few.
        weight_bytes: Of all that positions are multiplied with, every expert included.
        cache_bytes: Keys and values of one token of context.
        attention_flop: Of one position over one token of context.
        expert_bytes: The experts' part of the weights.
        expert_share: Of the experts those that a position asks.
    """

    parameters: int
    weight_bytes: int
    cache_bytes: int
    attention_flop: int = 0
    expert_bytes: int = 0
    expert_share: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelSize:
        """Count a live model; a head that is tied to the embedding counts once."""
        embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
        head = model.get_output_embeddings().weight
        used = [
            (parameter, _EXPERTS in name)
            for name, parameter in model.named_parameters()
            if parameter is not embedding or parameter is head
        ]
        experts = [parameter for parameter, is_expert in used if is_expert]
        share = _expert_share(model.config.get_text_config()) if experts else 1.0
        in_experts = sum(parameter.numel() for parameter in experts)
        total = sum(parameter.numel() for parameter, _ in used)
        keys, queries = _attention_widths(model)
        return cls(
            parameters=total - in_experts + round(share * in_experts),
            weight_bytes=sum(p.numel() * p.element_size() for p, _ in used),
            cache_bytes=2 * keys * embedding.element_size(),
            attention_flop=4 * queries,
            expert_bytes=sum(p.numel() * p.element_size() for p in experts),
            expert_share=share,
        )


def _expert_share(config: Any) -> float:  # noqa: ANN401  Transformers configurations share no type
    """Experts that a position asks, over all of a layer; 1 where the configuration says neither."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    number = next((found for name in names if (found := getattr(config, name, None))), None)
    asked = getattr(config, "num_experts_per_tok", None)
    return float(asked / number) if number and asked else 1.0


def _attention_widths(model: PreTrainedModel) -> tuple[int, int]:
    """Numbers in the keys of a token and in the queries of a position, all layers together.

    Heads that draft all positions at once have no attention.
    """
    if getattr(model, "drafts_at_once", False):
        return 0, 0
    config: Any = model.config.get_text_config()
    queries = int(config.num_attention_heads)
    keys = int(getattr(config, "num_key_value_heads", None) or queries)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // queries)
    per_head = width * int(config.num_hidden_layers)
    return keys * per_head, queries * per_head


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Time a copy and a matrix product."""
    source = torch.ones(_COPY_BYTES // dtype.itemsize, dtype=dtype, device=device)
    destination = torch.empty_like(source)
    square = torch.ones(_MATMUL_WIDTH, _MATMUL_WIDTH, dtype=dtype, device=device)
    actions = {"copy": lambda: destination.copy_(source), "product": lambda: square @ square}
    times = median_ms(actions, _REPEATS)
    return Ceilings(
        bytes_per_s=2 * _COPY_BYTES / times["copy"] * 1000,
        flop_per_s=2 * _MATMUL_WIDTH**3 / times["product"] * 1000,
    )


def least_ms(size: ModelSize, ceilings: Ceilings, *, rows: int, width: int, context: int) -> float:
    """Time below which no forward of this size can be on this device."""
    return 1000 * max(_seconds(size, ceilings, rows=rows, width=width, context=context).values())


def bound(size: ModelSize, ceilings: Ceilings, *, rows: int, width: int, context: int) -> Bound:
    """What a forward waits for: the longer of moving its bytes and doing its arithmetic."""
    seconds = _seconds(size, ceilings, rows=rows, width=width, context=context)
    return max(seconds, key=seconds.__getitem__)


def _seconds(
    size: ModelSize, ceilings: Ceilings, *, rows: int, width: int, context: int
) -> dict[Bound, float]:
    positions, seen = rows * width, context + width
    # Of the experts those move that some position asks, as if each asked independently.
    idle = (1 - size.expert_share) ** positions
    weights = size.weight_bytes - idle * size.expert_bytes
    return {
        "memory": (weights + rows * seen * size.cache_bytes) / ceilings.bytes_per_s,
        "arithmetic": positions
        * (2 * size.parameters + seen * size.attention_flop)
        / ceilings.flop_per_s,
    }
