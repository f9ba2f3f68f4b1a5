"""Append-only records of who became champion, when, after whom and why, and who was released.

MLflow keeps no history of an alias. Every move is one run here: begun before the alias moves,
finished after it was read back, so that a killed move is either completed or marked as never done.
A release from quarantine is recorded in the same way, around the removal of the tag.
Call with the registry's lock held, but for `moves`, which only reads.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlflow.exceptions import MlflowException

from draftsmith.registry.pair import QUARANTINE_TAG, RegisteredPair

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PROMOTION = "promotion"
ROLLBACK = "rollback"
RELEASE = "release"  # from quarantine: no move of the alias, but a step of the same story
_PAGE = 1000
_MAX_CHARACTERS = 8000  # what a database keeps of a run's tag


def as_recorded(reasons: Sequence[str]) -> str:
    """Reasons as a record holds them: joined, and cut where a database would refuse them."""
    text = "; ".join(reasons)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"


@dataclass(frozen=True)
class Move:
    """One move of the champion alias, or a release.

    Attributes:
        kind: `promotion`, `rollback` or `release`.
        sequence: Position in the history, from 1; a total order that needs no clock.
        predecessor: The version that held the alias before; None for the first champion and for a
            release.
        is_finished: The alias was read back after the move.
    """

    run_id: str
    kind: str
    sequence: int
    version: str
    predecessor: str | None
    pair_digest: str
    reason: str
    time_utc: str
    is_finished: bool

    @property
    def moved_alias(self) -> bool:
        """Whether the version became champion by it."""
        return self.kind != RELEASE


class MoveLog:
    """The moves of one registered model's champion alias."""

    def __init__(self, client: MlflowClient, experiment_id: str, name: str) -> None:
        """Read and write the records of the model `name` in one experiment."""
        self._client = client
        self._experiment_id = experiment_id
        self._name = name

    def moves(self, champion: str | None) -> list[Move]:
        """Completed moves and releases, oldest first.

        A begun move whose version holds the alias did happen; its process died before saying so.
        """
        recorded = self._recorded()
        return [move for move in recorded if move.is_finished or _is_cut(recorded, move, champion)]

    def begin(
        self, kind: str, pair: RegisteredPair, *, champion: str | None, reasons: Sequence[str]
    ) -> str:
        """Record that the alias is to move from `champion` to `pair`; returns the run's id.

        Or that `pair` is to be released, whoever is `champion`.
        """
        recorded = self._recorded()
        self._settle(recorded, champion)
        run = self._client.create_run(
            self._experiment_id,
            run_name=f"{kind}-{pair.version}",
            tags={
                "kind": kind,
                "pair_name": self._name,
                "sequence": str(1 + max((move.sequence for move in recorded), default=0)),
                "version": pair.version,
                "predecessor": (champion if kind != RELEASE else None) or "",
                "pair_digest": pair.pair_digest,
                "reason": as_recorded(reasons),
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            },
        )
        return str(run.info.run_id)

    def finish(self, run_id: str) -> None:
        """Record that the move was read back."""
        self._client.set_terminated(run_id, status="FINISHED")

    def interrupted(self, champion: str | None) -> Move | None:
        """The move that was made and whose process died before it could say so."""
        recorded = self._recorded()
        return next((move for move in recorded if _is_cut(recorded, move, champion)), None)

    def settle(self, champion: str | None) -> None:
        """Complete or close the records of moves whose process died."""
        self._settle(self._recorded(), champion)

    def _settle(self, recorded: Sequence[Move], champion: str | None) -> None:
        for move in recorded:
            if not move.is_finished and self._is_running(move):
                done = _is_cut(recorded, move, champion)
                if move.kind == RELEASE:
                    done = self._is_out(move) and _counts(recorded, move)
                self._client.set_terminated(move.run_id, status="FINISHED" if done else "KILLED")

    def _is_out(self, move: Move) -> bool:
        """Whether the version of a begun release is in quarantine no longer."""
        try:
            found = self._client.get_model_version(self._name, move.version)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # released, then pruned
                return True
            raise
        return QUARANTINE_TAG not in found.tags

    def _is_running(self, move: Move) -> bool:
        return str(self._client.get_run(move.run_id).info.status) == "RUNNING"

    def _recorded(self) -> list[Move]:
        runs: list[Run] = []
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [self._experiment_id],
                filter_string=f"tags.pair_name = '{self._name}' and tags.sequence != ''",
                max_results=_PAGE,
                page_token=token,
            )
            runs.extend(page)
            token = page.token
            if not token:
                runs.sort(key=lambda run: run.info.start_time)
                return sorted((_move(run) for run in runs), key=lambda move: move.sequence)


def _is_cut(recorded: Sequence[Move], move: Move, champion: str | None) -> bool:
    """Whether `move` is the newest one, begun but not finished, and the alias did move."""
    newest = max(other.sequence for other in recorded)
    is_held = move.moved_alias and (move.sequence, move.version) == (newest, champion)
    return is_held and _counts(recorded, move)


def _counts(recorded: Sequence[Move], move: Move) -> bool:
    """Whether a begun record is the one that counts of its twins.

    A request that was repeated because its answer was lost leaves such.
    """
    twins = [o for o in recorded if (o.sequence, o.version) == (move.sequence, move.version)]
    return twins[0] is move and not any(twin.is_finished for twin in twins)


def _move(run: Run) -> Move:
    tags = run.data.tags
    return Move(
        run_id=str(run.info.run_id),
        kind=tags["kind"],
        sequence=int(tags["sequence"]),
        version=tags["version"],
        predecessor=tags["predecessor"] or None,
        pair_digest=tags["pair_digest"],
        reason=tags["reason"],
        time_utc=tags["time"],
        is_finished=str(run.info.status) == "FINISHED",
    )
