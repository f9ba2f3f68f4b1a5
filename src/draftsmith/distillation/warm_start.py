"""A warm start: training that goes on from the weights of an earlier draft.

Only the draft's own weights are taken over. Its vocabulary is chosen anew from today's corpus, and
embedding and head are those of today's target, so the first loss is that of the earlier draft on
this target as far as the vocabularies agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.artifacts import short
from draftsmith.drafts.checkpoint import load_draft
from draftsmith.drafts.eagle import EagleHead
from draftsmith.drafts.manifest import EAGLE, STUDENT, read_manifest
from draftsmith.drafts.student import own_parameter_names
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
    source: DraftSource, student: PreTrainedModel, target: PreTrainedModel, layers: Sequence[int]
) -> None:
    """Give `student` the weights of the source's draft, in place.

    Args:
        source: The draft; its files are verified.
        student: A student of `target`, or a head on its features.
        target: Live target, not necessarily the one that the draft was distilled from.
        layers: The layers of the target that the student stands for, or that the head reads.

    Raises:
        DraftMisfitError: The draft has another family, other layers or other shapes.
        DraftError: Its files are damaged.
    """
    manifest = read_manifest(source.directory)
    kind = f"family {manifest.family} and type {manifest.architecture.get('model_type')}"
    family = EAGLE if isinstance(student, EagleHead) else STUDENT
    expected = f"family {family} and type {student.config.model_type}"
    if kind != expected:
        raise _misfit(source, kind, expected)
    if list(manifest.architecture["layers"]) != list(layers):
        found = f"a draft of layers {manifest.architecture['layers']}"
        raise _misfit(source, found, f"layers {list(layers)}, which the recipe names")
    theirs, ours = (
        model.state_dict()
        for model in (load_draft(source.directory, target, target_digest=None).model, student)
    )
    own = own_parameter_names(student)
    for name in own:
        if name not in theirs or theirs[name].shape != ours[name].shape:
            shape = list(theirs[name].shape) if name in theirs else None
            raise _misfit(source, f"{name} of shape {shape}", f"shape {list(ours[name].shape)}")
    student.load_state_dict({name: theirs[name] for name in own}, strict=False)


def _misfit(source: DraftSource, found: str, expected: str) -> DraftMisfitError:
    return DraftMisfitError(
        f"starting from the draft in {source.directory}",
        found=found,
        expected=expected,
        remedy="set start.action to retrain (or drift.on_match to reuse or retrain), or bring back "
        "the recipe that built the draft",
    )
