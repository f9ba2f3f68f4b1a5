"""The decoding loop: admit, propose, verify, accept, commit, retire.

One engine for any batch, ragged, speculative or not. The cache of a row holds all committed tokens
but the last; that one is the first input of the next verification, so a round is one target forward
over `drafts + 1` positions and prefill needs no logits. With fixed `draft_length` a request's
tokens do not depend on its neighbours, nor on when it arrives, nor on being preempted: a request
that starts again goes on behind its committed tokens, and a draw depends on its position alone.

Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decoding.acceptance import Proposal, Verify
from draftsmith.decoding.admission import PREFILL_CHUNK, Admission
from draftsmith.decoding.batch import Batch, Row, to_device
from draftsmith.decoding.distribution import distribution
from draftsmith.decoding.faults import RequestFaultError, not_finite
from draftsmith.decoding.logprobs import token_logprobs
from draftsmith.decoding.matching import VerifyMode, match, rule_named, with_processors
from draftsmith.decoding.proposers import Proposer, empty_proposal, most_nodes, reader_of
from draftsmith.decoding.randomness import Purpose, uniform
from draftsmith.decoding.request import Event, Request, Result, TokenLogprobs, require_means
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.decoding.stopping import trim
from draftsmith.decoding.token_text import TokenText
from draftsmith.decoding.trace import Trace
from draftsmith.decoding.tree import Tree, tensors_of
from draftsmith.decoding.typical import typical_lossy
from draftsmith.errors import DecodingError


class Engine:
    """Decodes requests with a target and a proposer.

    Args:
        target: Causal LM whose distribution is served; as a `SlotModel` where its steps are to be
            compiled or captured.
        proposer: Who drafts.
        max_rows: Requests in flight at once.
        draft_length: Most tokens proposed in a round; 0 is autoregressive decoding. Where the
            proposer varies the length and temperature is above 0, the law of a request's tokens is
            the target's, but they depend on its neighbours.
        verify: "rejection" accepts as many drafts as the target's law allows; "match" compares
            them with the target's own draws, so that tokens never depend on drafts, and carries
            logits processors; "typical_lossy" keeps whatever the target might well have said, and
            does NOT keep its law: nothing that it decodes counts for a pair.
        token_text: What tokens spell; needed by requests with stop strings.

    Raises:
        DecodingError: A parameter is out of range, or the target's cache cannot be rolled back.
    """

    def __init__(
        self,
        target: PreTrainedModel | SlotModel,
        proposer: Proposer,
        *,
        max_rows: int,
        draft_length: int,
        verify: VerifyMode = "rejection",
        token_text: TokenText | None = None,
    ) -> None:
        _require_at_least("max_rows", max_rows, least=1)
        _require_at_least("draft_length", draft_length, least=0)
        self._target = SlotModel.of(target)
        self._proposer = proposer
        self.max_rows = max_rows
        self.max_draft_length = draft_length
        self.verify: Verify = rule_named(verify)
        self._token_text = token_text
        self._batch = self._empty_batch()
        self._line = Admission(self._target, proposer)
        self._num_rows = self.max_context = 0

    def generate(self, requests: Sequence[Request]) -> list[Result]:
        """Decode all requests; results in their order.

        Raises:
            DecodingError: A request cannot be decoded; nothing was started.
        """
        results = {e.request_id: e.result for e in self.stream(requests) if e.result is not None}
        return [results[request.request_id] for request in requests]

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode all requests, yielding the tokens of every row after each round.

        Their prompts are read whole: nobody waits who was not here from the start.

        Raises:
            DecodingError: A request cannot be decoded; nothing was started.
            RequestFaultError: The target's logits are not finite; the engine can be used again.
        """
        longest = max((_length(request) for request in requests), default=0)
        self._reset(rows=min(self.max_rows, len(requests)), context=longest, chunk=None)
        self.submit(requests)
        self._reserve()
        while self.is_busy:
            yield from self.step()

    def open(self, max_context: int, *, prefill_chunk: int | None = PREFILL_CHUNK) -> None:
        """Start afresh for requests that arrive one by one.

        Args:
            max_context: Tokens of the longest request, prompt and answer; the cache is taken now.
            prefill_chunk: Positions of a prompt that a step reads, at most: a longer one is read in
                pieces, and the rows in flight decode a round after each. Shorter ones are read
                together, padding included in the count. None reads every prompt whole.

        Raises:
            DecodingError: A parameter is out of range.
        """
        _require_at_least("max_context", max_context, least=2)
        if prefill_chunk is not None:
            _require_at_least("prefill_chunk", prefill_chunk, least=1)
        self._reset(rows=self.max_rows, context=max_context, chunk=prefill_chunk)
        self._reserve()

    @torch.inference_mode()
    def _reset(self, *, rows: int, context: int, chunk: int | None) -> None:
        self._batch = self._empty_batch()
        self._line.reset(num_rows=rows, chunk=chunk)
        self._num_rows, self.max_context = rows, context

    def _reserve(self) -> None:
        for cached in (self._target, self._proposer):
            cached.reserve(rows=self._num_rows, slots=self.max_context + self.max_width)

    @property
    def max_width(self) -> int:
        """Most positions of a verification: rows that copy lengthen the tree of the others."""
        return self.max_draft_length + most_nodes(self._proposer) + 1

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or is in flight."""
        return len(self._batch) + len(self._line) > 0

    def submit(self, requests: Sequence[Request]) -> None:
        """Let requests wait for a free row; `step` admits them in order.

        Out of order is only who waits behind a long prompt: shorter ones pass while another long
        one is being read.

        Raises:
            DecodingError: A request cannot be decoded; none of them waits.
        """
        self._check(requests)
        is_lossy = self.verify is typical_lossy
        self._line.add([Row(r, list(r.prompt_ids), Trace(is_lossy=is_lossy)) for r in requests])

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit who fits, then decode one round of all rows in flight; nothing when idle.

        Returns:
            One event for every row in flight, with the tokens of this round. A request's events
            come in the order of its tokens; the last one carries its result, after which the id is
            free. There is none for requests that wait or whose prompt is still being read.

        Raises:
            RequestFaultError: The target's logits for some requests are not finite. They have been
                taken out without a result; the others repeat the round at the next step.
        """
        self._target.reader = reader_of(self._proposer)  # engines may share a model over a cache
        self._line.step(self._batch)
        return self._round() if len(self._batch) else []

    @torch.inference_mode()
    def abort(self, request_id: str) -> Result:
        """Take a request out between two steps; its result holds what was committed.

        Raises:
            DecodingError: No such request waits or is in flight.
        """
        row = self._take_out(request_id)
        return Result(request_id, row.answer_ids, "abort", row.trace)

    @torch.inference_mode()
    def preempt(self, request_id: str) -> None:
        """Free a request's row between two steps; it waits first in line and goes on later.

        Raises:
            DecodingError: No such request waits or is in flight.
        """
        self._line.put_back(self._take_out(request_id))

    def _take_out(self, request_id: str) -> Row:
        for index, row in enumerate(self._batch.rows):
            if row.request.request_id == request_id:
                self._retire(index)
                return row
        for row in self._line.rows:
            if row.request.request_id == request_id:
                self._line.take_out(row)
                return row
        held = [row.request.request_id for row in (*self._batch.rows, *self._line.rows)]
        raise DecodingError(
            f"taking request {request_id} out",
            found=f"requests {', '.join(held)}" if held else "no request",
            expected="a request that was submitted and has not ended",
            remedy="pass the id of one of them",
        )

    def _empty_batch(self) -> Batch:
        purpose = Purpose.SAMPLE if self.verify is match else Purpose.DRAFT
        return Batch(self._target.device, int(self._target.config.vocab_size), purpose)

    @property
    def max_positions(self) -> int:
        """Most tokens of a request that target and proposer hold, answer included."""
        return min(self._target.max_positions, self._proposer.max_positions)

    def _check(self, requests: Sequence[Request]) -> None:
        limit = min(self.max_positions, self.max_context)
        vocab = int(self._target.config.vocab_size)
        if requests and not self._num_rows:
            raise DecodingError(
                f"request {requests[0].request_id}",
                found="an engine without room for it",
                expected="an engine that was opened",
                remedy="call open(max_context) first, or generate or stream",
            )
        seen = {row.request.request_id for row in (*self._batch.rows, *self._line.rows)}
        for request in requests:
            can_spell = self._token_text is not None
            require_means(request, can_match=self.verify is match, can_spell=can_spell)
            prompt, length = request.prompt_ids, _length(request)
            faults = {
                "an empty prompt": not prompt,
                f"{length} tokens with the new ones": length > limit,
                f"token ids outside 0..{vocab - 1}": not all(0 <= t < vocab for t in prompt),
                f"a bias of ids outside 0..{vocab - 1}": not all(
                    token_id < vocab for token_id, _ in request.params.logit_bias
                ),
                f"bad words of ids outside 0..{vocab - 1}": not all(
                    max(word) < vocab for word in request.params.bad_words_ids
                ),
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

    def _round(self) -> list[Event]:
        batch = self._batch
        # A row never drafts past its own length limit, so the cut depends on no neighbour.
        counts = [min(self.max_draft_length, row.num_remaining - 1) for row in batch.rows]
        proposal = self._proposer.propose(batch, counts) if any(counts) else empty_proposal(batch)
        kept, drafted, places, logits = self._verify(proposal)
        if proposal.tree is not None:
            self._keep_paths(places)
        logprobs = self._logprobs(logits, kept, places)
        events = []
        for index, row in enumerate(batch.rows):
            committed, stopped_by = trim(kept[index], row, self._token_text)
            row.token_ids += committed
            row.trace.record(
                drafted=drafted[index],
                accepted=len(kept[index]) - 1,
                committed=len(committed),
                from_text=index in proposal.from_text,
                ranks=proposal.tree.ranks_along(places[index]) if proposal.tree else (),
            )
            shown = logprobs.get(index, [])[: len(committed)]
            result = _result(row, stopped_by)
            events.append(Event(row.request.request_id, committed, result, shown))
        self._proposer.observe(batch)
        for index in reversed(range(len(events))):
            if events[index].result is not None:
                self._retire(index)
        return events

    def _logprobs(
        self, logits: Tensor, kept: Sequence[Sequence[int]], places: Sequence[Sequence[int]]
    ) -> dict[int, list[TokenLogprobs]]:
        rows = enumerate(self._batch.rows)
        wanted = {i: row.request.num_top for i, row in rows if row.request.num_top is not None}
        return token_logprobs(logits, kept, wanted, places)

    def _keep_paths(self, places: Sequence[Sequence[int]]) -> None:
        """Give the accepted nodes of trees the slots of their positions."""
        moves = [
            (index, len(row.token_ids) - 1 + place, len(row.token_ids) - 1 + depth)
            for index, row in enumerate(self._batch.rows)
            for depth, place in enumerate(places[index])
            if place != depth
        ]
        if moves:
            self._target.move_slots(*to_device(moves, self._target.device).T)

    def _verify(
        self, proposal: Proposal
    ) -> tuple[list[list[int]], list[int], list[list[int]], Tensor]:
        """One target forward and the acceptance rule; one copy from the device.

        Returns:
            For every row its accepted drafts and the next token, the number drafted, and the places
            of pending token and accepted drafts; and the target's logits, `[rows, places, vocab]`.
        """
        batch, tree, width = self._batch, proposal.tree, proposal.tokens.shape[1] + 1
        pending, start = batch.tail(1)
        steps = torch.arange(width, device=batch.device)
        positions = start + (steps if tree is None else tensors_of(tree, batch.device).depths)
        inputs = torch.cat([pending, proposal.tokens], 1)
        span = batch.span + width - 1
        logits = self._target.forward(inputs, positions, span=span, tree=tree).float()
        scores = batch.adjust(logits, proposal.tokens, prefixes=tree.prefixes if tree else ())
        accept, draw = self._uniforms(positions + 1, tree)
        p = distribution(scores, batch.sampling)
        verdict = self.verify(p, proposal, accept, draw)
        verdict = with_processors(verdict, scores, batch=batch, proposal=proposal, uniforms=draw)
        is_finite = torch.isfinite(logits.amax(-1)).all(-1)
        path = verdict.path if verdict.path is not None else steps[1:].expand(len(batch), -1)
        facts = [verdict.num_accepted, proposal.counts, is_finite, verdict.next_token]
        packed = torch.cat([torch.stack(facts, 1), path, inputs.gather(1, path)], 1).tolist()
        faulty = [index for index, values in enumerate(packed) if not values[2]]
        if faulty:
            raise self._give_up(faulty)
        kept, places = [], []
        for accepted, _, _, next_token, *rest in packed:
            drafts = rest[path.shape[1] :]
            kept.append([*drafts[:accepted], next_token])
            places.append([0, *rest[:accepted]])
        return kept, [values[1] for values in packed], places, logits

    def _give_up(self, faulty: list[int]) -> RequestFaultError:
        """Take out rows whose logits are not finite; nothing of the round is committed."""
        self._proposer.observe(self._batch)
        fault = not_finite([self._batch.rows[index] for index in faulty])
        for index in reversed(faulty):
            self._target.clear_row(index)
            self._retire(index)
        return fault

    def _uniforms(self, positions: Tensor, tree: Tree | None) -> tuple[Tensor, Tensor]:
        """For acceptance `[rows, drafts]`, and for draws behind each place."""
        if self._batch.sampling.is_greedy:  # one-hot: every u in [0, 1) gives the same verdict
            zeros = torch.zeros(positions.shape, dtype=torch.float32, device=positions.device)
            return zeros[:, 1:], zeros
        keys = self._batch.keys[:, None]
        # A draft stands one position before the token that is drawn behind it.
        drafts, streams = (
            positions[:, 1:] - 1,
            0 if tree is None else tensors_of(tree, positions.device).ranks,
        )
        return uniform(keys, drafts, Purpose.ACCEPT, streams), uniform(
            keys, positions, Purpose.SAMPLE
        )

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


def _result(row: Row, stopped_by: int | str | None) -> Result | None:
    """The result of a finished row, None while it goes on."""
    if stopped_by is None and row.num_remaining > 0:
        return None
    reason: Literal["stop", "length"] = "length" if stopped_by is None else "stop"
    return Result(row.request.request_id, row.answer_ids, reason, row.trace, stopped_by)
