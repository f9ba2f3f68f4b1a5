"""Delete registered versions that nothing needs; records of promotions and evidence stay.

A version's files are marked as deleted: `mlflow gc` gives their disk space back.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from draftsmith.registry.mlflow_connection import translated
from draftsmith.registry.retention import Retention, retention

if TYPE_CHECKING:
    from draftsmith.registry.mlflow_catalog import Catalog

_LOGGED_MODEL = "models:/m-"
_LOG = logging.getLogger(__name__)


@translated("pruning the registry")
def prune(catalog: Catalog, *, keep: int, dry_run: bool) -> Retention:
    """Delete every version that `retention` does not keep; with `dry_run` only say which.

    Decided and done under the registry's lock, so that no promotion comes between.
    """
    with catalog.connection.locked():
        moved = [move.version for move in catalog.moves() if move.moved_alias]
        decided = retention(catalog.versions(), moved, keep=keep)
        if not dry_run:
            for version in decided.removed:
                _delete(catalog, version)
        return decided


def _delete(catalog: Catalog, version: str) -> None:
    source = str(catalog.client.get_model_version(catalog.name, version).source)
    catalog.client.delete_model_version(catalog.name, version)
    if source.startswith(_LOGGED_MODEL):
        catalog.client.delete_logged_model(source.rpartition("/")[2])
    _LOG.info("event=pruned name=%s version=%s", catalog.name, version)
