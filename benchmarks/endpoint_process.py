"""A server of a target in processes of its own, which can be killed and started again.

Knows nothing of what the server is: a command says how it is started on a port.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import requests

from draftsmith.errors import ConfigError

HOST = "127.0.0.1"
_PATIENCE_S = 900.0
_PAUSE_S = 0.2
_MOST_SHOWN = 600  # characters of a log


class EndpointProcess:
    """Serves on one port of this machine within the block, all of its processes in one group.

    Args:
        command: Of a port.
        environment: Of the processes, and nothing besides.
        log: A file that takes what they say.

    Attributes:
        url: Up to and including `/v1`; the same after a second start.
    """

    def __init__(
        self, command: Callable[[int], Sequence[str]], environment: Mapping[str, str], log: Path
    ) -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        self.url = f"http://{HOST}:{port}/v1"
        self._command, self._environment, self._log = [*command(port)], dict(environment), log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start, and wait until it answers."""
        self.start()
        try:
            self.wait()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self.kill()

    def start(self) -> None:
        """Start it; `wait` says when it answers.

        Raises:
            ConfigError: There is no such program.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise self._failed(f"{self._command[0]}: {error.strerror}") from error

    def wait(self) -> None:
        """Until it lists its models.

        Raises:
            ConfigError: It ended before, or takes too long.
        """
        assert self._process is not None, "start it first"
        end = time.monotonic() + _PATIENCE_S
        while not self._answers():
            if (code := self._process.poll()) is not None:
                said = " ".join(self._log.read_text(errors="replace").split())
                raise self._failed(f"exit code {code}, and: {said[-_MOST_SHOWN:] or 'nothing'}")
            if time.monotonic() > end:
                raise self._failed(f"no answer within {_PATIENCE_S:g} seconds")
            time.sleep(_PAUSE_S)

    def kill(self) -> None:
        """SIGKILL to all of its processes; nothing where none runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            return requests.get(f"{self.url}/models", timeout=_PAUSE_S * 10).ok
        except requests.RequestException:
            return False

    def _failed(self, found: str) -> ConfigError:
        return ConfigError(
            "starting a server of the target",
            found=found,
            expected=f"one that answers at {self.url}",
            remedy=f"read {self._log}; `make vllm-corpus` prepares an environment with vLLM",
        )
