"""How a pair is served: plain values, checked where they are made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from draftsmith.errors import ConfigError

KEYS_VARIABLE = "DRAFTSMITH_API_KEYS"
_SPARE_REQUESTS = 256  # beyond those that there is room for: short ones, and refusals


@dataclass(frozen=True)
class Limits:
    """What the server takes on.

    Attributes:
        max_rows: Samples decoded at once.
        max_queue: Samples that may wait behind them; more are refused with 429.
        max_context: Tokens of a request, prompt and answer; the models' own limit if that is less.
        max_body_bytes: Size of a request's body.
        request_timeout_s: From a request's arrival to its last token.
        client_timeout_s: For a client to send its body, and to take each piece of an answer.
    """

    max_rows: int = 8
    max_queue: int = 64
    max_context: int = 4096
    max_body_bytes: int = 1 << 20
    request_timeout_s: float = 600.0
    client_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Check ranges."""
        least = {"max_rows": 1, "max_queue": 0, "max_context": 2, "max_body_bytes": 1}
        for name, value in vars(self).items():
            if not value >= least.get(name, 0.001):
                raise ConfigError(
                    f"reading the limit {name}",
                    found=str(value),
                    expected=f"at least {least.get(name, 0.001)}",
                    remedy="pass a valid one",
                )

    @property
    def max_requests(self) -> int:
        """Requests that are in hand at once, whatever they ask for."""
        return self.max_rows + self.max_queue + _SPARE_REQUESTS


def read_keys(file: Path | None) -> tuple[bytes, ...]:
    """The API keys of a file, one a line, or of the environment, separated by commas; maybe none.

    Raises:
        ConfigError: The file cannot be read, or it or the variable is there and holds no key.
    """
    if file is None:
        return _keys_of_environment()
    try:
        keys = _keys(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise _no_keys(file, getattr(error, "strerror", None) or "no UTF-8 text") from error
    if not keys:
        raise _no_keys(file, "no key")
    return keys


def _keys_of_environment() -> tuple[bytes, ...]:
    text = os.environ.get(KEYS_VARIABLE)
    if text is None:
        return ()
    keys = _keys(text.replace(",", "\n"))
    if not keys:  # whoever sets it wants a lock
        raise ConfigError(
            f"reading the API keys of {KEYS_VARIABLE}",
            found="no key",
            expected="keys, separated by commas",
            remedy="set some, or unset the variable to leave the API open",
        )
    return keys


def _keys(text: str) -> tuple[bytes, ...]:
    lines = (line.strip() for line in text.splitlines())
    return tuple(line.encode() for line in lines if line and not line.startswith("#"))


def _no_keys(file: Path, found: str) -> ConfigError:
    return ConfigError(
        f"reading the API keys of {file}",
        found=found,
        expected="one key a line",
        remedy=f"mend the file, or set {KEYS_VARIABLE} instead",
    )
