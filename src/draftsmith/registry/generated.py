"""One answer of a pair, and what it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from draftsmith.decoding import Request, Result, SamplingParams, Trace
from draftsmith.decoding.trace import block_efficiency


@dataclass(frozen=True)
class Generation:
    """One answer and what it took.

    Attributes:
        text: What the tokens spell, without special tokens; it ends before a stop string.
        token_ids: Committed tokens; the stop token, or the one that completed a stop string,
            included.
        finish_reason: stop or length.
        stopped_by: The stop token or stop string that ended it, else None.
        num_rounds: Target forwards after the prefill.
        block_efficiency: Tokens committed per target forward (tau).
        tokens_per_s: Committed tokens over the wall time of the whole call, prefill included.
        latency_s: That time.
        params: How the request was sampled.
        trace: Its rounds.
    """

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    stopped_by: int | str | None
    num_rounds: int
    num_drafted: int
    num_accepted: int
    block_efficiency: float
    tokens_per_s: float
    latency_s: float
    num_prompt_tokens: int
    params: SamplingParams
    trace: Trace

    @classmethod
    def of(cls, request: Request, result: Result, text: str, *, seconds: float) -> Self:
        """What a request came to.

        Args:
            request: The request.
            result: Its result.
            text: What the result's tokens spell.
            seconds: Wall time of the whole call.
        """
        trace = result.trace
        return cls(
            text=text,
            token_ids=list(result.token_ids),
            finish_reason=result.finish_reason,
            stopped_by=result.stopped_by,
            num_rounds=trace.num_rounds,
            num_drafted=sum(trace.drafted),
            num_accepted=sum(trace.accepted),
            block_efficiency=block_efficiency([trace]),
            tokens_per_s=len(result.token_ids) / seconds,
            latency_s=seconds,
            num_prompt_tokens=len(request.prompt_ids),
            params=request.params,
            trace=trace,
        )
