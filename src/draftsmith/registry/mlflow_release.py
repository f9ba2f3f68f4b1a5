"""Taking a version out of quarantine, on record: the way back for what was barred by mistake."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from draftsmith.errors import RegistryError
from draftsmith.registry.mlflow_catalog import CHAMPION
from draftsmith.registry.mlflow_connection import redact, translated
from draftsmith.registry.mlflow_records import RELEASE
from draftsmith.registry.pair import QUARANTINE_TAG

if TYPE_CHECKING:
    from draftsmith.registry.mlflow_catalog import Catalog
    from draftsmith.registry.pair import PairVersion

_LOG = logging.getLogger(__name__)


@translated("taking a version out of quarantine")
def release(catalog: Catalog, reference: str, *, reason: str) -> PairVersion:
    """Take the quarantine off a version; the next run may propose and promote it again.

    The record is begun before the tag goes and finished after it, so that of a release whose
    process died, or was refused, the tag says whether it happened.

    Args:
        catalog: The versions.
        reference: Version or @alias.
        reason: Why; recorded with what the quarantine was for.

    Returns:
        The version as it was.

    Raises:
        RegistryError: It is in no quarantine.
    """
    with catalog.connection.locked():
        champion, log = catalog.aliases().get(CHAMPION), catalog.log()
        item = catalog.resolve(reference)
        version = item.pair.version
        if item.quarantine is None:
            log.settle(champion)  # of one that died when the tag was gone
            raise RegistryError(
                f"taking version {version} of {catalog.name} out of quarantine",
                found=f"no quarantine; its state is: {item.state}",
                expected="a version that was rolled back",
                remedy="choose another version; `draftsmith pairs` shows which ones are barred, "
                "`draftsmith history` which were released",
            )
        reasons = [redact(reason), f"it was in quarantine for: {item.quarantine}"]
        run_id = log.begin(RELEASE, item.pair, champion=champion, reasons=reasons)
        catalog.client.delete_model_version_tag(catalog.name, version, QUARANTINE_TAG)
        log.finish(run_id)
    _LOG.info("event=%s name=%s version=%s", RELEASE, catalog.name, version)
    return item
