"""Key/value cache of fixed slots.

A layer holds `[rows, heads, slots, dim]` and is written at each row's own positions. Rolling back
moves a row's length and touches no memory: stale slots lie behind the mask `slot <= position` and
are overwritten before a query can see them. Knows nothing of tokens or of acceptance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Writes:
    """Where the current forward writes and what it may read; shared by all layers of a cache."""

    def __init__(self) -> None:
        self.first_row = 0
        self.num_rows = 0
        self.num_slots = 0
        self.positions = torch.empty(0, dtype=torch.long)
        self._indices: dict[int, Tensor] = {}

    def begin(self, positions: Tensor, *, first_row: int, num_slots: int) -> None:
        self.first_row, self.num_rows = first_row, len(positions)
        self.num_slots = num_slots
        self.positions = positions
        self._indices = {}

    def flat_indices(self, heads: int, slots: int) -> Tensor:
        """Indices into the layer as `[rows * heads * slots, dim]`, by row, head and position."""
        if heads not in self._indices:
            device = self.positions.device
            row = torch.arange(self.first_row, self.first_row + self.num_rows, device=device)
            start = (row[:, None] * heads + torch.arange(heads, device=device)) * slots
            self._indices[heads] = (start[:, :, None] + self.positions[:, None, :]).reshape(-1)
        return self._indices[heads]


class _SlotLayer(CacheLayerMixin):
    """One layer's slots; memory is taken at the first write, when heads and width are known."""

    is_sliding = False

    def __init__(self, rows: int, slots: int, writes: _Writes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Transformers annotates no constructor
        self.rows, self.slots, self.writes = rows, slots, writes

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def allocate(states: Tensor) -> Tensor:
            return states.new_zeros(self.rows, states.shape[1], self.slots, states.shape[3])

        self.keys, self.values = allocate(key_states), allocate(value_states)
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *_: Any,  # noqa: ANN401
        **__: Any,  # noqa: ANN401
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, store: Tensor | None, states: Tensor) -> Tensor:
        assert store is not None
        index = self.writes.flat_indices(states.shape[1], self.slots)
        dim = states.shape[3]
        store.view(-1, dim).index_copy_(0, index, states.reshape(-1, dim))
        rows = store.narrow(0, self.writes.first_row, self.writes.num_rows)
        return rows.narrow(2, 0, self.writes.num_slots)

    def move_row(self, source: int, destination: int) -> None:
        for store in (self.keys, self.values):
            if store is not None:  # None until the first write
                store[destination].copy_(store[source])

    def move_slots(self, rows: Tensor, sources: Tensor, destinations: Tensor) -> None:
        for store in (self.keys, self.values):
            if store is not None:
                store[rows, :, destinations] = store[rows, :, sources]

    def clear_row(self, row: int) -> None:
        for store in (self.keys, self.values):
            if store is not None:
                store[row].zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        return self.writes.num_slots, 0

    def get_seq_length(self) -> int:
        return 0  # rows have lengths of their own; positions are always passed explicitly

    def get_max_length(self) -> int:
        return self.slots


class SlotCache(Cache):
    """Slots for `rows` sequences of up to `slots` tokens.

    Args:
        num_layers: Decoder layers of the model.
        rows: Sequences held at once.
        slots: Tokens a sequence may hold, speculated ones included.
    """

    def __init__(self, num_layers: int, *, rows: int, slots: int) -> None:
        self.writes = _Writes()
        self.rows, self.slots = rows, slots
        super().__init__(layers=[_SlotLayer(rows, slots, self.writes) for _ in range(num_layers)])

    @property
    def num_bytes(self) -> int:
        """Bytes that the layers hold; one takes its memory at the first write."""
        num_bytes = 0
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer)
            num_bytes += sum(s.nbytes for s in (layer.keys, layer.values) if s is not None)
        return num_bytes

    def begin(self, positions: Tensor, *, first_row: int, num_slots: int) -> None:
        """Prepare a forward.

        It writes the slots `positions` (int64 `[num_rows, width]`) and reads the first `num_slots`.
        """
        self.writes.begin(positions, first_row=first_row, num_slots=num_slots)

    def move_row(self, source: int, destination: int) -> None:
        """Copy a row over another; the source is then free."""
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer)
            layer.move_row(source, destination)

    def move_slots(self, rows: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Copy slots of rows, int64 `[slots]` each; all are read before one is written."""
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer)
            layer.move_slots(rows, sources, destinations)

    def clear_row(self, row: int) -> None:
        """Make a row finite again: a masked slot that holds NaN still adds 0 * NaN."""
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer)
            layer.clear_row(row)
