"""Features of a target: inputs of some of its decoder layers, taken from forwards that run anyway.

A feature of a layer is what that layer reads at a position: the hidden state below it. Hooks are on
the model only while one forward runs, so a model that nobody takes features from pays nothing, and
copies of a model never carry hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.errors import DecodingError


class FeatureReader(Protocol):
    """Who wants the features of every forward over a cache."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs are wanted."""

    def read(self, features: Tensor, positions: Tensor, *, first_row: int) -> None:
        """Take in features that a forward made.

        Args:
            features: `[rows, width, layers * hidden]` in the target's dtype.
            positions: int64 `[rows, width]`: the texts' positions that they belong to, or the slots
                of a tree's places.
            first_row: The cache row of `features[0]`.
        """

    def move_slots(self, rows: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """An accepted path goes to its positions: as that of a cache."""


@contextmanager
def layer_inputs(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collect what the named layers read while a forward runs within the block.

    Args:
        model: A decoder-only model.
        layers: Indices of its layers; none costs nothing.

    Yields:
        A list that a forward fills with one `[rows, width, hidden]` a layer, in the order given.

    Raises:
        DecodingError: The model has no list of layers.
    """
    found: list[Tensor] = [torch.empty(0)] * len(layers)
    with ExitStack() as hooks:
        modules = decoder_layers(model) if layers else nn.ModuleList()
        for place, layer in enumerate(layers):

            def keep(
                _module: nn.Module,
                arguments: tuple[Any, ...],
                keywords: dict[str, Any],
                place: int = place,
            ) -> None:
                found[place] = arguments[0] if arguments else keywords["hidden_states"]

            hook = modules[layer].register_forward_pre_hook(keep, with_kwargs=True)
            hooks.callback(hook.remove)
        yield found


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers.

    Raises:
        DecodingError: No list of modules has the model's number of layers.
    """
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise DecodingError(
        f"taking features of {type(model).__name__}",
        found="no list of decoder layers",
        expected=f"a module list of {num_layers} layers",
        remedy="use a decoder-only target",
    )
