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
        parameters: That every position is multiplied with; an embedding is only looked up.
        weight_bytes: Of those.
        cache_bytes: Keys and values of one token of context.
    """

    parameters: int
    weight_bytes: int
    cache_bytes: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelSize:
        """Count a live model; a head that is tied to the embedding counts once."""
        embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
        head = model.get_output_embeddings().weight
        used = {id(p): p for p in model.parameters() if p is not embedding or p is head}
        config: Any = model.config.get_text_config()
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        width = int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        per_layer = 2 * heads * width * embedding.element_size()
        return cls(
            parameters=sum(p.numel() for p in used.values()),
            weight_bytes=sum(p.numel() * p.element_size() for p in used.values()),
            cache_bytes=per_layer * int(config.num_hidden_layers),
        )


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
    moved = size.weight_bytes + rows * (context + width) * size.cache_bytes
    computed = 2 * size.parameters * rows * width
    return {
        "memory": moved / ceilings.bytes_per_s,
        "arithmetic": computed / ceilings.flop_per_s,
    }
