"""The registered model's own page: its description follows the champion.

Call with the registry's lock held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftsmith.registry.description import model_description
from draftsmith.registry.mlflow_catalog import CHAMPION
from draftsmith.registry.mlflow_connection import redact

if TYPE_CHECKING:
    from draftsmith.registry.mlflow_catalog import Catalog


def describe(catalog: Catalog) -> None:
    """Write the description where the champion, or what is known of it, is not what it says."""
    held = catalog.aliases().get(CHAMPION)
    champion = next((item for item in catalog.versions() if item.pair.version == held), None)
    moves = reversed(catalog.moves())
    since = next(
        (move.time_utc for move in moves if move.moved_alias and move.version == held), None
    )
    told = redact(model_description(catalog.name, champion, since))
    if catalog.client.get_registered_model(catalog.name).description != told:
        catalog.client.update_registered_model(catalog.name, description=told)
