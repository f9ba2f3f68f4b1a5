"""Isolated forwards over the slot cache, timed: what a round should cost, by batch and context.

Measured once and kept on disk, because a service that adapts its draft length needs them at start.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from draftsmith import provenance
from draftsmith.artifacts import digest_json, read_json, short, write_json
from draftsmith.decoding import SlotModel, Tree
from draftsmith.decoding.features import FeatureReader
from draftsmith.decoding.proposers import reader_of
from draftsmith.decoding.tree import tensors_of
from draftsmith.drafts.joined import drafter_of
from draftsmith.errors import ArtifactError
from draftsmith.evaluation.cost_model import ForwardCosts, RoundCosts
from draftsmith.evaluation.timing import median_ms

_LOG = logging.getLogger(__name__)

_WIDTHS = (1, 2, 3, 5, 9, 17)  # measured; those between are interpolated
_CONTEXTS = (64, 512, 2048)
_PLAIN = "plain"  # an action: the target without a reader
_PACKAGES = ("draftsmith", "torch", "transformers")
_SCHEMA = 4  # of kept costs; since 4 every verification holds what a draft reads of it


@dataclass(frozen=True)
class Grid:
    """What is measured.

    Attributes:
        rows: Batch sizes.
        contexts: Tokens before the positions of a forward.
        max_width: Most positions of a verification.
        repeats: Repetitions of each forward; the median counts.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    max_width: int
    repeats: int = 5

    @classmethod
    def covering(cls, max_rows: int, max_width: int) -> Grid:
        """Batch sizes 1, 4, 16, ... up to `max_rows`, and a few contexts."""
        rows = [size for size in (4**power for power in range(8)) if size < max_rows]
        return cls((*rows, max_rows), _CONTEXTS, max_width)

    @property
    def widths(self) -> list[int]:
        """Positions of the verifications that are timed."""
        return measured_widths(self.max_width)


def measured_widths(max_width: int) -> list[int]:
    """A few numbers of positions up to `max_width`; `interpolated` fills in those between."""
    return [*(width for width in _WIDTHS if width < max_width), max_width]


@torch.inference_mode()
def forward_costs(
    target: PreTrainedModel | SlotModel,
    draft: PreTrainedModel | SlotModel,
    widths: Sequence[int],
    *,
    batch_size: int,
    context: int,
    repeats: int,
) -> ForwardCosts:
    """Times of the target over `widths` positions and of the draft over one, taken in turn.

    A draft that reads the target's features takes those of every verification, even of a round
    without drafts: later ones start from them. The plain step of an engine that has no draft hands
    over nothing.

    Args:
        target: Live target; as a `SlotModel` where its steps are compiled or captured.
        draft: Live draft, likewise.
        widths: Positions of a verification; 1 is a round without drafts.
        batch_size: Rows.
        context: Tokens before these positions; fewer where the models hold no more.
        repeats: Repetitions; the median counts.
    """
    models = SlotModel.of(target), SlotModel.of(draft)
    context = min(context, _longest_context(models, max(widths)))
    widest = max(widths)
    theirs, ours = (
        IsolatedForwards(model, rows=batch_size, context=context, width=widest) for model in models
    )
    reader = reader_beside(models[1].model, rows=batch_size, slots=context + widest)
    measured = sorted({1, *widths})
    actions = {f"target-{width}": partial(theirs.run, width, reader) for width in measured}
    if reader is not None:
        actions[_PLAIN] = partial(theirs.run, 1)
    times = median_ms({"draft": partial(ours.run, 1), **actions}, repeats)
    verify = {width: times[f"target-{width}"] for width in measured}
    at_once = bool(getattr(models[1].model, "drafts_at_once", False))
    return ForwardCosts(times.get(_PLAIN, verify[1]), times["draft"], verify, at_once)


class IsolatedForwards:
    """Forwards of a model behind a context that every row of its cache holds.

    Args:
        model: Over its cache.
        rows: Batch size.
        context: Tokens of a row.
        width: Positions of the widest forward.
    """

    def __init__(self, model: SlotModel, *, rows: int, context: int, width: int) -> None:
        self.model, self._context = model, context
        self._starts = torch.full((rows, 1), context, device=model.device)
        _fill(model, rows=rows, context=context, slots=context + width)

    def run(self, shape: int | Tree, reader: FeatureReader | None = None) -> None:
        """A forward over so many positions, or over the places of a tree.

        Args:
            shape: Of the forward.
            reader: Gets its features; None is nobody.
        """
        tree = shape if isinstance(shape, Tree) else None
        if isinstance(shape, Tree):
            steps = tensors_of(shape, self.model.device).depths
        else:
            steps = torch.arange(shape, device=self.model.device)
        places = self._starts + steps
        self.model.reader = reader
        self.model.forward(places % 100, places, span=self._context + len(steps), tree=tree)
        self.model.reader = None


def reader_beside(draft: PreTrainedModel, *, rows: int, slots: int) -> FeatureReader | None:
    """What takes the target's features for a draft when it decodes; None where nothing does."""
    proposer = drafter_of(draft)
    proposer.reserve(rows=rows, slots=slots)
    return reader_of(proposer)


def _fill(model: SlotModel, *, rows: int, context: int, slots: int) -> None:
    """Hold a context in every row: memory that nobody wrote is faster than any real cache."""
    model.reserve(rows=rows, slots=slots)
    if context:
        places = torch.arange(context, device=model.device)[None]
        model.forward(places % 100, places, span=context, keep=0)
        for row in range(1, rows):
            model.move_row(0, row)


def round_costs(target: PreTrainedModel, draft: PreTrainedModel, grid: Grid) -> RoundCosts:
    """Every cell of a grid, as far as the models hold its contexts.

    Widths between the measured ones are interpolated.
    """
    limit = _longest_context((SlotModel(target), SlotModel(draft)), grid.max_width)
    contexts = tuple(sorted({min(context, limit) for context in grid.contexts}))
    cells = {}
    for size, context in itertools.product(grid.rows, contexts):
        measured = forward_costs(
            target,
            draft,
            grid.widths,
            batch_size=size,
            context=context,
            repeats=grid.repeats,
        )
        cells[size, context] = interpolated(measured, grid.max_width)
    return RoundCosts(grid.rows, contexts, cells)


def _longest_context(models: Sequence[SlotModel], width: int) -> int:
    """Tokens that all of them hold before a forward of so many positions."""
    return min(model.max_positions for model in models) - width


def interpolated(costs: ForwardCosts, max_width: int) -> ForwardCosts:
    """The same with every number of positions from 1 to `max_width`."""
    known = sorted(costs.verify_ms)
    widths = range(1, max_width + 1)
    times = np.interp(widths, known, [costs.verify_ms[width] for width in known])
    verify = dict(zip(widths, times.tolist(), strict=True))
    return dataclasses.replace(costs, verify_ms=verify)


def cost_key(pair_digest: str, model: PreTrainedModel, grid: Grid) -> dict[str, Any]:
    """All that kept costs depend on: pair, device, dtype, versions and what is measured."""
    device = model.device
    is_gpu = device.type == "cuda"
    return {
        "schema": _SCHEMA,
        "pair_digest": pair_digest,
        "device": torch.cuda.get_device_name(device) if is_gpu else provenance.processor_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "grid": asdict(grid),
        "packages": {name: provenance.package_version(name) for name in _PACKAGES},
    }


def kept_costs(
    folder: Path, key: Mapping[str, Any], measure: Callable[[], RoundCosts]
) -> RoundCosts:
    """Costs measured earlier under exactly this key, else measured now and kept.

    A file that is damaged or cannot be written costs the time of measuring again and nothing else.

    Args:
        folder: Where such files lie.
        key: What the costs depend on (JSON values).
        measure: Measures them.
    """
    held = held_costs(folder, key)
    if held is not None:
        return held
    costs = measure()
    try:
        path = _costs_file(folder, key)
        write_json(path, {"schema": 1, "key": dict(key), "cells": _to_json(costs)})
    except ArtifactError as error:
        _LOG.warning("event=costs_not_kept error=%s", error)
    return costs


def held_costs(folder: Path, key: Mapping[str, Any]) -> RoundCosts | None:
    """Costs measured earlier under exactly this key; None where there are none that can be read."""
    path = _costs_file(folder, key)
    try:
        return _from_json(read_json(path)["cells"])
    except (ArtifactError, KeyError, TypeError, ValueError, AttributeError) as error:
        _LOG.info("event=no_costs file=%s reason=%s", path.name, type(error).__name__)
        return None


def _costs_file(folder: Path, key: Mapping[str, Any]) -> Path:
    return folder / f"{short(digest_json(key))}.json"


def _to_json(costs: RoundCosts) -> list[dict[str, Any]]:
    return [
        {"rows": rows, "context": context, **asdict(cell)}
        for (rows, context), cell in costs.cells.items()
    ]


def costs_from_json(entry: Mapping[str, Any]) -> ForwardCosts:
    """Costs as `asdict` and JSON made them."""
    return ForwardCosts(
        float(entry["target_step_ms"]),
        float(entry["draft_step_ms"]),
        {int(width): float(ms) for width, ms in entry["verify_ms"].items()},
        bool(entry.get("drafts_at_once", False)),
    )


def _from_json(entries: Sequence[Mapping[str, Any]]) -> RoundCosts:
    cells = {
        (int(entry["rows"]), int(entry["context"])): costs_from_json(entry) for entry in entries
    }
    rows, contexts = ({cell[axis] for cell in cells} for axis in (0, 1))
    if len(cells) != len(rows) * len(contexts) or not cells:
        raise ValueError("cells are missing")
    return RoundCosts(tuple(sorted(rows)), tuple(sorted(contexts)), cells)
