"""Bring a target that lives in an MLflow registry to disk; what lies there is another's business.

Knows no checkpoints except that a pair's own target, if it is included, lies in `artifacts/target`.
"""

from __future__ import annotations

import contextlib
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mlflow.artifacts import download_artifacts, list_artifacts
from mlflow.exceptions import MlflowException

from draftsmith.errors import TargetError
from draftsmith.registry.mlflow_connection import connect, redact, translated

if TYPE_CHECKING:
    from draftsmith.registry.mlflow_connection import Connection

# That there is no such thing, for this user; an alias that is missing is an invalid value.
_REFUSALS = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "PERMISSION_DENIED")


def fetch_model(uri: str, dst: Path, *, root: Path) -> tuple[str, Path]:
    """As `download_model`, from the registry of `root`; with the URI of the version."""
    connection = connect(root)
    version_uri = resolve_alias(connection, uri)
    return version_uri, download_model(connection, version_uri, dst)


@contextlib.contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Tell a registry that has no such model, as it says, from one that does not answer."""
    with translated("fetching a target from the registry"):
        try:
            yield
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            raise TargetError(
                f"fetching a target from {uri}",
                found=redact(str(error)),
                expected="a registered model that you may read",
                remedy="correct the address, or register the model",
            ) from None


def resolve_alias(connection: Connection, uri: str) -> str:
    """`models:/name/version` for `models:/name@alias`; another URI stays as it is.

    Raises:
        TargetError: There is no such alias.
        RegistryError: The registry cannot be reached.
    """
    name, separator, alias = uri.removeprefix("models:/").partition("@")
    if not separator:
        return uri
    with _translated(uri):
        version = connection.client.get_model_version_by_alias(name, alias).version
    return f"models:/{name}/{version}"


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
        TargetError: There is no such version, or it is a pair without its target.
        RegistryError: The registry cannot be reached, or breaks the download off.
    """
    uri = resolve_alias(connection, uri)
    with _translated(uri):
        return _downloaded(connection, uri, dst)


def _downloaded(connection: Connection, uri: str, dst: Path) -> Path:
    name, _, version = uri.removeprefix("models:/").rpartition("/")
    location = connection.client.get_model_version_download_uri(name, version)
    held = list_artifacts(artifact_uri=f"{location}/artifacts", tracking_uri=connection.uri)
    names = {PurePosixPath(item.path).name for item in held}
    if "target" in names:
        uri = location = f"{location}/artifacts/target"
    elif "pair.json" in names:
        raise TargetError(
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
