"""One OpenAI-compatible endpoint: continues exact token ids, and its answers are checked.

Answers are taken as ids or not at all: text that is tokenised again need not give the ids that the
target chose. The fields beyond OpenAI's, of a request and of an answer, are vLLM's; `draftsmith
serve` has them too. Knows nothing of other endpoints, or of when to try again.
"""

from __future__ import annotations

import contextlib
import email.utils
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from draftsmith.corpus.dispatch import in_thread
from draftsmith.corpus.lanes import Kind, TransientFault
from draftsmith.decoding import Event, Request, Result, SamplingParams, Trace
from draftsmith.decoding.randomness import request_key
from draftsmith.errors import CorpusError

_CONNECT_S = 10.0
_MOST_SHOWN = 300  # characters of what an endpoint says
_MOST_WAIT_S = 86400.0
_SEED_BITS = (1 << 31) - 1  # not every engine takes longer seeds
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
class Endpoint:
    """Where a model is served.

    Attributes:
        url: Up to and including `/v1`.
        model: Its name there.
        vocab_size: Ids of the target lie below it.
        timeout_s: For a whole answer.
        key: Goes with every request, and nowhere else; empty is none.
    """

    url: str
    model: str
    vocab_size: int
    timeout_s: float
    key: str = field(default="", repr=False)

    def require_model(self) -> None:
        """Ask whether the model is served.

        Raises:
            CorpusError: It is not, or the endpoint refuses.
            TransientFault: The endpoint cannot say now.
        """
        listed = self._ask("GET", "/models").get("data")
        entries = listed if isinstance(listed, list) else []
        names = sorted(str(entry.get("id")) for entry in entries if isinstance(entry, dict))
        if self.model not in names:
            raise self._error(
                found=f"the models {', '.join(names) or 'none'}",
                expected=f"`{self.model}` among them",
                remedy="correct corpus.endpoint_model, or serve the target under that name",
            )

    def complete(self, request: Request) -> Event:
        """Continue a prompt; the event holds the whole answer.

        Raises:
            CorpusError: The endpoint refuses, gives no ids, had another prompt, or breaks the law
                that was asked for.
            TransientFault: It may succeed another time.
        """
        choice = self._only_choice(self._ask("POST", "/completions", _body(self.model, request)))
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise TransientFault("cut_answer", f"an answer that ended by {reason!r}")
        ids = self._exact_ids(choice, request.prompt_ids)
        params = request.params
        if broken := _broken_law(ids, reason, params):
            raise self._error(
                found=broken,
                expected=f"{params.max_new_tokens} tokens, or fewer that end with the first of the "
                f"stop ids {', '.join(map(str, params.stop_token_ids))}",
                remedy="serve the target with room for corpus.max_prompt_tokens + "
                "corpus.max_new_tokens, by an engine that takes `stop_token_ids`",
            )
        is_stopped = ids[-1] in params.stop_token_ids
        finish: Literal["stop", "length"] = "stop" if is_stopped else "length"
        return Event(request.request_id, ids, Result(request.request_id, ids, finish, Trace()))

    def ids_of(self, text: str) -> list[int] | None:
        """How the tokenizer of the endpoint reads a text; None where it does not say.

        Raises:
            TransientFault: It cannot say now.
        """
        body = {
            "model": self.model,
            "prompt": text,
            "add_special_tokens": False,
            "max_tokens": 1,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        try:
            choice = self._only_choice(self._ask("POST", "/completions", body))
        except CorpusError:  # not every engine knows the field
            return None
        ids = choice.get("prompt_token_ids")
        return ids if isinstance(ids, list) else None

    def _exact_ids(self, choice: dict[str, Any], sent: list[int]) -> list[int]:
        """The answer's ids, which continue the prompt that was sent."""
        returned, ids = choice.get("prompt_token_ids"), choice.get("token_ids")
        if not self._are_ids(returned) or not self._are_ids(ids):
            raise self._error(
                found=f"no exact token ids in the answer ({_kind(returned)}, {_kind(ids)})",
                expected="`prompt_token_ids` and `token_ids` of the target's vocabulary: text "
                "that is tokenised again need not give the ids that were chosen",
                remedy="serve it with vLLM, `draftsmith serve` or what else takes "
                "`return_token_ids`, or set corpus.backend: local",
            )
        if returned != sent:
            raise self._other_prompt(sent, returned)
        return ids

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """What is answered within `timeout_s`; `requests` only bounds the time between two bytes.

        The thread of an answer that trickles is left to end with it.
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
        return self._error(
            found=f"HTTP {status} {said}".strip(),
            expected="an answer of OpenAI's API",
            remedy=remedies.get(status, "read what the endpoint says, and its log"),
        )

    def _shown(self, text: str) -> str:
        """What an endpoint says, on one line, without the key that it may repeat."""
        line = " ".join(text.split())
        return (line.replace(self.key, "[key]") if self.key else line)[:_MOST_SHOWN]

    def _only_choice(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = body.get("choices")
        if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
            choice: dict[str, Any] = choices[0]
            return choice
        raise self._error(
            found=f"an answer with {_kind(choices)} as `choices`",
            expected="one choice, as OpenAI's API has it",
            remedy="correct corpus.endpoints (up to and including /v1)",
        )

    def _are_ids(self, value: object) -> TypeGuard[list[int]]:
        if not isinstance(value, list) or not value:
            return False
        return all(type(item) is int and 0 <= item < self.vocab_size for item in value)

    def _other_prompt(self, sent: Sequence[int], returned: Sequence[int]) -> CorpusError:
        shared = min(len(sent), len(returned))
        place = next((i for i in range(shared) if sent[i] != returned[i]), shared)
        return self._error(
            found=f"an answer to another prompt: {len(returned)} ids that part from the "
            f"{len(sent)} sent ones at position {place}",
            expected="the ids that were sent, unchanged",
            remedy="serve the target with its own tokenizer, and without anything that adds to "
            "or cuts prompts",
        )

    def _error(self, *, found: str, expected: str, remedy: str) -> CorpusError:
        what = f"asking the endpoint {self.url}"
        return CorpusError(what, found=found, expected=expected, remedy=remedy)


def _body(model: str, request: Request) -> dict[str, Any]:
    """What is asked; whatever a server may have defaults of its own for is said.

    Requests get seeds of their own: with one for all, equal prompts would get equal answers.
    """
    params = request.params
    return {
        "model": model,
        "prompt": request.prompt_ids,
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "seed": request_key(params.seed, request.request_id) & _SEED_BITS,
        "stop_token_ids": list(params.stop_token_ids),
        "return_token_ids": True,
    }


def _broken_law(ids: Sequence[int], reason: str, params: SamplingParams) -> str | None:
    """How an answer is not what was asked for; None where it is."""
    stops = [place for place, token in enumerate(ids) if token in params.stop_token_ids]
    if stops and stops[0] < len(ids) - 1:
        return f"an answer that goes on behind the stop id {ids[stops[0]]}"
    if len(ids) > params.max_new_tokens:
        return f"an answer of {len(ids)} tokens"
    if not stops and reason == "stop":
        return f"an answer that was stopped behind the id {ids[-1]}"
    if not stops and len(ids) < params.max_new_tokens:
        return f"an answer that was cut after {len(ids)} tokens"
    return None


def _wait_s(headers: Any) -> float:  # noqa: ANN401  requests has no types
    """Seconds that `Retry-After` asks for, given as such or as a date."""
    text = str(headers.get("Retry-After", "0"))
    with contextlib.suppress(ValueError):
        return min(max(0.0, float(text)), _MOST_WAIT_S)
    with contextlib.suppress(ValueError):
        wait_s = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        return min(max(0.0, wait_s), _MOST_WAIT_S)
    return 0.0


def _kind(value: object) -> str:
    return f"a {type(value).__name__}" if value is not None else "nothing"
