"""The store of pairs: idempotent registration, fetching, and the door to aliases.

The only way into the registry. Uploads come first, under a lock of their own; then versions and
tags are written, and aliases last, under another. Knows nothing of how a pair was measured or why
it is promoted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

from draftsmith.artifacts import digest_directory, read_json
from draftsmith.errors import RegistryError
from draftsmith.registry import description, mlflow_figures, mlflow_moves, mlflow_upload
from draftsmith.registry.mlflow_catalog import CHALLENGER, CHAMPION, Catalog
from draftsmith.registry.mlflow_connection import connect, redact, translated, unless_done
from draftsmith.registry.mlflow_fetch import check_model, fetch_pair
from draftsmith.registry.mlflow_pages import describe
from draftsmith.registry.mlflow_records import PROMOTION, Move
from draftsmith.registry.mlflow_target import download_model
from draftsmith.registry.overrides import overridden_checks
from draftsmith.registry.pair import (
    DAMAGED_TAG,
    DECISION_TAG,
    EVIDENCE_TAG,
    FILES_TAG,
    MODEL_TAG,
    RESERVED_TAGS,
    SOURCE_TAG,
    PairRecord,
    PairVersion,
    RegisteredPair,
)

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

    from draftsmith.registry.settings import RegistryConfig

_MODELS = "models:/"
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
        self._connection = connect(root, name=config.name)
        self._client = self._connection.client
        self._catalog = Catalog(self._connection, config)

    @property
    def name(self) -> str:
        """Name of the registered model."""
        return self._config.name

    @property
    def catalog(self) -> Catalog:
        """The versions behind this store, for evidence of devices and for pruning."""
        return self._catalog

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

    @translated("reading the incumbents")
    def incumbents(self, target_digest: str) -> list[RegisteredPair]:
        """Promoted pairs of other targets, the last promoted first, as far as they are usable.

        A rollback does not change their order: it must not give drafts another start.
        """
        usable = {
            item.pair.version: item.pair
            for item in self._catalog.versions()
            if item.pair.target_digest != target_digest
            and item.quarantine is None
            and item.damage is None
        }
        moves = reversed(self._catalog.moves())
        promoted = dict.fromkeys(move.version for move in moves if move.kind == PROMOTION)
        return [usable[version] for version in promoted if version in usable]

    @translated("reading the history of the champion")
    def history(self) -> list[Move]:
        """Completed moves of the champion alias, and releases, oldest first."""
        return self._catalog.moves()

    @translated("searching the registry by pair digest")
    def find(self, pair_digest: str) -> RegisteredPair | None:
        """The version of this pair, in quarantine or not."""
        held = (item.pair for item in self._catalog.versions() if item.damage is None)
        return next((pair for pair in held if pair.pair_digest == pair_digest), None)

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
            name=self.name,
            record=pair,
            draft_dir=draft_dir,
            evidence=evidence,
            target_source=redact(target_source),
            target_dir=mlflow_upload.included_target(self._root, self._config, pair),
            tags=tags,
        )
        with translated(f"registering {pair.draft.recipe}"), self._connection.uploading():
            with self._connection.locked():
                known = self._only_version(pair.digest)
                if known is not None:
                    self._refresh(known, files)
                    return str(known.version)
            return self._create(files)

    def _only_version(self, pair_digest: str, run_id: str | None = None) -> ModelVersion | None:
        """The oldest intact version of a pair; its repeats, and those of `run_id`, are deleted.

        MLflow repeats a request whose answer was lost, and on another machine the same pair may
        have been registered meanwhile.
        """
        versions = self._catalog.search(pair_digest=pair_digest)
        found = [version for version in versions if DAMAGED_TAG not in version.tags]
        in_use = self._catalog.aliases().values() if found[1:] else ()
        for repeat in found[1:]:
            is_repeat = repeat.run_id in (found[0].run_id, run_id)
            if is_repeat and str(repeat.version) not in in_use:
                with unless_done("RESOURCE_DOES_NOT_EXIST"):
                    self._client.delete_model_version(self.name, repeat.version)
        return found[0] if found else None

    def _create(self, files: mlflow_upload.PairFiles) -> str:
        experiment_id = self._catalog.experiment_id()
        all_tags = {
            **files.tags,
            **files.record.tags(),
            FILES_TAG: digest_directory(files.draft_dir),
            EVIDENCE_TAG: mlflow_upload.evidence_digest(files.evidence),
            SOURCE_TAG: files.target_source,
        }
        with self._connection.bound():
            run_id, model_id, saved = mlflow_upload.upload(self._connection, experiment_id, files)
            mlflow_figures.log_pair(self._client, run_id, model_id, files)
            with self._connection.locked():
                self._create_version(
                    run_id,
                    model_id,
                    tags={**all_tags, MODEL_TAG: saved},
                    told=description.unjudged(files.record, files.tags),
                )
        self._client.set_terminated(run_id, status="FINISHED")
        with self._connection.locked():
            known = self._only_version(files.record.digest, run_id)
        assert known is not None  # it was just created
        version = str(known.version)
        _LOG.info("event=registered name=%s version=%s", self.name, version)
        return version

    def _create_version(
        self, run_id: str, model_id: str, *, tags: dict[str, str], told: str
    ) -> None:
        with unless_done("RESOURCE_ALREADY_EXISTS"):
            whole = description.model_description(self.name)
            self._client.create_registered_model(self.name, description=whole)
        made = self._client.create_model_version(
            self.name,
            source=f"{_MODELS}{model_id}",
            run_id=run_id,
            tags=tags,
            description=told,
            model_id=model_id,
        )
        # A server does this itself; the logged model's page would offer to register it otherwise.
        held = json.dumps([{"name": self.name, "version": str(made.version)}])
        self._client.set_logged_model_tags(model_id, {MLFLOW_MODEL_VERSIONS: held})

    def _refresh(self, known: ModelVersion, files: mlflow_upload.PairFiles) -> None:
        """Attach news to a known pair; the evidence digest's tag is last, so a kill repeats it."""
        digest, run_id = mlflow_upload.evidence_digest(files.evidence), str(known.run_id)
        if known.tags.get(EVIDENCE_TAG) != digest:
            mlflow_upload.log_evidence(self._client, run_id, files)
            model_id = str(known.source).removeprefix(_MODELS)
            mlflow_figures.log_news(self._client, run_id, model_id, files)
        news = {**files.tags, SOURCE_TAG: files.target_source, EVIDENCE_TAG: digest}
        for key, value in news.items():
            if known.tags.get(key) != value:
                self._client.set_model_version_tag(self.name, known.version, key, value)
        if self._client.get_run(run_id).info.status != "FINISHED":  # killed after its version
            self._client.set_terminated(run_id, status="FINISHED")

    def fetch(self, pair: RegisteredPair, into: Path) -> Path:
        """Bring a pair's draft/, pair.json and evidence/ to `into`; see `mlflow_fetch.fetch_pair`.

        Returns:
            The pair's folder.

        Raises:
            RegistryError: What arrived is not what was registered; the folder is as it was.
        """
        return fetch_pair(self._connection, pair, into)

    def check_model(self, pair: RegisteredPair) -> bool:
        """Hash what MLflow executes of a version; see `mlflow_fetch.check_model`.

        Raises:
            RegistryError: It is not what was registered.
        """
        return check_model(self._connection, pair)

    def fetch_model(self, uri: str, dst: Path) -> Path:
        """Make a registered model's files readable; see `mlflow_target.download_model`."""
        return download_model(self._connection, uri, dst)

    @translated("attaching the decision")
    def attach_decision(self, version: str, decision_path: Path, *pages: Path) -> None:
        """Attach the gate's decision and its report; a page in Markdown describes the version."""
        found = self._client.get_model_version(self.name, version)
        for path in (decision_path, *pages):
            self._client.log_artifact(found.run_id, str(path), "decision")
        decision = read_json(decision_path)
        summary = {
            "verdict": decision["verdict"],
            "reasons": decision.get("reasons", []),
            "valid_until": decision.get("valid_until"),
            "against": decision.get("champion", mlflow_moves.ANY),
            "overridden": overridden_checks(decision),
        }
        text = json.dumps(summary, sort_keys=True)
        self._client.set_model_version_tag(self.name, version, DECISION_TAG, text)
        mlflow_figures.log_verdict(self._client, str(found.run_id), str(decision["verdict"]))
        for page in pages:
            if page.suffix == ".md":
                told = redact(description.of_report(page.read_text(encoding="utf-8")))
                self._client.update_model_version(self.name, version, description=told)

    @translated("setting the challenger")
    def set_challenger(self, version: str) -> None:
        """Make a version what the last run proposes."""
        with self._connection.locked():
            mlflow_moves.move_alias(self._catalog, CHALLENGER, version)
            describe(self._catalog)

    @translated("promoting a pair")
    def promote(
        self,
        version: str,
        reasons: Sequence[str],
        *,
        against: str | None = mlflow_moves.ANY,
        overridden: Collection[str] = (),
    ) -> str | None:
        """Move @champion to a version; does nothing when it is there already.

        Args:
            version: Whom to promote.
            reasons: Part of the record.
            against: The champion that it was judged against, None where there was none; `any`
                promotes whoever is champion.
            overridden: Checks of the gate that somebody answers for.

        Returns:
            The version that it replaced; None for the first champion.

        Raises:
            PromotionRefusedError: It is in quarantine or damaged, its draft carries a live-drift
                tag, or another pair has become champion since it was judged.
            RegistryError: Another process moved the alias.
        """
        return mlflow_moves.promote(
            self._catalog, version, reasons, against=against, overridden=overridden
        )

    @translated("putting a version in quarantine")
    def quarantine(self, version: str, reason: str) -> None:
        """Bar a version from being reused or promoted; the first reason stays."""
        mlflow_moves.quarantine(self._catalog, version, reason)

    @translated("tagging damage")
    def set_damage(self, version: str, found: str | None) -> None:
        """Mark a version whose files are not what was registered; None takes the mark away."""
        if found is not None:
            self._client.set_model_version_tag(self.name, version, DAMAGED_TAG, redact(found))
        elif DAMAGED_TAG in self._client.get_model_version(self.name, version).tags:
            self._client.delete_model_version_tag(self.name, version, DAMAGED_TAG)

    @translated("tagging live drift")
    def set_live_drift(self, version: str, reason: str) -> None:
        """Record that live traffic drifted away from this pair; the first reason stays."""
        mlflow_moves.mark_drifted(self._catalog, version, reason)

    @translated("clearing live drift")
    def clear_live_drift(self, version: str, reason: str) -> None:
        """Take the live-drift tag off; the reason is recorded.

        Raises:
            RegistryError: The version carries no such tag.
        """
        mlflow_moves.clear_drift(self._catalog, version, reason)

    @translated("rolling back")
    def rollback(
        self,
        to: str | None = None,
        *,
        reason: str,
        is_reachable: mlflow_moves.Reachable,
        leaving: str | None = None,
    ) -> mlflow_moves.Rollback:
        """Quarantine the champion, then move @champion back.

        Args:
            to: A version or @alias that was champion before; None takes the newest one that can
                be served, one without a live-drift tag where there is any.
            reason: Why; the quarantine's reason and part of the record.
            is_reachable: Whether a version can be loaded, digests verified.
            leaving: The champion that is to go; another one is left where it is.

        Raises:
            RegistryError: There is no champion, or nothing to go back to; nothing was changed.
        """
        return mlflow_moves.rollback(
            self._catalog, to, reason=reason, is_reachable=is_reachable, leaving=leaving
        )
