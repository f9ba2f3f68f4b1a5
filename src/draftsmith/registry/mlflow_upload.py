"""Upload a pair to MLflow; how its files come back is another's business.

A pair is one models-from-code pyfunc: the draft copied in, the target as a reference with its
digest, the package's source beside them so that a rollback brings back its code. Evidence belongs
to the run behind the version and can be replaced; what it replaced stays under evidence_history.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import mlflow.pyfunc
from mlflow.entities import LoggedModelOutput, LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, DataType, Schema
from mlflow.types.schema import AnyType
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from draftsmith.artifacts import digest_directory, digest_file, digest_json, short, write_json
from draftsmith.errors import RegistryError
from draftsmith.registry import mlflow_leftovers
from draftsmith.registry.mlflow_figures import parameters
from draftsmith.registry.pair import PairRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

    from draftsmith.registry.mlflow_connection import Connection
    from draftsmith.registry.settings import RegistryConfig

EVIDENCE = "evidence"
HISTORY = "evidence_history"
DEVICE_EVIDENCE = "device_evidence"
ARTIFACTS = "artifacts"  # of a saved model: the pair's own files
_MODEL_NAME = "pair"
_NOTE = "Upload, figures and evidence of a pair. Its version says what was decided on it."
_MODEL_CODE = Path(__file__).with_name("pyfunc_model.py")
_PACKAGE = Path(__file__).resolve().parents[1]
_REQUIREMENTS = ("mlflow", "torch", "transformers", "tokenizers", "safetensors", "filelock")
# A prompt may be a text or a chat, so the type hint of `predict` says no more than that.
_EXPECTED_WARNING = "Any type hint is inferred as AnyType"
_LEFT = {"__pycache__", "registered_model_meta"}
_LOG = logging.getLogger(__name__)
_SIGNATURE = ModelSignature(
    inputs=Schema([ColSpec(AnyType())]),  # a text or a chat a prompt
    outputs=Schema([ColSpec(DataType.string)]),
)


@dataclass(frozen=True)
class PairFiles:
    """What a new version is made of.

    Attributes:
        name: The registered model that the version is for.
        evidence: File name in the version -> file on disk.
        target_source: Where the target came from, without credentials.
        target_dir: The target's weights, when they are to be copied in.
        tags: Headline figures, among them the device that they were measured on.
    """

    name: str
    record: PairRecord
    draft_dir: Path
    evidence: Mapping[str, Path]
    target_source: str
    target_dir: Path | None
    tags: Mapping[str, str]


def evidence_digest(evidence: Mapping[str, Path]) -> str:
    """Digest of the evidence files by name and content."""
    return digest_json({name: digest_file(path) for name, path in evidence.items()})


def model_digest(folder: Path) -> str:
    """Digest of what MLflow executes of a saved model, but for what it leaves where it loads it."""
    named = {path.relative_to(folder): path for path in sorted(folder.rglob("*"))}
    return digest_json(
        {
            name.as_posix(): digest_file(path)
            for name, path in named.items()
            if path.is_file() and name.parts[0] != ARTIFACTS and not _LEFT.intersection(name.parts)
        }
    )


def included_target(root: Path, config: RegistryConfig, pair: PairRecord) -> Path | None:
    """The snapshot of the pair's target that goes into the version; None where none does.

    Raises:
        RegistryError: There is none on disk.
    """
    if not config.include_target:
        return None
    folder = root / "models" / "targets" / short(pair.target_digest)
    if not folder.is_dir():
        raise RegistryError(
            "copying the target into the version (registry.include_target)",
            found=f"no {folder}",
            expected="the target's snapshot",
            remedy="set target.snapshot, or registry.include_target to false",
        )
    return folder


def upload(connection: Connection, experiment_id: str, files: PairFiles) -> tuple[str, str, str]:
    """Upload everything that a version needs.

    Returns:
        The run's id, the logged model's id and its `model_digest`. The model is READY: MLflow would
        register a half-uploaded one as READY too.

    Raises:
        RegistryError: The upload did not complete.
    """
    client, digest = connection.client, files.record.digest
    tags = {"pair_digest": digest, "contents": _contents_digest(files)}
    begun = mlflow_leftovers.broken_off(client, experiment_id, name=files.name, tags=tags)
    model = _begin(client, experiment_id, files, tags) if begun is None else begun
    run_id, model_id = str(model.source_run_id), str(model.model_id)
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as temporary:
        package = Path(temporary) / "model"
        _save_model(files, package, _described(model))
        saved = model_digest(package)
        if begun is not None:
            _LOG.info("event=upload_resumed name=%s run=%s", files.name, run_id)
            mlflow_leftovers.leave_out_what_arrived(client, model_id, package)
        client.log_model_artifacts(model_id, str(package))
    _link(client, run_id, model_id)
    log_evidence(client, run_id, files)
    model = client.finalize_logged_model(model_id, LoggedModelStatus.READY)
    if model.status != LoggedModelStatus.READY:
        raise RegistryError(
            f"uploading pair {digest[:8]}",
            found=f"model {model_id} with status {model.status}",
            expected="status READY",
            remedy="rerun; the upload goes on",
        )
    kept = (run_id, model_id)
    mlflow_leftovers.discard(client, experiment_id, name=files.name, pair_digest=digest, kept=kept)
    return run_id, model_id, saved


def _begin(
    client: MlflowClient, experiment_id: str, files: PairFiles, tags: dict[str, str]
) -> LoggedModel:
    digest = files.record.digest
    run = client.create_run(
        experiment_id,
        run_name=f"{files.record.draft.recipe}-{digest[:8]}",
        tags={
            "kind": "pair",
            "pair_name": files.name,
            "pair_digest": digest,
            MLFLOW_RUN_NOTE: _NOTE,
        },
    )
    return client.create_logged_model(
        experiment_id,
        name=_MODEL_NAME,
        source_run_id=str(run.info.run_id),
        tags=tags,
        params=parameters(files),
    )


def _contents_digest(files: PairFiles) -> str:
    """Digest of all that is uploaded, what MLflow writes itself by what it writes it from."""
    folders = {"draft": files.draft_dir, "target": files.target_dir}
    parts = {name: digest_directory(path) for name, path in folders.items() if path is not None}
    written = {"python": platform.python_version(), "packages": _requirements()}
    code = model_digest(_PACKAGE)
    return digest_json({"pair": files.record.to_json(), "code": code, **written, **parts})


def _requirements() -> list[str]:
    return [f"{name}=={metadata.version(name)}" for name in _REQUIREMENTS]


def _described(model: LoggedModel) -> Model:
    """What MLmodel says of an upload; its time is the upload's, so it is the same at every try."""
    begun = datetime.datetime.fromtimestamp(model.creation_timestamp / 1000, datetime.UTC)
    return Model(
        run_id=str(model.source_run_id),
        utc_time_created=str(begun.replace(tzinfo=None)),
        model_uuid=str(model.model_id),
        model_id=str(model.model_id),
    )


def _link(client: MlflowClient, run_id: str, model_id: str) -> None:
    """Make the model an output of the run; MLflow refuses the repeat of a lost answer's request."""
    try:
        client.log_outputs(run_id, models=[LoggedModelOutput(model_id, step=0)])
    except MlflowException:
        outputs = client.get_run(run_id).outputs
        if outputs is None or all(found.model_id != model_id for found in outputs.model_outputs):
            raise


def _save_model(files: PairFiles, path: Path, model: Model) -> None:
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as temporary:
        staged = Path(temporary)
        write_json(staged / "pair.json", files.record.to_json())
        shutil.copytree(files.draft_dir, staged / "draft")
        artifacts = {"pair": str(staged / "pair.json"), "draft": str(staged / "draft")}
        if files.target_dir is not None:
            shutil.copytree(files.target_dir, staged / "target")
            artifacts["target"] = str(staged / "target")
        with warnings.catch_warnings(record=True) as caught:  # MLflow sets filters of its own
            _save_pyfunc(files, path, model, artifacts)
    for warning in caught:
        if _EXPECTED_WARNING not in str(warning.message):
            _LOG.warning("event=mlflow_warning text=%s", warning.message)


def _save_pyfunc(files: PairFiles, path: Path, model: Model, artifacts: dict[str, str]) -> None:
    mlflow.pyfunc.save_model(
        path=str(path),
        python_model=str(_MODEL_CODE),
        artifacts=artifacts,
        model_config={
            "target": {"source": files.target_source, "directory": ""},
            "target_digest": files.record.target_digest,
            "root": "",
            "device": "cpu",
            "max_new_tokens": 128,
        },
        signature=_SIGNATURE,
        code_paths=[str(_PACKAGE)],
        pip_requirements=_requirements(),
        mlflow_model=model,
    )


def log_evidence(client: MlflowClient, run_id: str, files: PairFiles) -> None:
    """Attach evidence files to a version's run, for people and in the history.

    Day, device and digest name the copy in the history, which is the one that is fetched: nothing
    is written over it, whereas `evidence/` keeps files of earlier evidence and may be half new.
    """
    if not files.evidence:
        return
    digest = evidence_digest(files.evidence)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    label = re.sub(r"[^a-z0-9]+", "-", files.tags.get("device", "").lower()).strip("-") or "device"
    with staged_evidence(files.evidence) as folder:
        client.log_artifacts(run_id, str(folder), f"{HISTORY}/{day}_{label}_{digest[:8]}")
        client.log_artifacts(run_id, str(folder), EVIDENCE)


@contextlib.contextmanager
def staged_evidence(evidence: Mapping[str, Path]) -> Iterator[Path]:
    """A temporary folder with the evidence under its names in the version.

    Raises:
        RegistryError: A name would leave the folder, or a file is missing.
    """
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as temporary:
        for name, path in evidence.items():
            relative = PurePosixPath(name)
            if relative.is_absolute() or ".." in relative.parts or not path.is_file():
                raise RegistryError(
                    f"attaching evidence {name}",
                    found=str(path),
                    expected="an existing file and a relative name without '..'",
                    remedy="rerun the stage that writes the file",
                )
            destination = Path(temporary) / relative
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, destination)
        yield Path(temporary)
