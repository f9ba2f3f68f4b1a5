"""Bring a target that lives in an MLflow registry to disk; what lies there is another's business.

Knows no checkpoints except that a pair's own target lies in its `artifacts/target`.
"""

from __future__ import annotations

import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow.artifacts import download_artifacts

from draftsmith.registry.mlflow_connection import connect, translated

if TYPE_CHECKING:
    from draftsmith.registry.mlflow_connection import Connection


def fetch_model(uri: str, dst: Path, *, root: Path) -> Path:
    """As `download_model`, from the registry that belongs to `root`."""
    return download_model(connect(root), uri, dst)


@translated("fetching a target from the registry")
def download_model(connection: Connection, uri: str, dst: Path) -> Path:
    """Make the files of a registered model readable.

    Args:
        connection: The registry that holds it.
        uri: `models:/name@alias` or `models:/name/version`.
        dst: Empty folder for a download.

    Returns:
        The folder where the model lies: the artifact store's own when it is on this machine,
        so that nothing is copied, otherwise one in `dst`.

    Raises:
        RegistryError: There is no such version, or it cannot be downloaded.
    """
    client = connection.client
    name, separator, alias = uri.removeprefix("models:/").partition("@")
    if separator:
        version = client.get_model_version_by_alias(name, alias).version
    else:
        name, _, version = name.rpartition("/")
    location = client.get_model_version_download_uri(name, str(version))
    folder = _local(location)
    if folder is None:
        fetched = download_artifacts(
            artifact_uri=f"models:/{name}/{version}",
            dst_path=str(dst),
            tracking_uri=connection.uri,
            registry_uri=connection.registry_uri,
        )
        folder = Path(fetched)
    included = folder / "artifacts" / "target"
    return included if included.is_dir() else folder


def _local(location: str) -> Path | None:
    parsed = urllib.parse.urlparse(location)
    if parsed.scheme not in ("", "file"):
        return None
    path = Path(urllib.request.url2pathname(parsed.path))
    return path if path.is_dir() else None
