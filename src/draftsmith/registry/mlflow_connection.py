"""How to reach MLflow: address, schema, lock, and errors without credentials. Knows no pairs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import urllib.parse
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlflow
import requests
from filelock import FileLock
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from draftsmith.artifacts import scratch_directory, write_failure
from draftsmith.errors import RegistryError
from draftsmith.registry.writers_lock import held, writers_lock

TRACKING_VARIABLE = "MLFLOW_TRACKING_URI"
REGISTRY_VARIABLE = "MLFLOW_REGISTRY_URI"
_SECRET_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_USERINFO = re.compile(r"://[^/\s]+@")
# An address that was signed for whoever has it, such as MLflow's of a file in a bucket.
_SIGNATURE = re.compile(r"(X-Amz-(?:Credential|Security-Token|Signature)=)[^&\s]+")
_PASSWORD = re.compile(r"://[^/\s:]*:([^/\s]+)@")
# A disk that refused, inside an error of MLflow's: no permission, file too large, no room, ...
_REFUSED = re.compile(r"\[Errno (?:13|27|28|30|122)\] (?P<reason>[^:\n]+)(?:: '(?P<path>[^']+)')?")
_SQLITE_PREFIX = "sqlite:///"
_FOUND_CHARACTERS = 400
_QUIET = {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_UV_AUTO_DETECT": "false",
}
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}


def redact(text: str) -> str:
    """`text` without user names, passwords, tokens and signatures of addresses."""
    clean = _SIGNATURE.sub(r"\1***", _USERINFO.sub("://", text))
    for secret in _secrets():
        clean = clean.replace(secret, "***")
    return clean


def _secrets() -> set[str]:
    held = {os.environ.get(variable, "") for variable in _SECRET_VARIABLES}
    for variable in (TRACKING_VARIABLE, REGISTRY_VARIABLE):
        if found := _PASSWORD.search(os.environ.get(variable, "")):
            held |= {found[1], urllib.parse.unquote(found[1])}
    return held - {""}


def tracking_uri(root: Path) -> str:
    """The tracking URI of the environment, or the sqlite file in `root`; sqlite paths absolute."""
    uri = os.environ.get(TRACKING_VARIABLE) or f"{_SQLITE_PREFIX}mlflow.db"
    database = _database(uri)
    return f"{_SQLITE_PREFIX}{root.resolve() / database}" if database is not None else uri


def _database(uri: str) -> Path | None:
    return Path(uri.removeprefix(_SQLITE_PREFIX)) if uri.startswith(_SQLITE_PREFIX) else None


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn failures of MLflow, its server or the disk into one error without credentials.

    The cause is not chained: its text may hold the server's address with a password.

    Raises:
        RegistryError: Anything that the registry or its transport refused.
        ArtifactError: The disk refused.
    """
    place = os.environ.get(TRACKING_VARIABLE) or "mlflow.db"
    try:
        yield
    except (MlflowException, SQLAlchemyError, requests.RequestException) as error:
        text = redact(str(error)).strip()
        if refused := _REFUSED.search(text):
            reason = OSError(0, refused["reason"])
            raise write_failure(Path(refused["path"] or what), reason) from None
        raise RegistryError(
            what,
            found=text[:_FOUND_CHARACTERS],
            expected=f"a registry that answers, at {redact(place)}",
            remedy=f"check {TRACKING_VARIABLE}, the server and its credentials "
            "(MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD), then rerun; nothing is done "
            "twice",
        ) from None
    except shutil.Error as error:  # of a whole folder; the first refusal tells enough
        _, destination, why = error.args[0][0]
        raise write_failure(Path(destination), OSError(0, str(why))) from error
    except OSError as error:
        path = Path(str(error.filename2 or error.filename or what))
        raise write_failure(path, error) from error


@contextlib.contextmanager
def unless_done(code: str) -> Iterator[None]:
    """Accept MLflow's answer `code`: another machine did it, or this one, and the answer was lost.

    MLflow repeats every request that is not answered.
    """
    try:
        yield
    except MlflowException as error:
        if error.error_code != code:
            raise


@dataclass(frozen=True)
class Connection:
    """A checked connection to one MLflow registry.

    Attributes:
        lock: Of those who write versions, tags and aliases.
        uploads: Of those who upload.
        artifact_location: Where a new experiment keeps its files; None lets the server decide.
    """

    uri: str
    registry_uri: str
    client: MlflowClient
    lock: FileLock
    uploads: FileLock
    artifact_location: str | None

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Keep all other writers out but for uploads; see `held`."""
        return held(self.lock)

    def uploading(self) -> contextlib.AbstractContextManager[None]:
        """Keep all other uploads out; see `held`. Taken before the other lock, never after it."""
        return held(self.uploads)

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Make this registry MLflow's global one, for the few calls that ignore the client."""
        # Without the variable MLflow tells what the process itself had set: only that goes back.
        variable = os.environ.pop(TRACKING_VARIABLE, None)
        previous = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
        mlflow.set_tracking_uri(self.uri)
        try:
            yield
        finally:
            mlflow.set_tracking_uri(previous)  # type: ignore[arg-type]  # None means unset
            os.environ.pop(TRACKING_VARIABLE, None)
            if variable is not None:
                os.environ[TRACKING_VARIABLE] = variable

    def experiment_id(self, name: str) -> str:
        """The id of the experiment, which is created at need; call with a lock held."""
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        with unless_done("RESOURCE_ALREADY_EXISTS"):
            return str(self.client.create_experiment(name, self.artifact_location))
        return str(self.client.get_experiment_by_name(name).experiment_id)


def connect(root: Path, *, name: str = "") -> Connection:
    """Reach the registry, and make its schema once where it is a new database.

    Only that takes the lock: a reader waits for no upload, and needs no folder that it may write.

    Args:
        root: The project's folder.
        name: The registered model that is to be written to.

    Raises:
        RegistryError: It cannot be reached, or is of a kind that MLflow refuses.
    """
    os.environ.update(_QUIET)
    for variable, value in _PATIENCE.items():
        os.environ.setdefault(variable, value)
    warnings.filterwarnings("ignore", module=r"mlflow\..*", category=FutureWarning)
    uri = tracking_uri(root)
    registry_uri = os.environ.get(REGISTRY_VARIABLE) or uri
    database = _database(uri)
    location = (database.parent / "mlartifacts").as_uri() if database is not None else None
    lock, uploads = (
        writers_lock(database, address=redact(uri), name=name, uploads=which)
        for which in (False, True)
    )
    with translated("connecting to the registry"):
        if database is not None and not database.exists():
            with held(lock):
                _make_schema(database)
        client = _reach(uri, registry_uri)
    return Connection(uri, registry_uri, client, lock, uploads, location)


def _make_schema(database: Path) -> None:
    """Put a new database in place whole: MLflow cannot resume migrations that were killed."""
    if database.exists():  # somebody else was first
        return
    with scratch_directory(database.parent, database.name) as scratch:
        new = scratch / database.name
        _reach(f"{_SQLITE_PREFIX}{new}", f"{_SQLITE_PREFIX}{new}")
        new.replace(database)


def _reach(uri: str, registry_uri: str) -> MlflowClient:
    client = MlflowClient(tracking_uri=uri, registry_uri=registry_uri)
    client.search_experiments(max_results=1)
    client.search_registered_models(max_results=1)
    return client
