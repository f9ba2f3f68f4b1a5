"""From a request's body to what the engine decodes: prompts as tokens, sampling parameters, keys.

Runs before anything is queued, so that whatever is wrong with a request is told at once.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from draftsmith.decoding import Request, SamplingParams
from draftsmith.errors import DecodingError, TargetError
from draftsmith.serving.api_errors import MOST_SHOWN, ApiError, refused_parameter
from draftsmith.serving.schema import ChatRequest, CompletionRequest
from draftsmith.serving.served_pair import ServedPair

Body = ChatRequest | CompletionRequest
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_CONTEXT = "context_length_exceeded"


@dataclass(frozen=True)
class Encoded:
    """What a body says in tokens.

    Attributes:
        prompts: Each of them.
        bad_words: Spellings of the bad words.
    """

    prompts: Sequence[list[int]]
    bad_words: tuple[tuple[int, ...], ...]


def encode(body: Body, served: ServedPair) -> Encoded:
    """The texts of a body as tokens.

    Raises:
        ApiError: The chat template refuses the messages, or a prompt is empty or no text.
    """
    return Encoded(_prompts(body, served), _spellings(body.bad_words, served))


def _spellings(words: Sequence[str], served: ServedPair) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, and of a space and the word unless it begins with one."""
    tokenizer = served.pair.target.tokenizer
    spaced = (f" {word}" for word in words if not word[0].isspace())
    texts = dict.fromkeys((*words, *spaced))
    spelled = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
    return tuple(tuple(ids) for ids in spelled if ids)


def _prompts(body: Body, served: ServedPair) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        ApiError: The chat template refuses the messages, or a prompt is empty or no text.
    """
    if isinstance(body, ChatRequest):
        return [_encode_chat(body, served)]
    prompts: list[list[int]] = []
    vocab_size = _vocab_size(served)
    for prompt in body.prompts:
        if isinstance(prompt, str):
            tokenizer, is_added = served.pair.target.tokenizer, body.add_special_tokens
            ids = list(tokenizer(prompt, add_special_tokens=is_added).input_ids)
        else:
            ids = prompt
        if not ids:
            raise ApiError(400, "prompt: found no token; expected at least one", param="prompt")
        if max(ids) >= vocab_size:
            raise ApiError(400, f"prompt: expected ids below {vocab_size}", param="prompt")
        prompts.append(ids)
    return prompts


def _encode_chat(body: ChatRequest, served: ServedPair) -> list[int]:
    try:
        return served.pair.encode([message.plain for message in body.messages])
    except TemplateError as error:
        message = f"messages: the target's chat template refuses them: {error}"
        raise ApiError(400, message, param="messages") from None
    except TargetError as error:
        raise ApiError(400, f"messages: {error}", param="messages") from None


def requests_of(body: Body, encoded: Encoded, served: ServedPair, *, call_id: str) -> list[Request]:
    """One request a sample, prompt by prompt.

    A seed gives the same samples whatever else is in flight, in whichever order it came.

    Raises:
        ApiError: A parameter is out of range, or the context is too short.
    """
    vocab_size = _vocab_size(served)
    bias, stop_ids = _bias(body, vocab_size), _stop_ids(body, vocab_size)
    requests: list[Request] = []
    for prompt in encoded.prompts:
        try:
            params = SamplingParams(
                max_new_tokens=_num_tokens(body, len(prompt), served.max_tokens),
                temperature=body.temperature,
                top_k=body.top_k,
                top_p=body.top_p,
                min_p=body.min_p,
                repetition_penalty=body.repetition_penalty,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                logit_bias=bias,
                bad_words_ids=encoded.bad_words,
                min_new_tokens=body.min_tokens,
                seed=secrets.randbits(63) if body.seed is None else body.seed,
                stop_token_ids=tuple(sorted({*served.pair.stop_token_ids(), *stop_ids})),
                stop_strings=tuple(body.stop),
            )
        except DecodingError as error:
            raise refused_parameter(error) from None
        for sample in range(body.n):
            name = f"{call_id}-{len(requests)}"
            requests.append(
                Request(name, list(prompt), params, draw_key=str(sample), num_top=body.num_top)
            )
    return requests


def _num_tokens(body: Body, num_prompt: int, limit: int) -> int:
    """Tokens that the answer may have."""
    room = limit - num_prompt
    wanted = body.num_tokens or max(room, 1)
    if wanted > room:
        param = "messages" if isinstance(body, ChatRequest) else "prompt"
        message = (
            f"{param}: found {num_prompt} tokens and {wanted} to be generated; expected at most "
            f"{limit} in all"
        )
        raise ApiError(400, message, param=param, code=_CONTEXT)
    return wanted


def _bias(body: Body, vocab_size: int) -> tuple[tuple[int, float], ...]:
    for key in body.logit_bias:
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            found = key[:MOST_SHOWN]
            message = f"logit_bias: found the key {found!r}; expected token ids below {vocab_size}"
            raise ApiError(400, message, param="logit_bias")
    return tuple((int(key), value) for key, value in body.logit_bias.items())


def _stop_ids(body: Body, vocab_size: int) -> list[int]:
    if max(body.stop_token_ids, default=0) >= vocab_size:
        message = f"stop_token_ids: expected ids below {vocab_size}"
        raise ApiError(400, message, param="stop_token_ids")
    return body.stop_token_ids


def _vocab_size(served: ServedPair) -> int:
    return int(served.pair.target.model.config.get_text_config().vocab_size)
