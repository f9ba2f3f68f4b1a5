"""Append-only records of who became champion, when, after whom and why.

MLflow keeps no history of an alias. Every move is one run here: begun before the alias moves,
finished after it was read back, so that a killed move is either completed or marked as never done.
Call with the registry's lock held, but for `moves`, which only reads.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftsmith.registry.pair import RegisteredPair

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PROMOTION = "promotion"
ROLLBACK = "rollback"
_PAGE = 1000
_MAX_CHARACTERS = 8000  # what a database keeps of a run's tag


def as_recorded(reasons: Sequence[str]) -> str:
    """Reasons as a record holds them: joined, and cut where a database would refuse them."""
    text = "; ".join(reasons)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"


@dataclass(frozen=True)
class Move:
    """One move of the champion alias.

    Attributes:
        sequence: Position in the history, from 1; a total order that needs no clock.
        predecessor: The version that held the alias before; None for the first champion.
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


class MoveLog:
    """The moves of one registered model's champion alias."""

    def __init__(self, client: MlflowClient, experiment_id: str, name: str) -> None:
        """Read and write the records of the model `name` in one experiment."""
        self._client = client
        self._experiment_id = experiment_id
        self._name = name

    def moves(self, champion: str | None) -> list[Move]:
        """Completed moves, oldest first.

        A begun move whose version holds the alias did happen; its process died before saying so.
        """
        recorded = self._recorded()
        return [move for move in recorded if move.is_finished or _is_cut(recorded, move, champion)]

    def begin(
        self, kind: str, pair: RegisteredPair, *, champion: str | None, reasons: Sequence[str]
    ) -> str:
        """Record that the alias is to move from `champion` to `pair`; returns the run's id."""
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
                "predecessor": champion or "",
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
                self._client.set_terminated(move.run_id, status="FINISHED" if done else "KILLED")

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
    """Whether `move` is the newest one, begun but not finished, and the alias did move.

    A request that was repeated because its answer was lost leaves twins; one of them counts.
    """
    newest = max(other.sequence for other in recorded)
    if move.sequence != newest or move.version != champion:
        return False
    twins = [o for o in recorded if (o.sequence, o.version) == (newest, champion)]
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
