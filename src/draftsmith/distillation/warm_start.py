"""A warm start: training that goes on from the weights of an earlier draft.

Only the draft's own weights are taken over. Its vocabulary is chosen anew from today's corpus, and
embedding and head are those of today's target, so the first loss is that of the earlier draft on
this target as far as the vocabularies agree. Output rows that a draft trained itself go to the same
tokens; those of new tokens are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.artifacts import short
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.drafts.joined import family_of
from draftsmith.drafts.manifest import read_manifest
from draftsmith.drafts.medusa import OWN_ROWS
from draftsmith.drafts.student import output_row_names, own_parameter_names
from draftsmith.errors import DraftMisfitError


@dataclass(frozen=True)
class DraftSource:
    """The draft that a training starts from.

    Attributes:
        directory: What `save_draft` wrote.
        pair_digest: The registered pair that the draft belongs to.
    """

    directory: Path
    pair_digest: str

    @property
    def draft_digest(self) -> str:
        """Identity of the draft."""
        return read_manifest(self.directory).digest

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers that a student stands for."""
        return tuple(read_manifest(self.directory).architecture.get("layers", ()))


def source_of(start: Mapping[str, Any], pairs: Path) -> DraftSource | None:
    """The draft that a recipe's entry of build/start.json takes; None where it takes none.

    Args:
        start: The entry.
        pairs: Folder of fetched pairs.
    """
    digest = start["source_pair_digest"]
    return None if digest is None else DraftSource(pairs / short(digest) / "draft", digest)


def start_from(
    source: DraftSource,
    student: PreTrainedModel,
    target: PreTrainedModel,
    *,
    layers: Sequence[int],
    token_ids: Tensor | None,
) -> None:
    """Give `student` the weights of the source's draft, in place.

    Args:
        source: The draft; its files are verified.
        student: A student of `target`, or heads on its states.
        target: Live target, not necessarily the one that the draft was distilled from.
        layers: The layers of the target that the student stands for, or that the head reads.
        token_ids: int64 `[entries]`, the student's vocabulary; None is the target's.

    Raises:
        DraftMisfitError: The draft has another family, other layers or other shapes.
        DraftError: Its files are damaged.
    """
    manifest = read_manifest(source.directory)
    kind = f"family {manifest.family} and type {manifest.architecture.get('model_type')}"
    expected = f"family {family_of(student)} and type {student.config.model_type}"
    if kind != expected:
        raise _misfit(source, kind, expected)
    if list(manifest.architecture["layers"]) != list(layers):
        found = f"a draft of layers {manifest.architecture['layers']}"
        raise _misfit(source, found, f"layers {list(layers)}, which the recipe names")
    draft = load_draft(source.directory, target, target_digest=None)
    theirs, ours = _own(draft.model), _own(student)
    rows = set(output_row_names(student))
    for name in theirs:
        if name in ours and (name in rows or name.startswith(OWN_ROWS)):
            theirs[name] = _realigned(theirs[name], draft.token_ids, ours[name], token_ids)
    for name in sorted({*ours, *theirs}):
        shapes = [list(state[name].shape) if name in state else None for state in (theirs, ours)]
        if shapes[0] != shapes[1]:
            raise _misfit(source, f"{name} of shape {shapes[0]}", f"shape {shapes[1]}")
    student.load_state_dict(theirs, strict=False)


def _own(model: PreTrainedModel) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: state[name] for name in own_parameter_names(model)}


def _realigned(rows: Tensor, ids: Tensor | None, onto: Tensor, onto_ids: Tensor | None) -> Tensor:
    """`onto` with the `rows` of those tokens that both vocabularies have."""
    theirs, ours = (
        torch.arange(len(own), device=onto.device) if known is None else known.to(onto.device)
        for own, known in ((rows, ids), (onto, onto_ids))
    )
    places = torch.full((int(torch.cat([theirs, ours]).max()) + 1,), -1, device=onto.device)
    places[theirs] = torch.arange(len(theirs), device=onto.device)
    origin = places[ours]
    result = onto.clone()
    result[origin >= 0] = rows[origin[origin >= 0]]
    return result


def _misfit(source: DraftSource, found: str, expected: str) -> DraftMisfitError:
    return DraftMisfitError(
        f"starting from the draft in {source.directory}",
        found=found,
        expected=expected,
        remedy="set start.action to retrain (or drift.on_match to reuse or retrain), or bring back "
        "the recipe that built the draft",
    )
