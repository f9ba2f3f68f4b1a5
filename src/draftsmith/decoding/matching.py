"""Verification by comparison: draw from the target at every position, keep the drafts that agree.

Every committed token is the target's own draw with the uniform of its position, so drafts decide
how many tokens a round commits and never which. Output is that of decoding without drafts, token
for token, whatever made the scores: that is what lets a request bring logits processors of
Transformers. The price is acceptance: an equal draw is rarer than an accepted one.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

from draftsmith.decoding.acceptance import (
    Proposal,
    Verdict,
    Verify,
    along_tree,
    longest_prefix,
    verify,
)
from draftsmith.decoding.batch import Batch, Row, to_device
from draftsmith.decoding.distribution import Distribution, SamplingTensors, distribution, draw
from draftsmith.decoding.request import Request
from draftsmith.decoding.tree import Tree
from draftsmith.decoding.typical import typical_lossy
from draftsmith.errors import DecodingError

LosslessMode = Literal["rejection", "match"]
VerifyMode = LosslessMode | Literal["typical_lossy"]


def rule_named(name: str) -> Verify:
    """The rule of a mode: rejection sampling, comparison, or what is lossy by its name.

    Raises:
        DecodingError: There is no such mode.
    """
    rules: dict[str, Verify] = {
        "rejection": verify,
        "match": match,
        "typical_lossy": typical_lossy,
    }
    if name not in rules:
        raise DecodingError(
            "engine parameter verify",
            found=repr(name),
            expected=" or ".join(map(repr, rules)),
            remedy="pass one of them",
        )
    return rules[name]


def require_lossless(name: str, *, what: str) -> None:
    """Refuse a mode that does not keep the target's law.

    Args:
        name: Of a mode.
        what: Who was asked, such as `decoding with a pair`.

    Raises:
        DecodingError: It is lossy.
    """
    if name not in get_args(LosslessMode):
        raise DecodingError(
            what,
            found=f"verify={name!r}",
            expected=" or ".join(map(repr, get_args(LosslessMode))),
            remedy="pass one of them: what is lossy is for an `Engine` of one's own, and nothing "
            "of it counts for a pair",
        )


def match(p: Distribution, proposal: Proposal, _accept: Tensor, uniforms: Tensor) -> Verdict:
    """Keep the drafts that equal the target's draws; the next token is the draw behind them.

    Args:
        p: Target distributions at `drafts + 1` positions.
        proposal: What was drafted.
        uniforms: `[rows, drafts + 1]`, one a position.
    """
    drawn = draw(p, uniforms)
    if proposal.tree is not None:
        return along_tree(drawn, proposal, proposal.tree)
    num_drafts = proposal.tokens.shape[1]
    num_accepted = longest_prefix(drawn[:, :num_drafts] == proposal.tokens, proposal.counts)
    return Verdict(num_accepted, drawn.gather(1, num_accepted[:, None]).squeeze(1))


def with_processors(
    verdict: Verdict, scores: Tensor, *, batch: Batch, proposal: Proposal, uniforms: Tensor
) -> Verdict:
    """The verdict, with the rows that bring logits processors decided anew.

    Such a row goes from position to position, and stops at the first draft that its draw refuses.
    So a processor sees every committed text once, in order, as without drafts, and one that keeps
    a state sees no other text; only where a stop string ends the answer inside a round may it see
    the texts of that round behind it.

    Args:
        verdict: Of `match`, right for all other rows.
        scores: Logits after penalties, `[rows, drafts + 1, vocab]`; a row whose largest
            are not all finite is left alone.
        batch: The rows.
        proposal: What was drafted.
        uniforms: `[rows, drafts + 1]`, one a position.

    Raises:
        DecodingError: A processor made scores that nothing can be drawn from.
    """
    rows = [
        index
        for index, row in enumerate(batch.rows)
        if row.request.logits_processors and bool(scores[index].amax(-1).isfinite().all())
    ]
    if not rows:
        return verdict
    num_accepted, next_token = verdict.num_accepted.clone(), verdict.next_token.clone()
    path = None if verdict.path is None else verdict.path.clone()
    for index in rows:
        places, next_token[index] = _follow(
            batch.rows[index],
            _Drafts(proposal, index),
            scores=scores[index],
            sampling=_one_row(batch.sampling, index),
            uniforms=uniforms[index],
        )
        num_accepted[index] = len(places)
        if path is not None:
            path[index, : len(places)] = to_device(places, path.device)
    return Verdict(num_accepted, next_token, path)


class _Drafts:
    """Drafts of one row, on the host."""

    def __init__(self, proposal: Proposal, index: int) -> None:
        self.tokens: list[int] = proposal.tokens[index].tolist()
        self.tree = proposal.tree or Tree.chain(len(self.tokens))
        self.longest = int(proposal.counts[index])


def _follow(
    row: Row, drafts: _Drafts, *, scores: Tensor, sampling: SamplingTensors, uniforms: Tensor
) -> tuple[list[int], int]:
    """Places of the drafts that one row keeps, and the token behind them."""
    text = to_device([row.token_ids], scores.device)
    places: list[int] = []
    while True:
        place = places[-1] if places else 0
        drawn = _drawn(row.request, text, scores[place], sampling, uniforms[place])
        token = int(drawn)
        child = drafts.tree.child(place, token, drafts.tokens)
        if child is None or len(places) == drafts.longest:
            return places, token
        places.append(child)
        if token in row.request.params.stop_token_ids:
            return places, token  # cut off behind the stop token: nobody sees an ended text
        text = torch.cat([text, drawn], 1)


def _drawn(
    request: Request, text: Tensor, scores: Tensor, sampling: SamplingTensors, uniform: Tensor
) -> Tensor:
    """The target's draw behind `text` (int64 `[1, tokens]`), int64 `[1, 1]`."""
    processed = scores[None].clone()
    for processor in request.logits_processors:
        processed = processor(text, processed)
        if processed.shape != (1, len(scores)) or not processed.amax().isfinite():
            raise DecodingError(
                f"request {request.request_id}, logits processor {type(processor).__name__}",
                found=f"scores of shape {list(processed.shape)}, largest {processed.amax():g}",
                expected=f"shape [1, {len(scores)}] and a finite largest score",
                remedy="mend the processor, or do without it",
            )
    return draw(distribution(processed[None], sampling), uniform.view(1, 1))


def _one_row(sampling: SamplingTensors, index: int) -> SamplingTensors:
    one = slice(index, index + 1)
    return dataclasses.replace(
        sampling,
        temperature=sampling.temperature[one],
        top_k=sampling.top_k[one],
        top_p=sampling.top_p[one],
        min_p=None if sampling.min_p is None else sampling.min_p[one],
    )
