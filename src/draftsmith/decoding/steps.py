"""Steps of fixed shape: forwards padded to a few shapes, each compiled or captured once.

A decoding step is small, so an accelerator waits for the host that launches its kernels one by one.
Code that was compiled, or kernels that were captured, know one shape and no value of the host; so
rows, positions and slots are padded to the next of a few sizes. A padded position is token 0 at
position 0; its key and value go to its row's scratch slot, which no query sees, and a padded row
holds such positions alone. Rows from the batch's end on may belong to a prompt that is being read:
nothing of it changes. What the places of a tree see is an input like its tokens, so all trees of a
width share a step. Knows nothing of models or tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.errors import DecodingError

_WARM_UPS = 2  # libraries take their workspaces at the first calls, which a capture must not see


class Shape(NamedTuple):
    """What a step is built for.

    Attributes:
        rows: Cache rows from 0 on.
        width: Positions of a row.
        num_slots: Slots that are read.
        num_kept: Logits of so many last positions; None is all.
        is_tree: Whether the positions are the places of a tree.
    """

    rows: int
    width: int
    num_slots: int
    num_kept: int | None
    is_tree: bool = False


class Inputs(NamedTuple):
    """Tensors of a step.

    Attributes:
        tokens: Ids, int64 `[rows, width]`.
        positions: Where they stand in their texts, same shape.
        places: The slots that their keys and values are written to, same shape.
        sees: bool `[width, width]`: which places of a tree each of them sees; None of a chain.
    """

    tokens: Tensor
    positions: Tensor
    places: Tensor
    sees: Tensor | None = None


Run = Callable[[Inputs, Shape], Tensor]
Step = Callable[[Inputs], Tensor]
# Makes a step of a run: what to run, its shape, and inputs to begin with.
BuildStep = Callable[[Run, Shape, Inputs], Step]


def bucket(size: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds `size` (1 or more)."""
    power = 1 << (size - 1).bit_length()
    smaller = power * 3 // 4
    return smaller if size <= smaller else power


class StaticSteps:
    """Steps by shape, built when they are first wanted.

    Args:
        run: The forward; its result is `[rows, num_kept or width, ...]`.
        build: Compiles or captures it.
    """

    def __init__(self, run: Run, build: BuildStep) -> None:
        self._run, self._build = run, build
        self._steps: dict[Shape, Step] = {}

    def forget(self) -> None:
        """Drop all steps: the memory that they were built on is no longer the cache's."""
        self._steps.clear()

    def __call__(
        self, inputs: Inputs, *, scratch: int, num_slots: int, keep: int | None = None
    ) -> Tensor:
        """Run padded, and take the padding off again.

        Padding stands in front, so that the last positions are the last whatever the width was:
        2 rows of 5 positions are the last 5 of 6 in the first 2 rows of 2, and 3 rows of them the
        first 3 rows of 3. Of a tree, whose places are told by its first one, it stands behind.

        Args:
            inputs: For the cache rows from 0 on.
            scratch: The slot that takes what padding writes.
            num_slots: Slots that are read.
            keep: Only the last `keep` positions; None is all, and of a tree it must be.
        """
        rows, width = inputs.tokens.shape
        is_tree = inputs.sees is not None
        shape = Shape(bucket(rows), bucket(width), num_slots, keep, is_tree)
        padded = _padded(inputs, shape, scratch)
        if shape not in self._steps:
            self._steps[shape] = self._build(self._run, shape, padded)
        logits = self._steps[shape](padded)[:rows]
        return logits[:, :width] if is_tree else logits[:, -(width if keep is None else keep) :]


def _padded(inputs: Inputs, shape: Shape, scratch: int) -> Inputs:
    tokens, positions, places, sees = inputs
    more = shape.width - tokens.shape[1]
    sides = (more, 0) if sees is None else (0, more)
    padding = (*sides, 0, shape.rows - len(tokens))
    if sees is not None:
        sees = pad(sees, (0, more, 0, more))
        sees[:, 0] = True  # a position that saw nothing would be NaN
    return Inputs(
        pad(tokens, padding), pad(positions, padding), pad(places, padding, value=scratch), sees
    )


def compiled(backend: str = "inductor") -> BuildStep:
    """Steps that `torch.compile` makes, one a shape.

    Args:
        backend: Of `torch.compile`; inductor needs a C++ compiler on a CPU, Triton on CUDA.
    """

    def build(run: Run, shape: Shape, _: Inputs) -> Step:
        def step(inputs: Inputs) -> Tensor:
            return run(inputs, shape)

        # torch keeps what it compiled with the code object, and only a few for each.
        step.__code__ = step.__code__.replace()
        made: Step = torch.compile(step, backend=backend, dynamic=False)
        return made

    return build


# Runs an action and keeps its kernels: how to run them again, and where their result then lies.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


def graphed(capture: Capture | None = None) -> BuildStep:
    """Steps that are captured as CUDA graphs, one a shape.

    Args:
        capture: How; None captures with CUDA, all graphs in one pool of memory.
    """
    keep_kernels = capture or CudaCapture()

    def build(run: Run, shape: Shape, example: Inputs) -> Step:
        tokens, positions, places, sees = example
        own_sees = None if sees is None else sees.clone()
        buffers = Inputs(tokens.clone(), positions.clone(), places.clone(), own_sees)
        replay, result = keep_kernels(lambda: run(buffers, shape))

        def step(inputs: Inputs) -> Tensor:
            for buffer, values in zip(buffers, inputs, strict=True):
                if buffer is not None and values is not None:
                    buffer.copy_(values)
            replay()
            return result.clone()  # graphs share memory: the next replay may overwrite it

        return step

    return build


class CudaCapture:
    """Captures with CUDA; the graphs of one object share a pool and run on one device."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch names no public type of it

    def __call__(self, action: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture an action that waits for nothing and takes no value from the host.

        Raises:
            DecodingError: It does.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                action()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = action()
        except RuntimeError as error:
            raise DecodingError(
                "capturing a step as a CUDA graph",
                found=str(error).partition("\n")[0],
                expected="a forward that waits for nothing and whose shapes depend on no values",
                remedy="decode this model without captured steps",
            ) from error
        return graph.replay, result
