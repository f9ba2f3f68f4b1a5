"""What is kept of requests that ended: counters, and lines of telemetry.

Telemetry is written by a thread of its own; a disk that refuses costs lines and no answers.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from draftsmith.decoding import Request, Result
from draftsmith.drift.telemetry import ServedRequest, append_telemetry, describe_request
from draftsmith.errors import ArtifactError
from draftsmith.serving.metrics import ServerMetrics

_LOG = logging.getLogger(__name__)


class Records:
    """Of one server.

    Args:
        telemetry: File that gets a line a request; None is none.
    """

    def __init__(self, telemetry: Path | None) -> None:
        self.metrics = ServerMetrics()
        self._file = telemetry
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="telemetry")

    def ended(
        self, request: Request, result: Result, *, pair_digest: str, domain: str | None, s: float
    ) -> None:
        """Count a request that ended after `s` seconds; one without a round tells nothing more."""
        line = describe_request(
            result.trace,
            request.params,
            time_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
            pair_digest=pair_digest,
            domain=domain,
            prompt_tokens=len(request.prompt_ids),
            latency_s=round(s, 6),
        )
        self.metrics.finished(line, result.finish_reason)
        if self._file is not None and line.rounds:
            self._writer.submit(self._append, self._file, line)

    @staticmethod
    def _append(file: Path, line: ServedRequest) -> None:
        try:
            append_telemetry(file, line)
        except ArtifactError as error:
            _LOG.warning("event=telemetry_lost error=%s", error)

    def close(self) -> None:
        """Write what is left."""
        self._writer.shutdown()
