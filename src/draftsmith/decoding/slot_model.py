"""A Transformers causal LM driven over a slot cache through its public `forward`.

Builds masks and positions; knows nothing of drafts or sampling. Works for full and sliding-window
attention; models whose state cannot be rolled back are refused.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decoding import attention
from draftsmith.decoding.cache import SlotCache
from draftsmith.decoding.features import FeatureReader, layer_inputs
from draftsmith.decoding.steps import BuildStep, Inputs, Shape, StaticSteps, bucket
from draftsmith.decoding.tree import Tree, tensors_of, visible_slots
from draftsmith.errors import DecodingError

_SLOT_ROUNDING = 64
_FULL, _SLIDING = "full_attention", "sliding_attention"


def layer_windows(config: Any) -> dict[str, int | None]:  # noqa: ANN401  a Transformers config
    """Attention kinds of a model: name of the kind -> window in tokens, None for full attention.

    Raises:
        DecodingError: A kind that cannot be rolled back or is not known.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not kinds:
        kinds = {_FULL if window is None else _SLIDING}
    unknown = kinds - {_FULL, _SLIDING}
    if unknown:
        raise DecodingError(
            f"model of type {config.model_type}",
            found=f"layers of kind {sorted(unknown)}",
            expected="full or sliding-window attention, whose cache can be rolled back",
            remedy="choose a target without recurrent, linear or chunked attention",
        )
    return {kind: window if kind == _SLIDING else None for kind in kinds}


class SlotModel:
    """One model and its cache.

    Args:
        model: Causal LM in eval mode; its attention is switched to the slot attention.
        steps: Compiles or captures decoding steps (`compiled()`, `graphed()`); None runs them as
            they are. Prefills are wide and of any shape, so they always run as they are, and so
            does every forward whose features are read.

    Attributes:
        reader: Gets the features of every forward; None is nobody.
    """

    reader: FeatureReader | None = None

    def __init__(self, model: PreTrainedModel, steps: BuildStep | None = None) -> None:
        attention.register()
        self.config = model.config.get_text_config()
        self._windows = layer_windows(self.config)
        _require_interface(model)
        if self.config._attn_implementation != attention.NAME:
            model.set_attn_implementation(attention.NAME)
        self.model = model
        self.device = model.device
        self._groups = _query_groups(self.config)
        self._cache_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.max_positions = int(getattr(self.config, "max_position_embeddings", 1 << 30))
        self.cache: SlotCache | None = None
        self._steps = None if steps is None else StaticSteps(self._run, steps)

    @classmethod
    def of(cls, model: PreTrainedModel | SlotModel) -> SlotModel:
        """The model over a cache, where it is not yet."""
        return model if isinstance(model, SlotModel) else cls(model)

    def reserve(self, *, rows: int, slots: int) -> None:
        """Provide a cache of at least this size; an existing larger one is kept.

        The last slot of a row is scratch, for steps of fixed shape; they may also be of more rows.
        """
        if self._steps is not None:
            rows, slots = bucket(rows), slots + 1
        slots = _rounded(slots)
        if self.cache is None or self.cache.rows < rows or self.cache.slots < slots:
            layers = int(self.config.num_hidden_layers)
            self.cache = SlotCache(layers, rows=rows, slots=slots)
            if self._steps is not None:
                self._steps.forget()

    def move_row(self, source: int, destination: int) -> None:
        """Copy a row's cache over another row's."""
        assert self.cache is not None
        self.cache.move_row(source, destination)

    def clear_row(self, row: int) -> None:
        """Drop what a row holds; only needed where that may be NaN."""
        assert self.cache is not None
        self.cache.clear_row(row)

    def move_slots(self, rows: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Move an accepted path of a tree to its positions, int64 `[slots]` each."""
        assert self.cache is not None
        self.cache.move_slots(rows, sources, destinations)
        if self.reader is not None:
            self.reader.move_slots(rows, sources, destinations)

    def forward(  # noqa: PLR0913  those of a step, and the shape of its drafts
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        span: int,
        first_row: int = 0,
        keep: int | None = None,
        tree: Tree | None = None,
    ) -> Tensor:
        """Logits of `tokens`, whose keys and values are written at `positions`.

        Args:
            tokens: int64 `[rows, width]`.
            positions: int64, same shape; rows may differ (ragged). Positions behind the model's
                limit are clamped: such tokens are never committed.
            span: At least the largest position + 1; known on the host, so that nothing waits for
                the device.
            first_row: The cache row of `tokens[0]`.
            keep: Only the logits of the last `keep` tokens; 0 is none (a prefill), None is all.
            tree: Shape of tokens that are the places of a tree: each sees its own path, and its key
                and value are written behind those of the places before it. `span` holds them.

        Returns:
            `[rows, width or keep, vocab]` in the model's dtype.
        """
        assert self.cache is not None, "reserve() comes first"
        is_step = first_row == 0 and keep != 0 and self.cache.is_initialized
        if self._steps is None or self.reader is not None or not is_step:
            output = self.run(
                tokens, positions, span=span, first_row=first_row, keep=keep, tree=tree
            )
            return _kept(output.logits, keep)
        inputs = self._inputs(tokens, positions, tree)
        num_slots = min(_SLOT_ROUNDING * bucket(_rounded(span) // _SLOT_ROUNDING), self.cache.slots)
        scratch = self.cache.slots - 1
        return self._steps(inputs, scratch=scratch, num_slots=num_slots, keep=keep)

    def run(  # noqa: PLR0913  those of `forward`, and what else the model reads
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        span: int,
        first_row: int = 0,
        keep: int | None = None,
        tree: Tree | None = None,
        **more: Tensor,
    ) -> Any:  # noqa: ANN401  the outputs of Transformers' classes share no useful type
        """The model's output, for models that read or return more than others.

        Arguments as those of `forward`, and by name whatever else the model reads. A model that
        cannot choose makes logits of all tokens, whatever `keep` says.
        """
        assert self.cache is not None, "reserve() comes first"
        rows, width = tokens.shape
        shape = Shape(rows, width, min(_rounded(span), self.cache.slots), keep)
        return self._output(self._inputs(tokens, positions, tree), shape, first_row, **more)

    def _inputs(self, tokens: Tensor, positions: Tensor, tree: Tree | None) -> Inputs:
        # A configuration object shared with another model would switch this one too, and packed
        # masks fit no other attention.
        assert self.config._attn_implementation == attention.NAME, "attention was switched"
        positions = positions.clamp(max=self.max_positions - 1)
        if tree is None:
            return Inputs(tokens, positions, positions)
        places = positions[:, :1] + torch.arange(tokens.shape[1], device=positions.device)
        return Inputs(tokens, positions, places, tensors_of(tree, positions.device).sees)

    def _run(self, inputs: Inputs, shape: Shape) -> Tensor:
        """A forward that depends on its shape, the tensors and the cache, and on nothing else."""
        return _kept(self._output(inputs, shape, 0).logits, shape.num_kept)

    def _output(self, inputs: Inputs, shape: Shape, first_row: int, **more: Tensor) -> Any:  # noqa: ANN401
        assert self.cache is not None
        tokens, positions, places, _ = inputs
        self.cache.begin(places, first_row=first_row, num_slots=shape.num_slots)
        first_kept = 0 if shape.num_kept is None else shape.width - shape.num_kept
        if first_kept and self._keeps_logits:
            # Places, not a count: a count makes the model slice, and torch's bf16 CPU matmul over
            # a slice of several rows takes 20 to 700 times as long as over a copy.
            more["logits_to_keep"] = torch.arange(first_kept, shape.width, device=tokens.device)
        layers = () if self.reader is None else self.reader.feature_layers
        with layer_inputs(self.model, layers) as features:
            output = self.model(
                input_ids=tokens,
                attention_mask=self._masks(inputs, shape.num_slots),
                position_ids=positions,
                use_cache=True,
                **{self._cache_argument: self.cache},
                **more,
            )
        if self.reader is not None:
            self.reader.read(torch.cat(features, -1), places, first_row=first_row)
        return output

    def _masks(self, inputs: Inputs, num_slots: int) -> Tensor | dict[str, Tensor]:
        """Additive masks, packed for the query groups.

        One for a uniform model, else a dict by attention kind.
        """
        masks, positions = {}, inputs.positions
        for kind, window in self._windows.items():
            if inputs.sees is None:
                visible = _visible(positions, num_slots, window)
            else:
                visible = visible_slots(inputs.sees, positions, num_slots, window)
            mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=positions.device)
            mask.masked_fill_(~visible, -torch.inf)
            masks[kind] = attention.pack_mask(mask, self._groups)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _visible(positions: Tensor, num_slots: int, window: int | None) -> Tensor:
    """What positions `[rows, width]` see of a cache: bool `[rows, 1, width, num_slots]`."""
    slots = torch.arange(num_slots, device=positions.device)
    query = positions[:, None, :, None]
    visible = slots <= query
    if window is not None:
        visible &= slots > query - window
    return visible


def _kept(logits: Tensor, keep: int | None) -> Tensor:
    """The last `keep` places; a model that can choose made no others."""
    return logits if keep is None else logits[:, logits.shape[1] - keep :]


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's body calls its cache; the name changed in Transformers 5."""
    parameters = inspect.signature(model.base_model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _rounded(slots: int) -> int:
    return -(-slots // _SLOT_ROUNDING) * _SLOT_ROUNDING


def _require_interface(model: PreTrainedModel) -> None:
    """Refuse a class whose attention is its own: it would ignore slots and masks in silence."""
    if not getattr(model, "_supports_attention_backend", False):
        raise DecodingError(
            f"decoding with {type(model).__name__}",
            found="attention that does not go through Transformers' attention interface",
            expected="a class that supports attention backends",
            remedy="use a target of a supported family (see docs/support.md)",
        )


def _query_groups(config: Any) -> int:  # noqa: ANN401
    heads = int(config.num_attention_heads)
    return heads // int(getattr(config, "num_key_value_heads", None) or heads)
