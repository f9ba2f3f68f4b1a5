"""The decoding loop: admit, propose, verify, accept, commit, retire.

One engine for any batch, ragged, speculative or not. The cache of a row holds all committed tokens
but the last; that one is the first input of the next verification, so a round is one target forward
over `drafts + 1` positions and prefill needs no logits. With fixed `draft_length` a request's
tokens do not depend on its neighbours, nor on when it arrives, nor on being preempted: a request
that starts again goes on behind its committed tokens, and a draw depends on its position alone.

Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decoding.acceptance import Proposal, Verdict, verify
from draftsmith.decoding.batch import Batch, Row, pad_prompts
from draftsmith.decoding.distribution import Distribution, distribution
from draftsmith.decoding.proposers import Proposer, empty_proposal
from draftsmith.decoding.randomness import Purpose, uniform
from draftsmith.decoding.request import Event, Request, Result
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.errors import DecodingError

Verify = Callable[[Distribution, Proposal, Tensor, Tensor], Verdict]

_REFILL_SHARE = 8  # rows are admitted when an eighth of them is free: one prefill for several


class Engine:
    """Decodes requests with a target and a proposer.

    Args:
        target: Causal LM whose distribution is served.
        proposer: Who drafts.
        max_rows: Requests in flight at once.
        draft_length: Most tokens proposed in a round; 0 is autoregressive decoding. Where the
            proposer varies the length and temperature is above 0, the law of a request's tokens is
            the target's, but they depend on its neighbours.

    Raises:
        DecodingError: A parameter is out of range, or the target's cache cannot be rolled back.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        proposer: Proposer,
        *,
        max_rows: int,
        draft_length: int,
    ) -> None:
        _require_at_least("max_rows", max_rows, least=1)
        _require_at_least("draft_length", draft_length, least=0)
        self._target = SlotModel(target)
        self._proposer = proposer
        self.max_rows = max_rows
        self._draft_length = draft_length
        self.verify: Verify = verify
        self._batch = self._empty_batch()
        self._waiting: deque[Row] = deque()
        self._num_rows = self._max_context = 0

    def generate(self, requests: Sequence[Request]) -> list[Result]:
        """Decode all requests; results in their order.

        Raises:
            DecodingError: A request cannot be decoded; nothing was started.
        """
        results = {e.request_id: e.result for e in self.stream(requests) if e.result is not None}
        return [results[request.request_id] for request in requests]

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode all requests, yielding the tokens of every row after each round.

        Raises:
            DecodingError: A request cannot be decoded; nothing was started.
        """
        longest = max((_length(request) for request in requests), default=0)
        self._reset(rows=min(self.max_rows, len(requests)), context=longest)
        self.submit(requests)
        self._reserve()
        while self.is_busy:
            yield from self.step()

    def open(self, max_context: int) -> None:
        """Start afresh for requests that arrive one by one.

        Args:
            max_context: Tokens of the longest request, prompt and answer; the cache is taken now.
        """
        self._reset(rows=self.max_rows, context=max_context)
        self._reserve()

    def _reset(self, *, rows: int, context: int) -> None:
        self._batch = self._empty_batch()
        self._waiting.clear()
        self._num_rows, self._max_context = rows, context

    def _reserve(self) -> None:
        for cached in (self._target, self._proposer):
            slots = self._max_context + self._draft_length + 1
            cached.reserve(rows=self._num_rows, slots=slots)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or is in flight."""
        return bool(self._waiting) or len(self._batch) > 0

    def submit(self, requests: Sequence[Request]) -> None:
        """Let requests wait for a free row; they are admitted in order by `step`.

        Raises:
            DecodingError: A request cannot be decoded; none of them waits.
        """
        self._check(requests)
        self._waiting.extend(Row(request, list(request.prompt_ids)) for request in requests)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit who fits, then decode one round of all rows in flight; nothing when idle."""
        free = self._num_rows - len(self._batch)
        if self._waiting and (free * _REFILL_SHARE >= self._num_rows or not len(self._batch)):
            self._admit([self._waiting.popleft() for _ in range(min(free, len(self._waiting)))])
        return self._round() if len(self._batch) else []

    @torch.inference_mode()
    def abort(self, request_id: str) -> Result:
        """Take a request out between two steps; its result holds what was committed.

        Raises:
            DecodingError: No such request waits or is in flight.
        """
        row = self._take_out(request_id)
        return Result(request_id, row.token_ids[len(row.request.prompt_ids) :], "abort", row.trace)

    @torch.inference_mode()
    def preempt(self, request_id: str) -> None:
        """Free a request's row between two steps; it waits first in line and goes on later.

        Raises:
            DecodingError: No such request waits or is in flight.
        """
        self._waiting.appendleft(self._take_out(request_id))

    def _take_out(self, request_id: str) -> Row:
        for index, row in enumerate(self._batch.rows):
            if row.request.request_id == request_id:
                self._retire(index)
                return row
        for row in self._waiting:
            if row.request.request_id == request_id:
                self._waiting.remove(row)
                return row
        held = [row.request.request_id for row in (*self._batch.rows, *self._waiting)]
        raise DecodingError(
            f"taking request {request_id} out",
            found=f"requests {', '.join(held)}" if held else "no request",
            expected="a request that was submitted and has not ended",
            remedy="pass the id of one of them",
        )

    def _empty_batch(self) -> Batch:
        return Batch(self._target.device, int(self._target.config.vocab_size))

    def _check(self, requests: Sequence[Request]) -> None:
        limit = min(self._target.max_positions, self._proposer.max_positions, self._max_context)
        vocab = int(self._target.config.vocab_size)
        seen = {row.request.request_id for row in (*self._batch.rows, *self._waiting)}
        for request in requests:
            prompt, length = request.prompt_ids, _length(request)
            faults = {
                "an empty prompt": not prompt,
                f"{length} tokens with the new ones": length > limit,
                f"token ids outside 0..{vocab - 1}": not all(0 <= t < vocab for t in prompt),
                "an id that another request has": request.request_id in seen,
            }
            seen.add(request.request_id)
            for found, is_fault in faults.items():
                if is_fault:
                    raise DecodingError(
                        f"request {request.request_id}",
                        found=found,
                        expected=f"1 to {limit} tokens of the target's vocabulary and a unique id",
                        remedy="shorten the prompt or max_new_tokens, or mend the request",
                    )

    def _admit(self, rows: list[Row]) -> None:
        """Prefill all tokens but the last and append the rows to the batch."""
        first_row = len(self._batch)
        texts = [row.token_ids for row in rows]
        heads = [text[:-1] for text in texts]
        if any(heads):
            tokens, positions = pad_prompts(heads, self._target.device)
            span = tokens.shape[1]
            self._target.forward(tokens, positions, span=span, first_row=first_row, keep=0)
        self._proposer.admit(texts, first_row=first_row)
        for row in rows:
            self._batch.append(row)

    def _round(self) -> list[Event]:
        batch = self._batch
        # A row never drafts past its own length limit, so the cut depends on no neighbour.
        counts = [min(self._draft_length, row.num_remaining - 1) for row in batch.rows]
        proposal = self._proposer.propose(batch, counts) if any(counts) else empty_proposal(batch)
        tokens, num_accepted = self._verify(proposal)
        drafted = proposal.counts.tolist()
        events = []
        for index, row in enumerate(batch.rows):
            accepted = num_accepted[index]
            committed = _trim(tokens[index][: accepted + 1], row)
            row.token_ids += committed
            row.trace.record(
                drafted=drafted[index],
                accepted=accepted,
                committed=len(committed),
                from_text=index in proposal.from_text,
            )
            events.append(Event(row.request.request_id, committed, _result(row)))
        self._proposer.observe(batch)
        for index in reversed(range(len(events))):
            if events[index].result is not None:
                self._retire(index)
        return events

    def _verify(self, proposal: Proposal) -> tuple[list[list[int]], list[int]]:
        """One target forward and the acceptance rule; one copy from the device.

        Returns:
            For every row its drafts with the next token behind the accepted ones, and the number
            accepted.
        """
        batch, width = self._batch, proposal.tokens.shape[1] + 1
        pending, start = batch.tail(1)
        steps = torch.arange(width, device=batch.device)
        positions = start + steps
        inputs = torch.cat([pending, proposal.tokens], 1)
        logits = self._target.forward(inputs, positions, span=batch.span + width - 1).float()
        p = distribution(batch.adjust(logits, proposal.tokens), batch.sampling)
        accept, draw = self._uniforms(positions + 1)
        verdict = self.verify(p, proposal, accept[:, :-1], draw)
        is_finite = torch.isfinite(logits.amax(-1)).all(-1)
        tokens = torch.cat([proposal.tokens, pending], 1)
        tokens.scatter_(1, verdict.num_accepted[:, None], verdict.next_token[:, None])
        packed = torch.cat([tokens, verdict.num_accepted[:, None], is_finite[:, None]], 1).tolist()
        for row, values in zip(batch.rows, packed, strict=True):
            if not values[-1]:
                # NaN in the cache would outlive the request: a masked slot still adds 0 * NaN.
                self._target.release()
                raise DecodingError(
                    f"request {row.request.request_id}, token {len(row.token_ids)}",
                    found="target logits that are NaN or infinite",
                    expected="finite logits",
                    remedy="check the target's weights and dtype (try float32)",
                )
        return [values[:-2] for values in packed], [values[-2] for values in packed]

    def _uniforms(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._batch.sampling.is_greedy:  # one-hot: every u in [0, 1) gives the same verdict
            zeros = torch.zeros(positions.shape, device=positions.device)
            return zeros, zeros
        keys = self._batch.keys[:, None]
        return uniform(keys, positions, Purpose.ACCEPT), uniform(keys, positions, Purpose.SAMPLE)

    def _retire(self, index: int) -> None:
        last = self._batch.remove(index)
        if last != index:
            self._target.move_row(last, index)
            self._proposer.move_row(last, index)


def _require_at_least(name: str, value: int, *, least: int) -> None:
    if value < least:
        raise DecodingError(
            f"engine parameter {name}",
            found=str(value),
            expected=f">= {least}",
            remedy=f"pass a valid {name}",
        )


def _length(request: Request) -> int:
    return len(request.prompt_ids) + request.params.max_new_tokens


def _trim(token_ids: list[int], row: Row) -> list[int]:
    """Cut behind the first stop token and at the length limit."""
    token_ids = token_ids[: row.num_remaining]
    for place, token in enumerate(token_ids):
        if token in row.request.params.stop_token_ids:
            return token_ids[: place + 1]
    return token_ids


def _result(row: Row) -> Result | None:
    """The result of a finished row, None while it goes on."""
    stopped = row.token_ids[-1] in row.request.params.stop_token_ids
    if not stopped and row.num_remaining > 0:
        return None
    new = row.token_ids[len(row.request.prompt_ids) :]
    reason: Literal["stop", "length"] = "stop" if stopped else "length"
    return Result(row.request.request_id, new, reason, row.trace)
