"""A target with int8 linear layers, to be measured: another target, which nothing here serves.

Weights are rounded once, with a scale an output row; products are made in bfloat16. Embeddings,
norms and attention stay as they are. On a CPU only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.evaluation.arms import twin

_LARGEST = 127
_LEAST_SCALE = 1e-12  # of a row that is all zero
_VECTOR = 32  # torch's kernel reads whole vectors: other sizes read behind the weights
_FEW_ROWS = 16  # above, the kernel takes longer than undoing the rounding does


class Int8Linear(nn.Module):
    """A linear layer of int8 weights.

    Args:
        linear: The layer that it stands for, of a size that `can_be_int8`; it is not changed.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(1) / _LARGEST).clamp(min=_LEAST_SCALE)
        bias = None if linear.bias is None else linear.bias.detach()
        self.rounded: Tensor
        self.scales: Tensor
        self.bias: Tensor | None
        self.register_buffer("rounded", (weight / scales[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scales.to(torch.bfloat16))
        self.register_buffer("bias", bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]` in the inputs' dtype."""
        size = (*inputs.shape[:-1], len(self.scales))
        if inputs.numel() == 0:  # a prefill makes no logits
            return inputs.new_zeros(size)
        rows = inputs.reshape(-1, inputs.shape[-1]).to(torch.bfloat16).contiguous()
        output: Tensor
        if len(rows) <= _FEW_ROWS:
            output = torch.ops.aten._weight_int8pack_mm(rows, self.rounded, self.scales)
        else:
            output = nn.functional.linear(rows, self.rounded.to(rows.dtype)) * self.scales
        output = output.reshape(size).to(inputs.dtype)
        return output if self.bias is None else output + self.bias


def can_be_int8(module: nn.Module) -> bool:
    """Whether a module is a linear layer of a size that torch's kernel takes."""
    return type(module) is nn.Linear and not any(size % _VECTOR for size in module.weight.shape)


def with_int8_linears(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its linear layers, the output head among them, in int8.

    Layers of other sizes and all that is no linear layer are shared with the model, which stays as
    it is.
    """
    other = twin(model)
    for module in list(other.modules()):
        for name, child in list(module.named_children()):
            if can_be_int8(child):
                assert isinstance(child, nn.Linear)
                setattr(module, name, Int8Linear(child))
    return other
