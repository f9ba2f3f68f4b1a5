"""Features of a target: inputs of some of its decoder layers, taken from forwards that run anyway.

A feature of a layer is what that layer reads at a position: the hidden state below it. Behind the
last layer that is the last hidden state, which the output head reads: it has the index behind that
of the last layer. Hooks are on the model only while one forward runs, so a model that nobody takes
features from pays nothing, and copies of a model never carry hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from draftsmith.errors import DecodingError


class FeatureReader(Protocol):
    """Who wants the features of every forward over a cache."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs are wanted; see `layer_inputs`."""

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


class FeatureStore:
    """One feature a position of every text, behind the forwards of a target.

    Kept by cache row and position like keys and values: rolling back moves a length, and what is
    stale is overwritten before it is read. What is not finite is kept as 0: the target's own logits
    tell of it, and NaN would outlive its request.
    """

    def __init__(self) -> None:
        self._shape = (0, 0)
        self._held: Tensor | None = None  # [rows, slots, hidden]; taken at the first write

    def reserve(self, *, rows: int, slots: int) -> None:
        """Provide slots for so many texts and positions; larger ones are kept."""
        if rows > self._shape[0] or slots > self._shape[1]:
            self._shape, self._held = (rows, slots), None

    def put(self, features: Tensor, positions: Tensor, *, first_row: int) -> None:
        """Keep features `[rows, width, hidden]` of int64 positions `[rows, width]`."""
        if self._held is None:
            self._held = features.new_zeros(*self._shape, features.shape[-1])
        finite = features.nan_to_num(0.0, 0.0, 0.0)
        self._held[_rows(positions, first_row), positions] = finite

    def get(self, positions: Tensor, *, first_row: int = 0) -> Tensor:
        """The features `[rows, width, hidden]` of int64 positions `[rows, width]`."""
        assert self._held is not None, "no forward was read yet"
        return self._held[_rows(positions, first_row), positions]

    def move_slots(self, rows: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Move an accepted path of a tree to its positions; as that of a cache."""
        if self._held is not None:
            self._held[rows, destinations] = self._held[rows, sources]

    def move_row(self, source: int, destination: int) -> None:
        """Copy a row over another row."""
        if self._held is not None:
            self._held[destination] = self._held[source]


def _rows(positions: Tensor, first_row: int) -> Tensor:
    return torch.arange(first_row, first_row + len(positions), device=positions.device)[:, None]


@contextmanager
def layer_inputs(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collect what the named layers read while a forward runs within the block.

    Args:
        model: A decoder-only model.
        layers: Indices of its layers, of which the one behind the last stands for the last hidden
            state; none costs nothing.

    Yields:
        A list that a forward fills with one `[rows, width, hidden]` a layer, in the order given.

    Raises:
        DecodingError: The model has no list of layers.
    """
    found: list[Tensor] = [torch.empty(0)] * len(layers)
    with ExitStack() as hooks:
        for place, layer in enumerate(layers):
            hook = _on_input(model, layer, partial(found.__setitem__, place))
            hooks.callback(hook.remove)
        yield found


def _on_input(
    model: PreTrainedModel, layer: int, keep: Callable[[Tensor], None]
) -> RemovableHandle:
    """Give to `keep` what the layer reads in every forward, or what the model's body gives."""
    layers = decoder_layers(model)

    def before(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        keep(given[0] if given else named["hidden_states"])

    def behind(_module: nn.Module, _given: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        keep(output[0])  # of a tuple, and of Transformers' outputs: the last hidden state

    if layer == len(layers):
        return model.base_model.register_forward_hook(behind)
    return layers[layer].register_forward_pre_hook(before, with_kwargs=True)


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
