"""Bring a registered pair's files to this machine, and accept only what was registered.

Knows no models: a draft is a folder with a digest here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from mlflow.artifacts import download_artifacts, list_artifacts
from mlflow.exceptions import MlflowException

from draftsmith.artifacts import atomic_directory, digest_directory, read_json, short, write_json
from draftsmith.errors import ArtifactError, DamagedPairError, RegistryError
from draftsmith.registry.device_evidence import file_name
from draftsmith.registry.mlflow_connection import translated
from draftsmith.registry.mlflow_upload import (
    ARTIFACTS,
    DEVICE_EVIDENCE,
    EVIDENCE,
    HISTORY,
    model_digest,
)
from draftsmith.registry.pair import (
    EVIDENCE_TAG,
    FILES_TAG,
    MODEL_TAG,
    SOURCE_TAG,
    PairRecord,
    RegisteredPair,
)

if TYPE_CHECKING:
    from mlflow.entities import FileInfo
    from mlflow.entities.model_registry import ModelVersion

    from draftsmith.registry.mlflow_connection import Connection

_ORIGIN = "origin.json"
_RUNS = "runs:/"


def fetch_pair(connection: Connection, pair: RegisteredPair, into: Path) -> Path:
    """Bring a pair's draft/, pair.json and all evidence to `into`/<short pair digest>/.

    Nothing is downloaded when the folder is intact and its evidence is current. The evidence is
    that whose digest the version states, also while newer evidence is being attached.

    Returns:
        The pair's folder.

    Raises:
        DamagedPairError: What arrived is not what was registered; the folder is as it was.
        RegistryError: The registry cannot be reached.
        ArtifactError: The disk refused; the folder is as it was.
    """
    folder = into / short(pair.pair_digest)
    what = f"fetching version {pair.version} of {pair.name}"
    with translated(what):
        version = connection.client.get_model_version(pair.name, pair.version)
        stated = {tag: version.tags[tag] for tag in (FILES_TAG, EVIDENCE_TAG, SOURCE_TAG)}
        measured = _names(connection, version)
        origin = {"name": pair.name, "version": pair.version, **stated, DEVICE_EVIDENCE: measured}
        if _is_current(folder, pair, origin):
            return folder
        with atomic_directory(folder) as temporary:
            _download(connection, version, temporary)
            if damaged := _damaged(temporary, pair, origin):
                raise _damage(what, damaged)
            write_json(temporary / _ORIGIN, origin)
    return folder


def check_model(connection: Connection, pair: RegisteredPair) -> bool:
    """Hash what `mlflow.pyfunc` executes of a version, all but the pair's own files, again.

    Returns:
        False for a version that was registered before its digest was recorded: nothing is known.

    Raises:
        DamagedPairError: It is not what was registered.
        RegistryError: The registry cannot be reached.
    """
    what = f"fetching version {pair.version} of {pair.name}"
    with translated(what), tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        stated = connection.client.get_model_version(pair.name, pair.version).tags.get(MODEL_TAG)
        if stated is None:
            return False
        location = connection.client.get_model_version_download_uri(pair.name, pair.version)
        held = _listed(connection, location)
        for name in {PurePosixPath(item.path).name for item in held} - {ARTIFACTS}:
            _download_part(connection, f"{location}/{name}", Path(folder))
        if model_digest(Path(folder)) != stated:
            raise _damage(what, "MLmodel or code")
    return True


def _damage(what: str, part: str) -> DamagedPairError:
    return DamagedPairError(
        what,
        found=f"{part} whose digest differs from the registered one",
        expected="the files that were registered",
        remedy="restore the artifact store and run `draftsmith verify`, which takes the mark of "
        "damage off, or `draftsmith rollback` to another",
    )


def _download_part(connection: Connection, uri: str, into: Path) -> None:
    """Bring a file or folder; what is lost is left out, and its digest tells.

    A server's error does not say whether the file is missing, so the listing does.
    """
    try:
        download_artifacts(
            artifact_uri=uri,
            dst_path=str(into),
            tracking_uri=connection.uri,
            registry_uri=connection.registry_uri,
        )
    except MlflowException:
        if _is_held(connection, uri):
            raise


def _require_store(location: str) -> None:
    """Refuse where the store is a folder that this machine does not see: nothing is lost there.

    A version lies in `<store>/models/<id>/artifacts`.
    """
    address = urlsplit(location)
    if address.scheme in ("", "file"):
        store = Path(unquote(address.path)).parents[2]
        if not store.is_dir():
            raise RegistryError(
                "fetching a registered pair",
                found=f"no folder {store}",
                expected="the artifact store that the pair was registered in",
                remedy="mount it here, or let the tracking server hand out artifacts",
            )


def _is_held(connection: Connection, uri: str) -> bool:
    """Whether the artifact store lists a file, or a folder that is not empty."""
    folder, _, name = uri.rpartition("/")
    listed = {PurePosixPath(item.path).name: item for item in _listed(connection, folder)}
    return name in listed and (not listed[name].is_dir or bool(_listed(connection, uri)))


def _listed(connection: Connection, uri: str) -> list[FileInfo]:
    if uri.startswith(_RUNS):  # MLflow takes no such address of a run's whole folder
        run_id, _, path = uri.removeprefix(_RUNS).partition("/")
        return connection.client.list_artifacts(run_id, path or None)
    return list_artifacts(artifact_uri=uri, tracking_uri=connection.uri)


def _download(connection: Connection, version: ModelVersion, into: Path) -> None:
    client, run_id = connection.client, str(version.run_id)
    location = client.get_model_version_download_uri(version.name, version.version)
    _require_store(location)
    for name in ("draft", "pair.json"):
        _download_part(connection, f"{location}/{ARTIFACTS}/{name}", into)
    digest = version.tags[EVIDENCE_TAG]
    held = [item.path for item in client.list_artifacts(run_id, HISTORY)]
    # The name begins with the day: a later copy is whole where an upload before it was killed.
    newest = max((path for path in held if path.endswith(f"_{digest[:8]}")), default=None)
    if newest is not None:
        _download_part(connection, f"{_RUNS}{run_id}/{newest}", into)
        fetched = into / PurePosixPath(newest).name
        if fetched.is_dir():  # a folder that lost its files is not downloaded
            fetched.rename(into / EVIDENCE)
    if _names(connection, version):
        _download_part(connection, f"{_RUNS}{run_id}/{DEVICE_EVIDENCE}", into)


def _names(connection: Connection, version: ModelVersion) -> list[str]:
    """The files with evidence of devices; their names hold the digest of their content."""
    held = connection.client.list_artifacts(str(version.run_id), DEVICE_EVIDENCE)
    return sorted(Path(item.path).name for item in held)


def _is_current(folder: Path, pair: RegisteredPair, origin: Mapping[str, Any]) -> bool:
    try:
        stated = read_json(folder / _ORIGIN)
    except ArtifactError:
        return False
    return stated == dict(origin) and _damaged(folder, pair, origin) is None


def _damaged(folder: Path, pair: RegisteredPair, origin: Mapping[str, Any]) -> str | None:
    """The part of a fetched pair that is not what was registered; None when all of it is."""
    try:
        record = PairRecord.from_json(read_json(folder / "pair.json"))
    except (ArtifactError, RegistryError):
        return "pair.json"
    if record.digest != pair.pair_digest:
        return "pair.json"
    parts = {"draft": origin[FILES_TAG], EVIDENCE: origin[EVIDENCE_TAG]}
    for name, digest in parts.items():
        if digest_directory(folder / name) != digest:
            return f"{name}/"
    measured = [folder / DEVICE_EVIDENCE / name for name in origin[DEVICE_EVIDENCE]]
    return None if all(map(_is_named_after_content, measured)) else f"{DEVICE_EVIDENCE}/"


def _is_named_after_content(path: Path) -> bool:
    try:
        return file_name(read_json(path)) == path.name
    except (ArtifactError, KeyError, ValueError):
        return False
