"""One OpenAI-compatible endpoint: continues exact token ids, and its answers are checked.

Answers are taken as ids or not at all: text that is tokenised again need not give the ids that the
target chose. The fields beyond OpenAI's, of a request and of an answer, are vLLM's; `draftsmith
serve` has them too. Knows nothing of other endpoints, or of when to try again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from draftsmith.corpus.connection import Connection
from draftsmith.corpus.lanes import TransientFault
from draftsmith.decoding import Event, Request, Result, SamplingParams, Trace
from draftsmith.decoding.randomness import request_key
from draftsmith.errors import CorpusError

_SEED_BITS = (1 << 31) - 1  # not every engine takes longer seeds


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

    @property
    def _connection(self) -> Connection:
        return Connection(self.url, self.timeout_s, self.key)

    def require_model(self) -> None:
        """Ask whether the model is served.

        Raises:
            CorpusError: It is not, or the endpoint refuses.
            TransientFault: The endpoint cannot say now.
        """
        listed = self._connection.ask("GET", "/models").get("data")
        entries = listed if isinstance(listed, list) else []
        names = sorted(str(entry.get("id")) for entry in entries if isinstance(entry, dict))
        if self.model not in names:
            raise self._connection.error(
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
        choice = self._choice(_body(self.model, request))
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise TransientFault("cut_answer", f"an answer that ended by {reason!r}")
        ids = self._exact_ids(choice, request.prompt_ids)
        params = request.params
        if broken := _broken_law(ids, reason, params):
            raise self._connection.error(
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
            choice = self._choice(body)
        except CorpusError:  # not every engine knows the field
            return None
        ids = choice.get("prompt_token_ids")
        return ids if isinstance(ids, list) else None

    def _exact_ids(self, choice: dict[str, Any], sent: list[int]) -> list[int]:
        """The answer's ids, which continue the prompt that was sent."""
        returned, ids = choice.get("prompt_token_ids"), choice.get("token_ids")
        if not self._are_ids(returned) or not self._are_ids(ids):
            raise self._connection.error(
                found=f"no exact token ids in the answer ({_kind(returned)}, {_kind(ids)})",
                expected="`prompt_token_ids` and `token_ids` of the target's vocabulary: text "
                "that is tokenised again need not give the ids that were chosen",
                remedy="serve it with vLLM, `draftsmith serve` or what else takes "
                "`return_token_ids`, or set corpus.backend: local",
            )
        if returned != sent:
            raise self._other_prompt(sent, returned)
        return ids

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        """The one answer to a body."""
        choices = self._connection.ask("POST", "/completions", body).get("choices")
        if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
            choice: dict[str, Any] = choices[0]
            return choice
        raise self._connection.error(
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
        return self._connection.error(
            found=f"an answer to another prompt: {len(returned)} ids that part from the "
            f"{len(sent)} sent ones at position {place}",
            expected="the ids that were sent, unchanged",
            remedy="serve the target with its own tokenizer, and without anything that adds to "
            "or cuts prompts",
        )


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


def _kind(value: object) -> str:
    return f"a {type(value).__name__}" if value is not None else "nothing"
