"""Upload a pair to MLflow; how its files come back is another's business.

A pair is one models-from-code pyfunc: the draft copied in, the target as a reference with its
digest, the package's source beside them so that a rollback brings back its code. Evidence belongs
to the run behind the version and can be replaced; what it replaced stays under evidence_history.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
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

from draftsmith.artifacts import digest_file, digest_json, write_json
from draftsmith.errors import RegistryError
from draftsmith.registry.mlflow_connection import unless_done
from draftsmith.registry.mlflow_figures import parameters
from draftsmith.registry.pair import PairRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from draftsmith.registry.mlflow_connection import Connection

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


def upload(connection: Connection, experiment_id: str, files: PairFiles) -> tuple[str, str, str]:
    """Upload everything that a version needs.

    Returns:
        The run's id, the logged model's id and its `model_digest`. The model is READY: MLflow would
        register a half-uploaded one as READY too.

    Raises:
        RegistryError: The upload did not complete.
    """
    client, digest = connection.client, files.record.digest
    tags = {"kind": "pair", "pair_name": files.name, "pair_digest": digest, MLFLOW_RUN_NOTE: _NOTE}
    run_name = f"{files.record.draft.recipe}-{digest[:8]}"
    run_id = str(client.create_run(experiment_id, run_name=run_name, tags=tags).info.run_id)
    model = client.create_logged_model(
        experiment_id,
        name=_MODEL_NAME,
        source_run_id=run_id,
        tags={"pair_digest": digest},
        params=parameters(files),
    )
    model_id = str(model.model_id)
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as temporary:
        package = Path(temporary) / "model"
        _save_model(files, package, Model(run_id=run_id, model_uuid=model_id, model_id=model_id))
        saved = model_digest(package)
        client.log_model_artifacts(model_id, str(package))
    _link(client, run_id, model_id)
    log_evidence(client, run_id, files)
    model = client.finalize_logged_model(model_id, LoggedModelStatus.READY)
    if model.status != LoggedModelStatus.READY:
        raise RegistryError(
            f"uploading pair {digest[:8]}",
            found=f"model {model_id} with status {model.status}",
            expected="status READY",
            remedy="rerun; the upload is started afresh",
        )
    _discard_leftovers(client, experiment_id, files, kept=(run_id, model_id))
    return run_id, model_id, saved


def _link(client: MlflowClient, run_id: str, model_id: str) -> None:
    """Make the model an output of the run; MLflow refuses the repeat of a lost answer's request."""
    try:
        client.log_outputs(run_id, models=[LoggedModelOutput(model_id, step=0)])
    except MlflowException:
        outputs = client.get_run(run_id).outputs
        if outputs is None or all(found.model_id != model_id for found in outputs.model_outputs):
            raise


def _discard_leftovers(
    client: MlflowClient, experiment_id: str, files: PairFiles, *, kept: tuple[str, str]
) -> None:
    """Close the other uploads of this pair, none of which has a version.

    Killed processes leave them, and requests that were repeated because their answer was lost.

    Args:
        client: The registry.
        experiment_id: Where uploads are.
        files: The pair.
        kept: Run and logged model of the upload at hand.
    """
    running = "attributes.status = 'RUNNING'"
    digest = f"tags.pair_digest = '{files.record.digest}'"
    unfinished = f"tags.pair_name = '{files.name}' and tags.kind = 'pair' and {running}"
    found = client.search_runs([experiment_id], f"{digest} and {unfinished}")
    runs = {str(run.info.run_id) for run in found}
    for model in client.search_logged_models([experiment_id], digest):
        if model.source_run_id in runs and model.model_id != kept[1]:
            with unless_done("RESOURCE_DOES_NOT_EXIST"):
                client.delete_logged_model(model.model_id)
    for run_id in sorted(runs - {kept[0]}):
        client.set_terminated(run_id, status="KILLED")


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
        pip_requirements=[f"{name}=={metadata.version(name)}" for name in _REQUIREMENTS],
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
