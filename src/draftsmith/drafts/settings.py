"""A recipe: one file under conf/draft/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class LayerChoice:
    """Layers that are chosen by measurement.

    Attributes:
        choose: How many.
    """

    choose: int

    def __post_init__(self) -> None:
        """Check the range; the target's number of layers is not known yet."""
        if self.choose < 1:
            raise ValueError("choose must be at least 1 layer of the target")


@dataclass(frozen=True)
class StudentConfig:
    """A recipe of family `student`.

    Attributes:
        family: `student`.
        layers: Indices of the target's layers to keep, in order, negative ones counting from the
            end; or how many to choose.
        vocabulary_size: Entries of the draft's vocabulary; 0 is the target's whole vocabulary.
        own_head: Output rows are trained, too, from the target's on, and stored with the draft.
    """

    family: Literal["student"]
    layers: tuple[int, ...] | LayerChoice
    vocabulary_size: int
    own_head: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        if not self.layers:
            raise ValueError("layers must name at least one layer of the target")
        if self.vocabulary_size < 0:
            raise ValueError("vocabulary_size must be 0 (whole vocabulary) or more")


@dataclass(frozen=True)
class EagleConfig:
    """A recipe of family `eagle`: one layer that reads the target's features.

    Attributes:
        family: `eagle`.
        feature_layers: The target's layers whose inputs are read; negative ones count from the end.
            None are a low, a middle and the last one.
        vocabulary_size: Entries of the draft's vocabulary; 0 is the target's whole vocabulary.
        unroll: Draft positions that it is trained for: behind the first it reads its own features.
        step_decay: Weight of a position's loss over that of the position before it.
        own_head: As that of a student.
    """

    family: Literal["eagle"]
    feature_layers: tuple[int, ...]
    vocabulary_size: int
    unroll: int
    step_decay: float
    own_head: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.vocabulary_size < 0:
            raise ValueError("vocabulary_size must be 0 (whole vocabulary) or more")
        if self.unroll < 1:
            raise ValueError("unroll must be at least 1")
        if not 0 < self.step_decay <= 1:
            raise ValueError("step_decay must be above 0 and at most 1")


@dataclass(frozen=True)
class MedusaConfig:
    """A recipe of family `medusa`: heads that read the target's last hidden state.

    Attributes:
        family: `medusa`.
        num_heads: Draft positions, one a head.
        num_blocks: Residual blocks a head.
        own_heads: Each head trains output rows of its own instead of reading the target's.
        vocabulary_size: Entries of the draft's vocabulary; 0 is the target's whole vocabulary.
        head_decay: Weight of a head's loss over that of the head before it.
    """

    family: Literal["medusa"]
    num_heads: int
    num_blocks: int
    own_heads: bool
    vocabulary_size: int
    head_decay: float

    def __post_init__(self) -> None:
        """Check ranges."""
        if min(self.num_heads, self.num_blocks) < 1:
            raise ValueError("num_heads and num_blocks must be at least 1")
        if self.vocabulary_size < 0:
            raise ValueError("vocabulary_size must be 0 (whole vocabulary) or more")
        if not 0 < self.head_decay <= 1:
            raise ValueError("head_decay must be above 0 and at most 1")


@dataclass(frozen=True)
class CheckpointConfig:
    """A recipe of family `checkpoint`: a draft that was trained elsewhere, taken over as it is.

    Attributes:
        family: `checkpoint`.
        source: Folder that it came from; the copy in models/imported/ is looked for first.
        digest: Of its files, so that another checkpoint is another recipe.
    """

    family: Literal["checkpoint"]
    source: str
    digest: str

    def __post_init__(self) -> None:
        """Check the digest's form."""
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError("digest must be 64 hex digits: `draftsmith import-draft` writes it")


TrainedConfig = StudentConfig | EagleConfig | MedusaConfig
RecipeConfig = TrainedConfig | CheckpointConfig
