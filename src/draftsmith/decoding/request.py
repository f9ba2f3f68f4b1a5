"""What goes into the engine and what comes out: plain values, checked where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request.

    Attributes:
        max_new_tokens: At most so many tokens are committed; at least 1.
        temperature: 0 is greedy; otherwise at least 1e-6.
        top_k: 0 is off.
        top_p: In (0, 1]; 1 is off.
        seed: With the request id, the key of all its draws.
        stop_token_ids: Generation ends after one of these is committed; it is part of the result.

    Raises:
        DecodingError: A value is out of range; names the parameter.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
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


@dataclass(frozen=True)
class Request:
    """A prompt to be continued. `request_id` must be unique among the requests of one call."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Result:
    """Committed tokens of a request; `finish_reason` is stop (a stop token ended it) or length."""

    request_id: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    trace: Trace


@dataclass(frozen=True)
class Event:
    """Tokens that a round committed for a request, whose last event carries its result."""

    request_id: str
    token_ids: list[int]
    result: Result | None = None
