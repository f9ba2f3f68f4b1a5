"""What goes into the engine and what comes out: plain values, checked where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypedDict

from draftsmith.decoding.trace import Trace
from draftsmith.errors import DecodingError

_MIN_TEMPERATURE = 1e-6  # below it logits / temperature leaves float32


def _require(name: str, value: object, *, expected: str, ok: bool) -> None:
    if not ok:
        raise DecodingError(
            f"sampling parameter {name}",
            found=repr(value),
            expected=expected,
            remedy=f"pass a valid {name}",
        )


class Sampling(TypedDict, total=False):
    """The sampling parameters that a caller may name; see `SamplingParams`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_new_tokens: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request.

    Attributes:
        max_new_tokens: At most so many tokens are committed; at least 1.
        temperature: 0 is greedy; otherwise at least 1e-6.
        top_k: 0 is off.
        top_p: In (0, 1]; 1 is off.
        min_p: In [0, 1): least share of the most probable token's probability; 0 is off.
        repetition_penalty: Positive; divides the logits of tokens in prompt and answer; 1 is off.
        presence_penalty: Subtracted from the logits of tokens in the answer; 0 is off.
        frequency_penalty: The same for each occurrence; 0 is off.
        min_new_tokens: No stop token is committed before so many tokens; 0 is off.
        seed: With the request id, the key of all its draws.
        stop_token_ids: Generation ends after one of these is committed; it is part of the result.

    Raises:
        DecodingError: A value is out of range; names the parameter.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check ranges."""
        usable = self.temperature == 0 or (
            math.isfinite(self.temperature) and self.temperature >= _MIN_TEMPERATURE
        )
        tokens = self.max_new_tokens
        _require("max_new_tokens", tokens, expected=">= 1", ok=tokens >= 1)
        expected = f"0, or finite and >= {_MIN_TEMPERATURE}"
        _require("temperature", self.temperature, expected=expected, ok=usable)
        _require("top_k", self.top_k, expected=">= 0 (0 is off)", ok=self.top_k >= 0)
        _require("top_p", self.top_p, expected="in (0, 1]", ok=0 < self.top_p <= 1)
        _require("min_p", self.min_p, expected="in [0, 1)", ok=0 <= self.min_p < 1)
        penalty = self.repetition_penalty
        usable = math.isfinite(penalty) and penalty > 0
        _require("repetition_penalty", penalty, expected="finite and > 0 (1 is off)", ok=usable)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(name, value, expected="finite (0 is off)", ok=math.isfinite(value))
        least = self.min_new_tokens
        expected = f"0 to max_new_tokens ({tokens})"
        _require("min_new_tokens", least, expected=expected, ok=0 <= least <= tokens)

    @property
    def depends_on_history(self) -> bool:
        """Whether logits are changed by what the row holds already."""
        is_penalised = (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )
        return is_penalised or self.min_new_tokens > 0


@dataclass(frozen=True)
class Request:
    """A prompt to be continued. `request_id` must be unique among the requests of one call."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Result:
    """Committed tokens of a request.

    `finish_reason` is stop (a stop token ended it), length, or abort (it was taken out).
    """

    request_id: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    trace: Trace


@dataclass(frozen=True)
class Event:
    """Tokens that a round committed for a request, whose last event carries its result."""

    request_id: str
    token_ids: list[int]
    result: Result | None = None
