"""Responses in the shape of OpenAI's API, whole or as a stream of chunks."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from draftsmith.decoding import Result, Trace
from draftsmith.decoding.trace import block_efficiency
from draftsmith.serving.api_errors import ApiError
from draftsmith.serving.gateway import Call, Gateway
from draftsmith.serving.parameters import Body
from draftsmith.serving.samples import (
    Piece,
    Sample,
    Token,
    chat_logprobs,
    completion_logprobs,
)
from draftsmith.serving.schema import ChatRequest

_DONE = "data: [DONE]\n\n"


class Answer:
    """The response to one call.

    Args:
        body: What was asked.
        call: Its samples.
        call_id: Names the response.
        num_prompt_tokens: Tokens of all prompts, each counted once.
    """

    def __init__(self, body: Body, call: Call, call_id: str, num_prompt_tokens: int) -> None:
        self._body, self._call = body, call
        self._is_chat = isinstance(body, ChatRequest)
        self._token_text = call.served.pair.token_text
        self._num_prompt_tokens = num_prompt_tokens
        names = [request.request_id for request in call.requests]
        self._index = {name: index for index, name in enumerate(names)}
        self._samples = [Sample(request, self._token_text) for request in call.requests]
        self._head = {
            "id": call_id,
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": f"pair-{call.served.digest[:16]}",
        }

    async def whole(self, gateway: Gateway) -> dict[str, Any]:
        """The response once every sample has ended.

        Raises:
            ApiError: A sample failed, or the time is over.
        """
        texts = [""] * len(self._samples)
        tokens: list[list[Token]] = [[] for _ in self._samples]
        reasons: list[str | None] = [None] * len(self._samples)
        async with contextlib.aclosing(self._pieces(gateway)) as pieces:
            async for index, piece in pieces:
                texts[index] += piece.text
                tokens[index] += piece.tokens
                reasons[index] = piece.finish_reason
        choices = []
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True)):
            shown = {"message": {"role": "assistant", "content": text, "refusal": None}}
            result = self._samples[index].result
            choice: dict[str, Any] = {
                "index": index,
                "finish_reason": reason,
                "logprobs": self._logprobs(tokens[index]),
                **self._ids(result.token_ids if result else (), index),
            }
            choices.append(choice | (shown if self._is_chat else {"text": text}))
        kind = "chat.completion" if self._is_chat else "text_completion"
        head = {**self._head, **self._chat_prompt()}
        return {**head, "object": kind, "choices": choices, "usage": self._usage()}

    async def stream(self, gateway: Gateway) -> AsyncIterator[str]:
        """The response as server-sent events; a failure in mid-stream is its last one."""
        begun: set[int] = set()
        if self._is_chat:
            for index in range(len(self._samples)):
                role = self._choice(index, {"role": "assistant", "content": ""})
                yield self._chunk(role, **({} if index else self._chat_prompt()))
        try:
            async with contextlib.aclosing(self._pieces(gateway)) as pieces:
                async for index, piece in pieces:
                    if piece.is_worth_sending or (self._body.return_token_ids and piece.token_ids):
                        ids = self._ids(piece.token_ids, None if index in begun else index)
                        begun.add(index)
                        yield self._chunk(self._shown(index, piece) | ids)
        except ApiError as error:
            gateway.records.metrics.refused(error.status)
            yield _event(error.body)
            return
        if self._body.wants_usage:
            yield self._chunk(None, usage=self._usage())
        yield _DONE

    async def _pieces(self, gateway: Gateway) -> AsyncGenerator[tuple[int, Piece], None]:
        async with contextlib.aclosing(gateway.follow(self._call)) as updates:
            async for update in updates:
                index = self._index[update.request_id]
                yield index, self._samples[index].add(update)

    def _shown(self, index: int, piece: Piece) -> dict[str, Any]:
        content = {"content": piece.text} if piece.text or piece.tokens else {}
        return self._choice(index, content, piece)

    def _choice(
        self, index: int, delta: Mapping[str, Any], piece: Piece | None = None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens) if piece else None
        shown = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        reason = piece.finish_reason if piece else None
        return {"index": index, "finish_reason": reason, "logprobs": logprobs, **shown}

    def _ids(self, token_ids: Sequence[int], prompt_of: int | None) -> dict[str, Any]:
        """Exact ids for a choice, where asked for, with the prompt of the sample `prompt_of`."""
        if not self._body.return_token_ids:
            return {}
        ids: dict[str, Any] = {"token_ids": list(token_ids)}
        if prompt_of is not None and not self._is_chat:
            ids["prompt_token_ids"] = self._call.requests[prompt_of].prompt_ids
        return ids

    def _chat_prompt(self) -> dict[str, Any]:
        """The prompt's ids, where asked for; all choices of a chat share it."""
        is_wanted = self._is_chat and self._body.return_token_ids
        return {"prompt_token_ids": self._call.requests[0].prompt_ids} if is_wanted else {}

    def _chunk(self, choice: Mapping[str, Any] | None, **more: Any) -> str:  # noqa: ANN401  JSON
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = {"usage": None} if self._body.wants_usage else {}
        choices = [] if choice is None else [choice]
        return _event({**self._head, "object": kind, "choices": choices, **usage, **more})

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._body.num_top is None:
            return None
        described = chat_logprobs if self._is_chat else completion_logprobs
        return described(tokens, self._token_text)

    def _usage(self) -> dict[str, Any]:
        results = [sample.result for sample in self._samples if sample.result is not None]
        return usage(results, self._num_prompt_tokens)


def usage(results: Sequence[Result], num_prompt_tokens: int) -> dict[str, Any]:
    """Tokens and rounds of all samples; the token that ended an answer counts."""
    num_new = sum(len(result.token_ids) for result in results)
    traces = [result.trace for result in results]
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new,
        "total_tokens": num_prompt_tokens + num_new,
        "speculation": {
            "drafted": sum(sum(trace.drafted) for trace in traces),
            "accepted": sum(map(_num_used, traces)),
            "rounds": sum(trace.num_rounds for trace in traces),
            "block_efficiency": round(block_efficiency(traces), 4),
        },
    }


def _num_used(trace: Trace) -> int:
    """Accepted drafts that the answer holds: none behind its end."""
    rounds = zip(trace.accepted, trace.committed, strict=True)
    return sum(min(accepted, committed) for accepted, committed in rounds)


def _event(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"data: {text}\n\n"
