"""The store of pairs: idempotent registration, fetching, and the door to aliases.

The only way into the registry. Versions and tags are written first and aliases last, under one
lock. Knows nothing of how a pair was measured or why it is promoted.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from draftsmith.artifacts import atomic_directory, digest_directory, read_json, short, write_json
from draftsmith.errors import ArtifactError, RegistryError
from draftsmith.registry import mlflow_moves, mlflow_upload
from draftsmith.registry.mlflow_catalog import CHALLENGER, CHAMPION, Catalog
from draftsmith.registry.mlflow_connection import connect, redact, translated
from draftsmith.registry.mlflow_records import Move
from draftsmith.registry.mlflow_target import download_model
from draftsmith.registry.pair import (
    CORPUS_TAG,
    DECISION_TAG,
    EVIDENCE_TAG,
    FILES_TAG,
    LIVE_DRIFT_TAG,
    METRIC_TAGS,
    QUARANTINE_TAG,
    RESERVED_TAGS,
    SOURCE_TAG,
    PairRecord,
    PairVersion,
    RegisteredPair,
)

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

    from draftsmith.registry.settings import RegistryConfig

_ORIGIN = "origin.json"
_METRICS_A_CALL = 1000  # MLflow's limit
_LOG = logging.getLogger(__name__)


class PairStore:
    """The pairs of one registered model.

    Args:
        root: The project's folder: default database, lock and snapshots of targets live there.
        config: Names of the registered model and of the experiment.

    Raises:
        RegistryError: The registry cannot be reached, or the name cannot be a model's.
    """

    def __init__(self, root: Path, config: RegistryConfig) -> None:
        """Connect, and make the schema of a new database."""
        self._root = root
        self._config = config
        self._connection = connect(root)
        self._client = self._connection.client
        self._catalog = Catalog(self._connection, config)

    @property
    def name(self) -> str:
        """Name of the registered model."""
        return self._config.name

    @translated("reading the registered pairs")
    def versions(self) -> list[PairVersion]:
        """All versions, oldest first."""
        return self._catalog.versions()

    @translated("resolving a reference to a pair")
    def resolve(self, reference: str) -> PairVersion:
        """The version behind `@alias` or a version number.

        Raises:
            RegistryError: There is none.
        """
        return self._catalog.resolve(reference)

    @translated("reading the champion")
    def champion(self) -> RegisteredPair | None:
        """The pair that services load."""
        return self._catalog.existing(self._catalog.aliases().get(CHAMPION))

    @translated("reading the challenger")
    def challenger(self) -> RegisteredPair | None:
        """The pair that the last run proposed."""
        return self._catalog.existing(self._catalog.aliases().get(CHALLENGER))

    @translated("reading the champion's predecessor")
    def predecessor(self) -> RegisteredPair | None:
        """The pair that the champion replaced when it was last promoted."""
        champion = self._catalog.aliases().get(CHAMPION)
        if champion is None:
            return None
        return self._catalog.existing(self._catalog.recorded_predecessor(champion))

    @translated("reading the incumbent")
    def incumbent(self, target_digest: str) -> RegisteredPair | None:
        """The newest promoted pair of another target; those in quarantine do not count."""
        versions = {item.pair.version: item for item in self._catalog.versions()}
        for move in reversed(self._catalog.moves()):
            item = versions.get(move.version)
            if item and item.quarantine is None and item.pair.target_digest != target_digest:
                return item.pair
        return None

    @translated("reading the history of the champion")
    def history(self) -> list[Move]:
        """Completed moves of the champion alias, oldest first."""
        return self._catalog.moves()

    @translated("searching the registry by pair digest")
    def find(self, pair_digest: str) -> RegisteredPair | None:
        """The version of this pair, in quarantine or not."""
        found = self._catalog.search(pair_digest=pair_digest)
        return self._catalog.pair(found[0]) if found else None

    @translated("searching the registry for a known pair")
    def find_known(
        self, target_digest: str, recipe_digest: str, corpus_digest: str
    ) -> RegisteredPair | None:
        """The newest pair of this target, recipe and corpus that is not in quarantine.

        Its draft was distilled from the corpus, or was taken over from another target, evaluated
        on the corpus and promoted. One with live drift is returned only if there is no other.
        """
        promoted = {move.version for move in self._catalog.moves()}
        found = self._catalog.search(target_digest=target_digest, recipe_digest=recipe_digest)
        usable = [
            version
            for version in found
            if QUARANTINE_TAG not in version.tags
            and (
                version.tags["corpus_digest"] == corpus_digest
                or (
                    version.tags.get(CORPUS_TAG) == corpus_digest
                    and str(version.version) in promoted
                )
            )
        ]
        usable.sort(key=lambda version: LIVE_DRIFT_TAG not in version.tags)
        return self._catalog.pair(usable[-1]) if usable else None

    def register(
        self,
        pair: PairRecord,
        draft_dir: Path,
        *,
        evidence: Mapping[str, Path],
        tags: Mapping[str, str],
        target_source: str,
    ) -> str:
        """Register a pair once; later calls attach what evidence is new.

        Args:
            pair: The record; its digest decides whether the pair is known.
            draft_dir: The draft's folder, copied into the version.
            evidence: File name in the version -> file on disk.
            tags: Headline figures (alpha, tau, speedup, device, drift).
            target_source: Where the target came from; credentials in it are dropped.

        Returns:
            The version's number.

        Raises:
            RegistryError: The registry refused, or a tag is one that the store keeps itself.
        """
        if reserved := sorted(RESERVED_TAGS & set(tags)):
            raise RegistryError(
                f"registering {pair.draft.recipe}",
                found=f"tag {reserved[0]}",
                expected="figures only",
                remedy="use the store's own methods for quarantine, live drift and decisions",
            )
        files = mlflow_upload.PairFiles(
            record=pair,
            draft_dir=draft_dir,
            evidence=evidence,
            target_source=redact(target_source),
            target_dir=self._included_target(pair),
            device=tags.get("device", ""),
        )
        with translated(f"registering {pair.draft.recipe}"), self._connection.locked():
            known = self._catalog.search(pair_digest=pair.digest)
            if known:
                self._refresh(known[0], files, tags)
                return str(known[0].version)
            return self._create(files, tags)

    def _included_target(self, pair: PairRecord) -> Path | None:
        if not self._config.include_target:
            return None
        folder = self._root / "models" / "targets" / short(pair.target_digest)
        if not folder.is_dir():
            raise RegistryError(
                "copying the target into the version (registry.include_target)",
                found=f"no {folder}",
                expected="the target's snapshot",
                remedy="set target.snapshot, or registry.include_target to false",
            )
        return folder

    def _create(self, files: mlflow_upload.PairFiles, tags: Mapping[str, str]) -> str:
        experiment_id = self._catalog.experiment_id()
        all_tags = {
            **tags,
            **files.record.tags(),
            FILES_TAG: digest_directory(files.draft_dir),
            EVIDENCE_TAG: mlflow_upload.evidence_digest(files.evidence),
            SOURCE_TAG: files.target_source,
        }
        with self._connection.bound():
            run_id, model_id = mlflow_upload.upload(self._connection, experiment_id, files)
            self._log_metrics(run_id, tags)
            self._log_training(run_id, files.draft_dir)
            version = self._create_version(run_id, model_id, all_tags)
        self._client.set_terminated(run_id, status="FINISHED")
        _LOG.info("event=registered name=%s version=%s", self.name, version)
        return version

    def _create_version(self, run_id: str, model_id: str, tags: dict[str, str]) -> str:
        try:
            self._client.create_registered_model(self.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        created = self._client.create_model_version(
            self.name, source=f"models:/{model_id}", run_id=run_id, tags=tags, model_id=model_id
        )
        return str(created.version)

    def _refresh(
        self, known: ModelVersion, files: mlflow_upload.PairFiles, tags: Mapping[str, str]
    ) -> None:
        """Attach new evidence to a known pair; the digest's tag is last, so a kill repeats it."""
        digest, run_id = mlflow_upload.evidence_digest(files.evidence), str(known.run_id)
        if known.tags.get(EVIDENCE_TAG) != digest:
            mlflow_upload.log_evidence(self._client, run_id, files)
            self._log_metrics(run_id, tags)
        for key, value in {**tags, EVIDENCE_TAG: digest}.items():
            if known.tags.get(key) != value:
                self._client.set_model_version_tag(self.name, known.version, key, value)
        if self._client.get_run(run_id).info.status != "FINISHED":  # killed after its version
            self._client.set_terminated(run_id, status="FINISHED")

    def _log_metrics(self, run_id: str, tags: Mapping[str, str]) -> None:
        for key in METRIC_TAGS:
            if key in tags:
                self._client.log_metric(run_id, key, float(tags[key]))

    def _log_training(self, run_id: str, draft_dir: Path) -> None:
        """The training's history, kept in the manifest, as curves of the version's run."""
        training = read_json(draft_dir / "draft.json").get("training", {})
        now_ms = time.time_ns() // 1_000_000
        metrics = [
            Metric(f"train_{name}", entry[name], timestamp=now_ms, step=int(entry["step"]))
            for entry in training.get("history", [])
            for name in ("loss", "alpha")
        ]
        for start in range(0, len(metrics), _METRICS_A_CALL):
            self._client.log_batch(run_id, metrics[start : start + _METRICS_A_CALL])

    def fetch(self, pair: RegisteredPair, into: Path) -> Path:
        """Bring a pair's draft/, pair.json and evidence/ to `into`/<short pair digest>/.

        Nothing is downloaded when the folder is intact and its evidence is current.

        Returns:
            The pair's folder.

        Raises:
            RegistryError: What arrived is not what was registered; the folder is as it was.
        """
        folder = into / short(pair.pair_digest)
        what = f"fetching version {pair.version} of {pair.name}"
        with translated(what):
            version = self._client.get_model_version(pair.name, pair.version)
            kept = {tag: version.tags[tag] for tag in (FILES_TAG, EVIDENCE_TAG, SOURCE_TAG)}
            origin = {"name": pair.name, "version": pair.version, **kept}
            if _is_current(folder, pair, origin):
                return folder
            with atomic_directory(folder) as temporary:
                location = self._client.get_model_version_download_uri(pair.name, pair.version)
                mlflow_upload.download_pair(
                    self._connection, location, str(version.run_id), temporary
                )
                if not _is_intact(temporary, pair, origin[FILES_TAG]):
                    raise RegistryError(
                        what,
                        found="files whose digest differs from the registered one",
                        expected=f"a draft folder with digest {origin[FILES_TAG]}",
                        remedy="restore the artifact store, or `draftsmith rollback` to another",
                    )
                write_json(temporary / _ORIGIN, origin)
        return folder

    def fetch_model(self, uri: str, dst: Path) -> Path:
        """Make a registered model's files readable; see `mlflow_target.download_model`."""
        return download_model(self._connection, uri, dst)

    @translated("attaching the decision")
    def attach_decision(self, version: str, decision_path: Path, report_path: Path) -> None:
        """Attach the gate's decision and the report to a version."""
        found = self._client.get_model_version(self.name, version)
        for path in (decision_path, report_path):
            self._client.log_artifact(found.run_id, str(path), "decision")
        decision = read_json(decision_path)
        summary = {"verdict": decision["verdict"], "reasons": decision.get("reasons", [])}
        text = json.dumps(summary, sort_keys=True)
        self._client.set_model_version_tag(self.name, version, DECISION_TAG, text)

    @translated("setting the challenger")
    def set_challenger(self, version: str) -> None:
        """Make a version what the last run proposes."""
        with self._connection.locked():
            mlflow_moves.move_alias(self._catalog, CHALLENGER, version)

    @translated("promoting a pair")
    def promote(self, version: str, reasons: Sequence[str]) -> str | None:
        """Move @champion to a version; does nothing when it is there already.

        Returns:
            The version that it replaced; None for the first champion.

        Raises:
            RegistryError: The version is in quarantine, or another process moved the alias.
        """
        return mlflow_moves.promote(self._catalog, version, reasons)

    @translated("putting a version in quarantine")
    def quarantine(self, version: str, reason: str) -> None:
        """Bar a version from being reused or promoted; the first reason stays."""
        mlflow_moves.quarantine(self._catalog, version, reason)

    @translated("tagging live drift")
    def set_live_drift(self, version: str, reason: str) -> None:
        """Record that live traffic drifted away from this pair."""
        text = redact(reason)
        self._client.set_model_version_tag(self.name, version, LIVE_DRIFT_TAG, text)

    @translated("rolling back")
    def rollback(
        self, to: str | None = None, *, reason: str, is_reachable: mlflow_moves.Reachable
    ) -> RegisteredPair:
        """Quarantine the champion, then move @champion back.

        Args:
            to: A version that was champion before; None takes the newest one that can be served.
            reason: Why; the quarantine's reason and part of the record.
            is_reachable: Whether the target of a version can be loaded, digest verified.

        Returns:
            The new champion.

        Raises:
            RegistryError: There is no champion, or nothing to go back to; nothing was changed.
        """
        return mlflow_moves.rollback(self._catalog, to, reason=reason, is_reachable=is_reachable)


def _is_current(folder: Path, pair: RegisteredPair, origin: Mapping[str, str]) -> bool:
    try:
        stated = read_json(folder / _ORIGIN)
    except ArtifactError:
        return False
    return stated == dict(origin) and _is_intact(folder, pair, origin[FILES_TAG])


def _is_intact(folder: Path, pair: RegisteredPair, files_digest: str) -> bool:
    """Whether a fetched pair's record and draft files are those that were registered."""
    try:
        record = PairRecord.from_json(read_json(folder / "pair.json"))
    except (ArtifactError, RegistryError):
        return False
    return record.digest == pair.pair_digest and (
        digest_directory(folder / "draft") == files_digest
    )
