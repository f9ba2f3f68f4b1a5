"""Questions to one registered model: its versions, their tags, who holds which alias.

Reads only, and waits for no writer. Knows nothing of uploads, and nothing of why a version is
promoted.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mlflow.exceptions import MlflowException

from draftsmith.errors import RegistryError
from draftsmith.registry.mlflow_records import PROMOTION, Move, MoveLog
from draftsmith.registry.pair import (
    DAMAGED_TAG,
    LIVE_DRIFT_TAG,
    QUARANTINE_TAG,
    PairVersion,
    RegisteredPair,
)

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

    from draftsmith.registry.mlflow_connection import Connection
    from draftsmith.registry.settings import RegistryConfig

CHAMPION = "champion"
CHALLENGER = "challenger"
_NAME = re.compile(r"[A-Za-z0-9._ -]+")
_PAGE = 200


class Catalog:
    """The versions of one registered model.

    Raises:
        RegistryError: The configured name cannot be a model's.
    """

    def __init__(self, connection: Connection, config: RegistryConfig) -> None:
        """Look at the model that `config` names."""
        if not _NAME.fullmatch(config.name):
            raise RegistryError(
                "reading registry.name",
                found=repr(config.name),
                expected="letters, digits, dots, dashes, spaces and underscores",
                remedy="rename it in the configuration",
            )
        self.connection = connection
        self.client = connection.client
        self.name = config.name
        self._experiment = config.experiment

    def experiment_id(self) -> str:
        """The experiment that holds uploads and records, created at need."""
        with self.connection.locked():
            return self.connection.experiment_id(self._experiment)

    def aliases(self) -> dict[str, str]:
        """Alias -> version; empty while nothing is registered."""
        try:
            found = self.client.get_registered_model(self.name).aliases
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return {}
            raise
        return {str(alias): str(version) for alias, version in dict(found).items()}

    def search(self, **tags: str) -> list[ModelVersion]:
        """Versions that carry these tags, oldest first."""
        terms = [f"name = '{self.name}'", *(f"tags.{key} = '{tags[key]}'" for key in tags)]
        found: list[ModelVersion] = []
        token: str | None = None
        while True:
            page = self.client.search_model_versions(
                " and ".join(terms), max_results=_PAGE, page_token=token
            )
            found.extend(page)
            token = page.token
            if not token:
                return sorted(found, key=lambda item: int(item.version))

    def versions(self) -> list[PairVersion]:
        """All versions, oldest first; a live-drift tag counts for every version of its draft."""
        aliases, found = self.aliases(), self.search()
        drifted = {v.tags.get("draft_digest") for v in found if LIVE_DRIFT_TAG in v.tags}
        return [self._pair_version(version, aliases, drifted) for version in found]

    def existing(self, version: str | None) -> RegisteredPair | None:
        """The pair of a version; None when there is no such version."""
        return next((item.pair for item in self.versions() if item.pair.version == version), None)

    def resolve(self, reference: str) -> PairVersion:
        """The version behind `@alias` or a version number.

        Raises:
            RegistryError: There is none.
        """
        versions = self.versions()
        for item in versions:
            held = [item.pair.version, *(f"@{alias}" for alias in item.aliases)]
            if reference in held:
                return item
        known = ", ".join(f"@{name}" for name in sorted(self.aliases())) or "no alias"
        raise RegistryError(
            f"resolving {reference} of {self.name}",
            found=f"{known} and {len(versions)} version(s)",
            expected="an alias or a version that exists",
            remedy="run `draftsmith pairs` to see them, or `dvc repro` to register one",
        )

    def log(self) -> MoveLog:
        """The record of the champion's moves, for one who moves it."""
        return MoveLog(self.client, self.experiment_id(), self.name)

    def moves(self) -> list[Move]:
        """Completed moves of the champion alias, and releases, oldest first; takes no lock."""
        experiment = self.client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return []
        log = MoveLog(self.client, str(experiment.experiment_id), self.name)
        return log.moves(self.aliases().get(CHAMPION))

    def recorded_predecessor(self, version: str) -> str | None:
        """The version that `version` replaced when it was last promoted."""
        moves = self.moves()
        promotions = [move for move in moves if move.version == version and move.kind == PROMOTION]
        return promotions[-1].predecessor if promotions else None

    def _pair_version(
        self, version: ModelVersion, aliases: Mapping[str, str], drifted: Collection[str | None]
    ) -> PairVersion:
        number = str(version.version)
        pair = RegisteredPair.from_tags(self.name, number, version.tags)
        created = datetime.datetime.fromtimestamp(version.creation_timestamp / 1000, datetime.UTC)
        return PairVersion(
            pair=replace(pair, live_drift=pair.draft_digest in drifted),
            aliases=tuple(sorted(alias for alias, held in aliases.items() if held == number)),
            tags=dict(version.tags),
            created_utc=created.isoformat(timespec="seconds"),
            quarantine=version.tags.get(QUARANTINE_TAG),
            damage=version.tags.get(DAMAGED_TAG),
        )
