"""Bring a target that lives in an MLflow registry to disk; what lies there is another's business.

Knows no checkpoints except that a pair's own target, if it is included, lies in `artifacts/target`.
"""

from __future__ import annotations

import urllib.parse
import urllib.request
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mlflow.artifacts import download_artifacts, list_artifacts

from draftsmith.errors import RegistryError
from draftsmith.registry.mlflow_connection import connect, translated

if TYPE_CHECKING:
    from draftsmith.registry.mlflow_connection import Connection

_WHAT = "fetching a target from the registry"


def fetch_model(uri: str, dst: Path, *, root: Path) -> tuple[str, Path]:
    """As `download_model`, from the registry of `root`; with the URI of the version."""
    connection = connect(root)
    version_uri = resolve_alias(connection, uri)
    return version_uri, download_model(connection, version_uri, dst)


@translated(_WHAT)
def resolve_alias(connection: Connection, uri: str) -> str:
    """`models:/name/version` for `models:/name@alias`; another URI stays as it is.

    Raises:
        RegistryError: There is no such alias.
    """
    name, separator, alias = uri.removeprefix("models:/").partition("@")
    if not separator:
        return uri
    version = connection.client.get_model_version_by_alias(name, alias).version
    return f"models:/{name}/{version}"


@translated(_WHAT)
def download_model(connection: Connection, uri: str, dst: Path) -> Path:
    """Make the files of a registered model readable.

    Args:
        connection: The registry that holds it.
        uri: `models:/name@alias` or `models:/name/version`.
        dst: Empty folder for a download.

    Returns:
        The folder where the model lies, of a pair its target: the artifact store's own when it is
        on this machine, so that nothing is copied, otherwise one in `dst`.

    Raises:
        RegistryError: There is no such version, it is a pair without its target, or it cannot be
            downloaded.
    """
    uri = resolve_alias(connection, uri)
    name, _, version = uri.removeprefix("models:/").rpartition("/")
    location = connection.client.get_model_version_download_uri(name, version)
    held = list_artifacts(artifact_uri=f"{location}/artifacts", tracking_uri=connection.uri)
    names = {PurePosixPath(item.path).name for item in held}
    if "target" in names:
        uri = location = f"{location}/artifacts/target"
    elif "pair.json" in names:
        raise RegistryError(
            f"fetching a target from {uri}",
            found="a pair that holds a reference to its target only",
            expected="a model with a checkpoint, or a pair with its target",
            remedy="register the pair with registry.include_target: true",
        )
    folder = _local(location)
    if folder is not None:
        return folder
    fetched = download_artifacts(
        artifact_uri=uri,
        dst_path=str(dst),
        tracking_uri=connection.uri,
        registry_uri=connection.registry_uri,
    )
    return Path(fetched)


def _local(location: str) -> Path | None:
    parsed = urllib.parse.urlparse(location)
    if parsed.scheme not in ("", "file"):
        return None
    path = Path(urllib.request.url2pathname(parsed.path))
    return path if path.is_dir() else None
