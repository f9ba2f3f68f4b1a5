"""Where served pairs come from: a folder, a version, or whoever an alias names at the moment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.registry.generation import Pair
from draftsmith.registry.loading import load_pair, parse_uri
from draftsmith.registry.settings import RegistryConfig
from draftsmith.targets.loading import LoadedTarget

if TYPE_CHECKING:
    from draftsmith.registry.mlflow_store import PairStore
    from draftsmith.registry.pair import PairVersion


@dataclass(frozen=True)
class PairSource:
    """The address of a pair, and how it is loaded.

    Attributes:
        uri: `models:/<name>@<alias>`, `models:/<name>/<version>`, or a folder.
        root: The project's folder.
        target: Folder of the target's checkpoint, when it is not where the registry says.
        device: Where both models go, in torch's words.
    """

    uri: str
    root: Path
    target: str | None = None
    device: str = "cpu"

    @property
    def is_alias(self) -> bool:
        """Whether another pair may take over."""
        return self._is_registered and self._reference.startswith("@")

    @property
    def name(self) -> str:
        """What callers put under `model`."""
        return parse_uri(self.uri)[0] if self._is_registered else Path(self.uri).resolve().name

    def version(self) -> str | None:
        """The version that the address names now; None for a folder.

        Raises:
            RegistryError: There is none, or the registry cannot be reached.
        """
        return self.resolve().pair.version if self._is_registered else None

    def resolve(self) -> PairVersion:
        """What the registry says of it now.

        Raises:
            RegistryError: It names no version, or the registry cannot be reached.
        """
        return self._store.resolve(self._reference)

    def load(self, version: str | None, *, beside: Pair | None = None) -> Pair:
        """Load a version's pair; the target of another one is used again where it is the same.

        Raises:
            DraftsmithError: See `load_pair`.
        """
        if version is None:
            return load_pair(self.uri, root=self.root, target=self.target, device=self.device)
        target: str | LoadedTarget | None = self.target
        if beside is not None:
            pair = self._store.resolve(version).pair
            if pair.target_digest == beside.record.target_digest:
                target = beside.target
        uri = f"models:/{self.name}/{version}"
        return load_pair(uri, root=self.root, target=target, device=self.device)

    @cached_property
    def _store(self) -> PairStore:
        from draftsmith.registry.mlflow_store import PairStore  # noqa: PLC0415  folders need none

        return PairStore(self.root, RegistryConfig(name=self.name, experiment=self.name))

    @property
    def _is_registered(self) -> bool:
        return self.uri.startswith("models:")

    @property
    def _reference(self) -> str:
        return parse_uri(self.uri)[1]
