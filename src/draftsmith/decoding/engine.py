"""The decoding loop: admit, propose, verify, accept, commit, retire.

One engine for any batch, ragged, speculative or not. The cache of a row holds all committed tokens
but the last; that one is the first input of the next verification, so a round is one target forward
over `drafts + 1` positions and prefill needs no logits. With fixed `draft_length` a request's
tokens do not depend on its neighbours.

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
        draft_length: Tokens proposed in a round; 0 is autoregressive decoding.

    Raises:
        DecodingError: A parameter is out of range, or the target's cache cannot be rolled back.
    """

    def __init__(
        self, target: PreTrainedModel, proposer: Proposer, *, max_rows: int, draft_length: int
    ) -> None:
        _require_at_least("max_rows", max_rows, least=1)
        _require_at_least("draft_length", draft_length, least=0)
        self._target = SlotModel(target)
        self._proposer = proposer
        self.max_rows = max_rows
        self.draft_length = draft_length
        self.verify: Verify = verify
        self._batch = Batch(self._target.device)

    def generate(self, requests: Sequence[Request]) -> list[Result]:
        """Decode all requests; results in their order.

        Raises:
            DecodingError: A request cannot be decoded; nothing was started.
        """
        results = {e.request_id: e.result for e in self.stream(requests) if e.result is not None}
        return [results[request.request_id] for request in requests]

    @torch.inference_mode()
    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode all requests, yielding the tokens of every row after each round.

        Raises:
            DecodingError: A request cannot be decoded; nothing was started.
        """
        self._check(requests)
        waiting = deque(requests)
        self._batch = Batch(self._target.device)
        longest = max((len(r.prompt_ids) + r.params.max_new_tokens for r in requests), default=0)
        rows = min(self.max_rows, len(requests))
        for cached in (self._target, self._proposer):
            cached.reserve(rows=rows, slots=longest + self.draft_length + 1)
        while waiting or len(self._batch):
            free = rows - len(self._batch)
            if waiting and (free * _REFILL_SHARE >= rows or not len(self._batch)):
                self._admit([waiting.popleft() for _ in range(min(free, len(waiting)))])
            yield from self._round()

    def _check(self, requests: Sequence[Request]) -> None:
        limit = min(self._target.max_positions, self._proposer.max_positions)
        vocab = int(self._target.config.vocab_size)
        seen: set[str] = set()
        for request in requests:
            prompt = request.prompt_ids
            length = len(prompt) + request.params.max_new_tokens
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

    def _admit(self, requests: list[Request]) -> None:
        """Prefill all but the last prompt token and append the rows to the batch."""
        first_row = len(self._batch)
        prompts = [request.prompt_ids for request in requests]
        heads = [prompt[:-1] for prompt in prompts]
        if any(heads):
            tokens, positions = pad_prompts(heads, self._target.device)
            span = tokens.shape[1]
            self._target.forward(tokens, positions, span=span, first_row=first_row, keep=0)
        self._proposer.admit(prompts, first_row=first_row)
        for request in requests:
            self._batch.append(Row(request, list(request.prompt_ids)))

    def _round(self) -> Iterator[Event]:
        batch = self._batch
        # A row never drafts past its own length limit, so the cut depends on no neighbour.
        counts = [min(self.draft_length, row.num_remaining - 1) for row in batch.rows]
        proposal = self._proposer.propose(batch, counts) if any(counts) else empty_proposal(batch)
        tokens, num_accepted = self._verify(proposal)
        drafted = proposal.counts.tolist()
        finished = []
        for index, row in enumerate(batch.rows):
            accepted = num_accepted[index]
            committed = _trim(tokens[index][: accepted + 1], row)
            row.token_ids += committed
            row.trace.record(drafted=drafted[index], accepted=accepted, committed=len(committed))
            result = _result(row)
            if result is not None:
                finished.append(index)
            yield Event(row.request.request_id, committed, result)
        self._proposer.observe(batch)
        for index in reversed(finished):
            self._retire(index)

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
        p = distribution(logits, batch.sampling)
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
