"""Uploads of a pair that broke off: the one to go on with, and the others, which are closed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mlflow.entities import LoggedModelStatus

from draftsmith.registry.mlflow_connection import unless_done

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel


def broken_off(
    client: MlflowClient, experiment_id: str, *, name: str, tags: Mapping[str, str]
) -> LoggedModel | None:
    """The newest upload of a pair that did not get as far as READY, so it has no version.

    Args:
        client: The registry.
        experiment_id: Where uploads are.
        name: The registered model that the upload was for.
        tags: Digests of the pair and of all that is uploaded.
    """
    runs = _running(client, experiment_id, name, tags["pair_digest"])
    terms = " and ".join(f"tags.{key} = '{value}'" for key, value in tags.items())
    found = [
        model
        for model in client.search_logged_models([experiment_id], terms)
        if model.source_run_id in runs and model.status == LoggedModelStatus.PENDING
    ]
    return max(found, key=lambda model: int(model.creation_timestamp), default=None)


def leave_out_what_arrived(client: MlflowClient, model_id: str, package: Path) -> None:
    """Delete from a saved model the files that an upload of the same content brought already.

    A file that was cut is shorter. MLmodel and its like, which no digest of content covers, lie on
    top and stay. Whoever fetches a version checks the digests of its files.
    """
    folders = {path.parent for path in package.rglob("*") if path.is_file()}
    for folder in folders - {package}:
        held = client.list_logged_model_artifacts(model_id, folder.relative_to(package).as_posix())
        sizes = {PurePosixPath(item.path).name: item.file_size for item in held if not item.is_dir}
        for path in folder.iterdir():
            if path.is_file() and sizes.get(path.name) == path.stat().st_size:
                path.unlink()


def discard(
    client: MlflowClient, experiment_id: str, *, name: str, pair_digest: str, kept: tuple[str, str]
) -> None:
    """Close the other uploads of a pair, none of which has a version.

    Killed processes leave them, and requests that were repeated because their answer was lost.

    Args:
        client: The registry.
        experiment_id: Where uploads are.
        name: The registered model that the uploads were for.
        pair_digest: The pair.
        kept: Run and logged model of the upload at hand.
    """
    runs = _running(client, experiment_id, name, pair_digest)
    digest = f"tags.pair_digest = '{pair_digest}'"
    for model in client.search_logged_models([experiment_id], digest):
        if model.source_run_id in runs and model.model_id != kept[1]:
            with unless_done("RESOURCE_DOES_NOT_EXIST"):
                client.delete_logged_model(model.model_id)
    for run_id in sorted(runs - {kept[0]}):
        client.set_terminated(run_id, status="KILLED")


def _running(client: MlflowClient, experiment_id: str, name: str, pair_digest: str) -> set[str]:
    """Ids of the runs whose uploads were begun and not finished."""
    pair = f"tags.pair_digest = '{pair_digest}' and tags.pair_name = '{name}'"
    terms = f"{pair} and tags.kind = 'pair' and attributes.status = 'RUNNING'"
    return {str(run.info.run_id) for run in client.search_runs([experiment_id], terms)}
