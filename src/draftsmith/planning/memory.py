"""How much memory tensors take while a piece of code runs, and running code that has no numbers.

`PeakMemory` counts what torch makes and frees, on real tensors and on fake ones, which have shapes
but no memory. `KnownMasks` answers what fake tensors cannot: how many entries of a mask are true.
The attentions keep what the trainer's own keep. Knows nothing of drafts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

_ATEN = torch.ops.aten
_COPYING = (_ATEN.logsumexp.default,)  # they work on a copy of their input that nobody sees
PLAIN, FUSED = "draftsmith_planned_plain", "draftsmith_planned_fused"


class PeakMemory(TorchDispatchMode):
    """Counts the memory of tensors that operations make within the block.

    What was there before counts as nothing, and views count once.

    Attributes:
        now: Bytes held.
        peak: The most bytes held at once.
    """

    now: int
    peak: int

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no constructor
        self.now, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  torch's operators share no useful type
        types: Sequence[type],  # noqa: ARG002  torch's signature
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the operation; what it makes is counted until it is freed."""
        for tensor in _tensors(args, kwargs):
            self._hold(tensor, is_new=False)
        result = func(*args, **(kwargs or {}))
        if func in _COPYING:
            self.peak = max(self.peak, self.now + args[0].nbytes)
        for tensor in _tensors(result):
            self._hold(tensor, is_new=True)
        return result

    def _hold(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        num_bytes = storage.nbytes() if is_new else 0
        self._known.add(key)
        weakref.finalize(storage, self._release, key, num_bytes).atexit = False
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def _release(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


class KnownMasks(TorchDispatchMode):
    """Lets code that selects by a mask run on fake tensors.

    Every mask is taken to select the same number of entries; a number that is read from a tensor is
    the first of them.

    Args:
        num_selected: True entries of a mask.
        first: What reading a number gives.
    """

    def __init__(self, num_selected: int, *, first: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no constructor
        self._num_selected, self._first = num_selected, first

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  as above
        types: Sequence[type],  # noqa: ARG002
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the operation, or answer for it where its result's shape depends on numbers."""
        count = self._num_selected
        if func is _ATEN.nonzero.default:
            return args[0].new_empty(count, args[0].ndim, dtype=torch.long)
        if func is _ATEN.repeat_interleave.Tensor:
            return args[0].new_empty(count, dtype=torch.long)
        if func is _ATEN._local_scalar_dense.default:
            return self._first
        if func is _ATEN._grouped_mm.default:  # which fake tensors know in bfloat16 alone
            return args[0].new_empty(_grouped_shape(*args[:3]))
        if func is _ATEN.index.Tensor and (mask := _mask_of(args[1])) is not None:
            return args[0].new_empty(count, *args[0].shape[mask.ndim :])
        return func(*args, **(kwargs or {}))


def _mask_of(indices: Sequence[Tensor | None]) -> Tensor | None:
    """The mask, where a tensor is indexed by one alone."""
    index = indices[0]
    return index if index is not None and index.dtype == torch.bool else None


def _grouped_shape(left: Tensor, right: Tensor, ends: Tensor) -> tuple[int, ...]:
    """Of a product of rows by group with a matrix each, or of rows with rows, a matrix a group."""
    rows, columns = left.shape[0], right.shape[-1]
    return (rows, columns) if right.ndim > left.ndim else (len(ends), rows, columns)


def _tensors(*trees: object) -> Iterator[Tensor]:
    return (leaf for tree in trees for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


@contextmanager
def fake_tensors(*models: nn.Module) -> Iterator[None]:
    """Within the block every tensor is fake and claims to be on the CPU, those of `models`, too.

    Autocast works on such tensors, which it does not on the meta device.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in (module for model in models for module in model.modules()):
            for name, tensor in list(module.named_parameters(recurse=False)):
                fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                module.register_parameter(
                    name, nn.Parameter(fake, requires_grad=tensor.requires_grad)
                )
            for name, buffer in list(module.named_buffers(recurse=False)):
                module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype))
        yield


def register_attentions() -> None:
    """Make both attentions known to Transformers; they make no masks of their own."""
    AttentionInterface.register(PLAIN, _plain)
    AttentionInterface.register(FUSED, _fused)


def _plain(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **_options: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor]:
    """Attention that keeps its scores, as a CPU trains with."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    # A model makes a mask where it knows the attention by name.
    if attention_mask is None:
        attention_mask = scores.new_zeros(scores.shape[2:])
    scores = scores + attention_mask
    shares = nn.functional.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(shares, value).transpose(1, 2).contiguous(), shares


def _fused(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **_options: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attention that keeps what it read and gave, as torch's kernels of an accelerator do."""
    groups = query.shape[1] // key.shape[1]
    if attention_mask is not None:  # no kernel takes a mask and grouped heads
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if torch.is_autocast_enabled("cpu"):
        lower = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    attended: Tensor = _FusedAttention.apply(query, key, value, attention_mask)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2).contiguous(), None


class _FusedAttention(torch.autograd.Function):
    # torch types `ctx` by a class without the methods that it has.
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        normaliser = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, normaliser)
        return output

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
