"""What is answered, as /openapi.json describes it; `answers` and `state` make it.

An answer may have more fields than are named here, and gets them without a change of this module.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Fault(BaseModel):
    """Why there is no answer."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class Error(BaseModel):
    """A request that is not answered as asked."""

    error: Fault


class Speculation(BaseModel):
    """How the answer was decoded."""

    drafted: int
    accepted: int
    rounds: int
    block_efficiency: float


class Usage(BaseModel):
    """Tokens of all samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    speculation: Speculation


class ProbableToken(BaseModel):
    """A token and its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class ChosenToken(ProbableToken):
    """A token of the answer, and the most probable ones in its place."""

    top_logprobs: list[ProbableToken]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message."""

    content: list[ChosenToken]
    refusal: None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Answered(BaseModel):
    """What is told of every sample."""

    index: int
    finish_reason: Literal["stop", "length"]


class AnsweredMessage(BaseModel):
    """The turn that was asked for."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answered):
    """A sample of a chat."""

    message: AnsweredMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Answered):
    """A sample of a completion."""

    text: str
    logprobs: CompletionLogprobs | None


class Completed(BaseModel):
    """What is told of every call."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(Completed):
    """An answered chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(Completed):
    """Answered prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class PairName(BaseModel):
    """Which pair it is."""

    version: str | None
    digest: str


class Model(BaseModel):
    """What is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    pair: PairName


class ModelList(BaseModel):
    """All that is served."""

    object: Literal["list"]
    data: list[Model]


class RefusedPair(BaseModel):
    """A pair that does not serve."""

    version: str
    reason: str
    is_final: bool


class Health(BaseModel):
    """How the server is."""

    status: str
    model: str
    version: str | None
    pair_digest: str
    target_digest: str
    draft_length: int | Literal["adaptive"]
    running: int
    waiting: int
    followed: str | None
    refused: RefusedPair | None
    registry: str


class Readiness(BaseModel):
    """Whether new requests are welcome."""

    ready: bool


Responses = dict[int | str, dict[str, Any]]
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
# Of every route; `health` brings the definition along.
ERRORS: Responses = {status: {"content": _ERROR} for status in ("4XX", "5XX")}
HEALTH: Responses = {200: {"model": Health}, 503: {"model": Health | Error}}
READINESS: Responses = {200: {"model": Readiness}, 503: {"model": Readiness | Error}}


def streamed(model: type[BaseModel]) -> Responses:
    """A call that is answered at once or, if it asks for that, in events."""
    return {200: {"model": model, "content": {"text/event-stream": {}}}}
