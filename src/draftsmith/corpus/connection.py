"""Asking an endpoint over HTTP, and what its failures mean: for now, or for good.

Knows nothing of what is asked.
"""

from __future__ import annotations

import contextlib
import email.utils
import time
from dataclasses import dataclass, field
from typing import Any

from draftsmith.corpus.dispatch import in_thread
from draftsmith.corpus.lanes import Kind, TransientFault
from draftsmith.errors import CorpusError

_CONNECT_S = 10.0
_MOST_SHOWN = 300  # characters of what an endpoint says
_MOST_WAIT_S = 86400.0
_OK, _NO_KEY, _FORBIDDEN, _NOT_FOUND, _SERVER_ERRORS = 200, 401, 403, 404, 500
# Gateways say by the latter that nobody is behind them.
_KINDS: dict[int, Kind] = {
    408: "busy",
    425: "busy",
    429: "busy",
    502: "away",
    503: "away",
    504: "away",
}
KEY_VARIABLE = "DRAFTSMITH_ENDPOINT_KEY"


@dataclass(frozen=True)
class Connection:
    """The way to an endpoint.

    Attributes:
        url: Up to and including `/v1`.
        timeout_s: For a whole answer.
        key: Goes with every request, and nowhere else; empty is none.
    """

    url: str
    timeout_s: float
    key: str = field(default="", repr=False)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The object that is answered.

        `requests` bounds the time between two bytes alone: the thread of an answer that trickles is
        left to end with it.

        Raises:
            CorpusError: The endpoint refuses.
            TransientFault: It may succeed another time.
        """
        asked = in_thread(lambda: self._send(method, path, body))
        try:
            return asked.result(timeout=self.timeout_s)
        except TimeoutError:
            raise self._too_late() from None

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        # The local backend does without it.
        import requests  # noqa: PLC0415

        try:
            response = requests.request(
                method,
                self.url + path,
                json=body,
                auth=self._sign,
                timeout=(_CONNECT_S, self.timeout_s),
                allow_redirects=False,
            )
            if response.status_code != _OK:
                raise self._refusal(response.status_code, response.headers, response.text)
            data = response.json()
        except requests.JSONDecodeError:
            raise TransientFault("broken_body", "a body that is no whole JSON") from None
        except requests.ReadTimeout:
            raise self._too_late() from None
        except requests.RequestException as error:
            raise TransientFault("connection", type(error).__name__, kind="away") from None
        if not isinstance(data, dict):
            raise TransientFault("broken_body", f"a {type(data).__name__} in place of an object")
        return data

    def _too_late(self) -> TransientFault:
        """A machine that went away without a word looks like this, too."""
        return TransientFault("timeout", f"no answer within {self.timeout_s:g} s", kind="away")

    def _sign(self, prepared: Any) -> Any:  # noqa: ANN401  requests has no types
        """Also keeps `requests` from sending what a .netrc holds."""
        if self.key:
            prepared.headers["Authorization"] = f"Bearer {self.key}"
        return prepared

    def _refusal(self, status: int, headers: Any, text: str) -> Exception:  # noqa: ANN401  as above
        said = self._shown(text)
        if status in _KINDS or status >= _SERVER_ERRORS:
            found = f"HTTP {status} {said}".strip()
            kind = _KINDS.get(status, "failed")
            return TransientFault(f"http_{status}", found, wait_s=_wait_s(headers), kind=kind)
        remedies = {
            _NO_KEY: f"put a key of this endpoint into the environment as {KEY_VARIABLE}",
            _FORBIDDEN: f"put a key that may use this model into {KEY_VARIABLE}",
            _NOT_FOUND: "correct corpus.endpoints (up to and including /v1) or "
            "corpus.endpoint_model",
        }
        return self.error(
            found=f"HTTP {status} {said}".strip(),
            expected="an answer of OpenAI's API",
            remedy=remedies.get(status, "read what the endpoint says, and its log"),
        )

    def _shown(self, text: str) -> str:
        """What an endpoint says, on one line, without the key that it may repeat."""
        line = " ".join(text.split())
        return (line.replace(self.key, "[key]") if self.key else line)[:_MOST_SHOWN]

    def error(self, *, found: str, expected: str, remedy: str) -> CorpusError:
        """An error that names the endpoint."""
        what = f"asking the endpoint {self.url}"
        return CorpusError(what, found=found, expected=expected, remedy=remedy)


def _wait_s(headers: Any) -> float:  # noqa: ANN401  requests has no types
    """Seconds that `Retry-After` asks for, given as such or as a date."""
    text = str(headers.get("Retry-After", "0"))
    with contextlib.suppress(ValueError):
        return min(max(0.0, float(text)), _MOST_WAIT_S)
    with contextlib.suppress(ValueError):
        wait_s = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        return min(max(0.0, wait_s), _MOST_WAIT_S)
    return 0.0
