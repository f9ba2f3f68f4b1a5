"""Bodies of requests: OpenAI's fields, strictly typed, and a few of other engines.

What is not here is refused by name and never ignored. Null stands for a field that is not given.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

_MAX_TOP = 20
_MAX_NAMES = 1024  # of an object
_MAX_ITEMS = 1 << 14
_MAX_WORDS = 128
_MAX_TOKENS = 1 << 20
_INT_64 = 1 << 63
_INT_31 = 1 << 31
_HALF = re.compile("[\ud800-\udfff]")


def _whole(text: str) -> str:
    """JSON can escape half a surrogate pair, which is no character and no tokenizer takes."""
    if _HALF.search(text):
        raise PydanticCustomError("no_text", "Input should be valid Unicode text")
    return text


Text = Annotated[str, AfterValidator(_whole)]
ShortText = Annotated[Text, Field(min_length=1, max_length=500)]
TokenId = Annotated[int, Field(ge=0, lt=_INT_31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=_MAX_TOKENS, fail_fast=True)]
# One string stands for a list of one.
Stops = Annotated[
    list[ShortText],
    Field(max_length=16, fail_fast=True),
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=ShortText | Annotated[list[ShortText], Field(max_length=16)],
    ),
]


def _few(data: Any) -> Any:  # noqa: ANN401  whatever was sent
    """Objects tell of every name that is wrong, so there must not be a million."""
    if isinstance(data, dict) and len(data) > _MAX_NAMES:
        expected = "Object should have at most {most} names, not {found}"
        raise PydanticCustomError("too_long", expected, {"most": _MAX_NAMES, "found": len(data)})
    return data


Few = BeforeValidator(_few)


def _nullable(schema: dict[str, Any]) -> None:
    """The description allows null, too, for what need not be given."""
    for name, field in schema.get("properties", {}).items():
        is_required = name in schema.get("required", ())
        if not is_required and {"type": "null"} not in field.get("anyOf", ()):
            outer = {key: field[key] for key in ("default", "description", "title") if key in field}
            inner = {key: value for key, value in field.items() if key not in outer}
            schema["properties"][name] = {"anyOf": [inner, {"type": "null"}], **outer}


class _Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_nullable
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:  # noqa: ANN401  whatever was sent
        if not isinstance(data, dict):
            return data
        _few(data)
        return {name: value for name, value in data.items() if value is not None}


def conflict(param: str, reason: str) -> PydanticCustomError:
    """The error for a field that does not go with another one."""
    return PydanticCustomError("conflict", "{reason}", {"param": param, "reason": reason})


class StreamOptions(_Body):
    """How a stream ends."""

    include_usage: bool = False


class TextFormat(_Body):
    """The one format there is."""

    type: Literal["text"]


class SamplingFields(_Body):
    """What both kinds of completion take."""

    model: Text
    max_tokens: int | None = Field(default=None, ge=1, lt=_INT_31)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    n: int = Field(default=1, ge=1, le=128)
    seed: int | None = Field(default=None, ge=-_INT_64, lt=_INT_64)
    stop: Stops = Field(default_factory=list)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Few] = Field(
        default_factory=dict,
        max_length=_MAX_NAMES,
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}},
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Of other engines.
    top_k: int = Field(default=0, ge=0, lt=_INT_31, description="0 is off.")
    min_p: float = Field(default=0.0, ge=0, lt=1)
    repetition_penalty: float = Field(default=1.0, ge=0.1, le=10)
    min_tokens: int = Field(default=0, ge=0, lt=_INT_31)
    bad_words: Annotated[list[ShortText], Field(max_length=_MAX_WORDS, fail_fast=True)] = Field(
        default_factory=list, description="As the tokenizer spells them, also behind a space."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_NAMES, fail_fast=True)] = Field(
        default_factory=list, description="Beside those that end the target's turns."
    )
    return_token_ids: bool = False
    # Taken without effect: none of them changes an answer. `metadata.domain` labels telemetry.
    metadata: Annotated[dict[Text, Text], Few] = Field(default_factory=dict)
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    store: bool = False
    service_tier: Literal["auto", "default"] = "auto"

    @model_validator(mode="after")
    def _is_streamed(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "needs stream: true")
        return self

    @property
    def num_prompts(self) -> int:
        """What is to be continued."""
        return 1

    @property
    def num_samples(self) -> int:
        """Answers that are wanted, to all prompts."""
        return self.num_prompts * self.n

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(_Body):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True)]


def _parts(content: object) -> object:
    """A plain text is a message of one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(_Body):
    """A turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Parts, BeforeValidator(_parts, json_schema_input_type=Text | Parts)]

    @property
    def plain(self) -> dict[str, str]:
        """The turn as a chat template takes it."""
        content = "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(SamplingFields):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=_INT_31)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=_MAX_TOP)
    response_format: TextFormat | None = None

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise conflict("top_logprobs", "needs logprobs: true")
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise conflict("max_tokens", "differs from max_completion_tokens; give one of them")
        return self

    @property
    def num_top(self) -> int | None:
        """Most probable tokens that are wanted beside each; None is without log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    @property
    def num_tokens(self) -> int | None:
        """Most tokens of an answer; None is as many as fit."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(SamplingFields):
    """Body of /v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=128, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=128, fail_fast=True)]
    )
    max_tokens: int | None = Field(default=16, ge=1, lt=_INT_31)
    logprobs: int | None = Field(default=None, ge=0, le=_MAX_TOP)
    echo: Literal[False] = False
    add_special_tokens: bool = Field(
        default=True, description="Whether the tokenizer may add its own to a prompt that is text."
    )
    best_of: int | None = None

    @model_validator(mode="after")
    def _agree(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise conflict("best_of", "is not supported: every sample is returned")
        return self

    @property
    def num_top(self) -> int | None:
        """Most probable tokens that are wanted beside each; None is without log-probabilities."""
        return self.logprobs

    @property
    def num_tokens(self) -> int | None:
        """Most tokens of an answer."""
        return self.max_tokens

    @property
    def num_prompts(self) -> int:
        """What is to be continued."""
        return len(self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as tokens."""
        prompt = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)
