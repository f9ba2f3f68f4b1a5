"""Configuration of the registry (section `registry` of the effective configuration)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RegistryConfig:
    """Where pairs are registered.

    Attributes:
        name: Registered model whose versions are the pairs, as in `models:/<name>@champion`.
        experiment: MLflow experiment that holds uploads and the records of promotions.
        include_target: Copy the target's weights into every version, not only its reference.
    """

    name: str
    experiment: str
    include_target: bool = False
