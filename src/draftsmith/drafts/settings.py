"""A recipe: one file under conf/draft/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StudentConfig:
    """A recipe of family `student`.

    Attributes:
        family: `student`.
        layers: Indices of the target's layers to keep, in order; negative ones count from the end.
        vocabulary_size: Entries of the draft's vocabulary; 0 is the target's whole vocabulary.
    """

    family: Literal["student"]
    layers: tuple[int, ...]
    vocabulary_size: int

    def __post_init__(self) -> None:
        """Check ranges."""
        if not self.layers:
            raise ValueError("layers must name at least one layer of the target")
        if self.vocabulary_size < 0:
            raise ValueError("vocabulary_size must be 0 (whole vocabulary) or more")
