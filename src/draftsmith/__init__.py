"""draftsmith: the system of record for speculative-decoding pairs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.registry.loading import load_pair

__all__ = ["load_pair"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  a module attribute may be anything
    if name == "load_pair":
        # By name: importing draftsmith stays light, and no stage depends on the registry for it.
        return importlib.import_module("draftsmith.registry.loading").load_pair
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
