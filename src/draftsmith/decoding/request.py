"""What goes into the engine and what comes out: plain values, checked where they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

from draftsmith.decoding.trace import Trace
from draftsmith.errors import DecodingError

if TYPE_CHECKING:
    from transformers import LogitsProcessor

_MIN_TEMPERATURE = 1e-6  # below it logits / temperature leaves float32
_MAX_BIAS = 100.0  # as in OpenAI's API


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
    logit_bias: Sequence[tuple[int, float]]
    bad_words_ids: Sequence[Sequence[int]]
    min_new_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]
    stop_strings: Sequence[str]


def require_known(values: Mapping[str, object]) -> None:
    """Refuse parameters that are not supported.

    Raises:
        DecodingError: There is one; names it.
    """
    unknown = [name for name in values if name not in Sampling.__annotations__]
    if unknown:
        raise DecodingError(
            f"sampling parameter {', '.join(unknown)}",
            found="a parameter that is not supported",
            expected=f"one of {', '.join(Sampling.__annotations__)}",
            remedy="leave it out, or bring it as a logits processor under verify='match'",
        )


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
        logit_bias: Token ids, each with what is added to its logit, -100 to 100; before penalties.
        bad_words_ids: Sequences of token ids that the answer must not hold.
        min_new_tokens: No stop token is committed, and no stop string ends the answer, before so
            many tokens; 0 is off.
        seed: With the request's `draw_key`, the key of all its draws.
        stop_token_ids: Generation ends after one of these is committed; it is part of the result.
        stop_strings: Generation ends after the token that completes one of these in the answer's
            text; that token is part of the result.

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
    logit_bias: Sequence[tuple[int, float]] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    min_new_tokens: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: Sequence[str] = ()

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
        usable = all(i >= 0 and abs(bias) <= _MAX_BIAS for i, bias in self.logit_bias)
        expected = f"ids, 0 or more, with numbers from -{_MAX_BIAS:g} to {_MAX_BIAS:g}"
        _require("logit_bias", self.logit_bias, expected=expected, ok=usable)
        words = self.bad_words_ids
        usable = all(len(word) > 0 and min(word) >= 0 for word in words)
        _require("bad_words_ids", words, expected="non-empty lists of ids, 0 or more", ok=usable)
        least = self.min_new_tokens
        expected = f"0 to max_new_tokens ({tokens})"
        _require("min_new_tokens", least, expected=expected, ok=0 <= least <= tokens)
        ids, strings = self.stop_token_ids, self.stop_strings
        _require("stop_token_ids", ids, expected="ids, 0 or more", ok=all(i >= 0 for i in ids))
        usable = not isinstance(strings, str) and all(map(_is_text, strings))
        _require("stop_strings", strings, expected="several non-empty texts", ok=usable)

    @property
    def depends_on_history(self) -> bool:
        """Whether logits are changed by what the row holds already."""
        is_penalised = (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )
        return is_penalised or self.min_new_tokens > 0


def _is_text(value: object) -> bool:
    """Whether it is a text that some tokens can spell: not empty, no half of a surrogate pair."""
    if not isinstance(value, str) or not value:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


@dataclass(frozen=True)
class Request:
    """A prompt to be continued.

    Attributes:
        request_id: Unique among the requests of one call.
        prompt_ids: At least one token.
        params: How to sample it.
        logits_processors: Change the scores after penalties and before the temperature, one after
            the other; each is called with the row's text, int64 `[1, tokens]`, and float32 scores
            `[1, vocab]`. Only an engine with `verify="match"` takes them.
        draw_key: With the seed, the key of all its draws; None takes the request id. Requests with
            the same seed, key and prompt get the same tokens.
        num_top: Its events carry the log-probabilities of their tokens and of so many most probable
            ones; None is without.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    logits_processors: Sequence[LogitsProcessor] = ()
    draw_key: str | None = None
    num_top: int | None = None


def require_means(request: Request, *, can_match: bool, can_spell: bool) -> None:
    """Refuse a request that needs an engine of another make.

    Args:
        request: Any.
        can_match: The engine verifies by comparison.
        can_spell: It knows what tokens spell.

    Raises:
        DecodingError: Names the processors, or the stop strings.
    """
    processors = ", ".join(type(processor).__name__ for processor in request.logits_processors)
    for needed, has, found, means in (
        (processors, can_match, f"logits processors {processors}", 'verify="match"'),
        (request.params.stop_strings, can_spell, "stop_strings", "token_text"),
    ):
        if needed and not has:
            raise DecodingError(
                f"request {request.request_id}",
                found=found,
                expected=f"an engine that was made with {means}",
                remedy=f"pass {means} to the engine, or leave them out",
            )


@dataclass(frozen=True)
class Result:
    """Committed tokens of a request.

    Attributes:
        request_id: The request's.
        token_ids: The stop token, or the one that completed a stop string, included.
        finish_reason: stop, length, or abort (it was taken out).
        trace: Its rounds.
        stopped_by: The stop token or stop string that ended it; None where none did.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    trace: Trace
    stopped_by: int | str | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one committed token.

    Attributes:
        logprob: Natural logarithm of the target's probability at temperature 1, without penalties,
            bias or truncation.
        top: The most probable ids with theirs, in descending order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Event:
    """Tokens that a round committed for a request, whose last event carries its result.

    `logprobs` has an entry a token where the request asked for them; it is empty elsewhere.
    """

    request_id: str
    token_ids: list[int]
    result: Result | None = None
    logprobs: Sequence[TokenLogprobs] = ()
