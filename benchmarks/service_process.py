"""`draftsmith serve` in a process of its own, for programs that ask it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from draftsmith.errors import ConfigError

PATIENCE_S = 600
_MOST_SHOWN = 600  # characters of a log


@dataclass(frozen=True)
class ServiceProcess:
    """A server that answers.

    Attributes:
        process: Ends on a signal.
        facts: What it said when it began to answer.
        log: What it logged since.
    """

    process: subprocess.Popen[str]
    facts: dict[str, Any]
    log: IO[str]

    def logged(self) -> str:
        """All that it has logged."""
        self.log.seek(0)
        return self.log.read()


@contextlib.contextmanager
def running(uri: str, *options: str) -> Iterator[ServiceProcess]:
    """Serve a pair on a free port of this machine until the block ends.

    Raises:
        ConfigError: The server ended before it answered.
    """
    command = [sys.executable, "-m", "draftsmith.cli", "serve", uri, "--json", "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            service = ServiceProcess(process, {}, log)
            service.facts.update(_first_words(service))
            yield service
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _first_words(service: ServiceProcess) -> dict[str, Any]:
    assert service.process.stdout is not None
    lines = []
    for line in service.process.stdout:
        lines.append(line)
        if line == "}\n":
            return dict(json.loads("".join(lines)))
    raise ConfigError(
        "starting the service",
        found=" ".join(service.logged().split())[-_MOST_SHOWN:] or "nothing",
        expected="its address",
        remedy="run `draftsmith serve` with the same pair by hand",
    )
