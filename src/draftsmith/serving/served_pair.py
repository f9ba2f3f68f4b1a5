"""A pair that is being served: its engine, its name to callers, and a test before it answers.

The test is the service's own: a pair that has it behind it was loaded with the right digests and,
on this machine and in this dtype, answers with drafts as it does without.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from draftsmith.decoding import Engine, NoProposer, Request, SamplingParams
from draftsmith.decoding.matching import LosslessMode
from draftsmith.decoding.near_ties import judging
from draftsmith.errors import EvidenceError
from draftsmith.registry.generation import DraftLength, Pair
from draftsmith.serving.settings import Limits

_PROMPTS = ("Why is the sky blue?", "Name three rivers.", "Write two lines about rain.")
_NUM_TOKENS = 20
# Answers without drafts: a target that several pairs share in turn gives them once.
_PLAIN: WeakKeyDictionary[PreTrainedModel, dict[str, list[int]]] = WeakKeyDictionary()
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ServedPair:
    """A pair behind an engine.

    Attributes:
        pair: Target and draft.
        engine: Decodes with them; driven by the engine thread alone.
        name: What callers put under `model`.
        version: In the registry; None for a folder.
        draft_length: How many tokens a round drafts.
        max_tokens: Of a request, prompt and answer.
        since_s: Unix time when it was made.
    """

    pair: Pair
    engine: Engine
    name: str
    version: str | None
    draft_length: DraftLength
    max_tokens: int
    since_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def digest(self) -> str:
        """Which pair it is."""
        return self.pair.record.digest


@dataclass(frozen=True)
class EngineOptions:
    """How engines of served pairs decode.

    Attributes:
        draft_length: Tokens drafted a round; "adaptive" is what pays, costs measured at need; None
            adapts where the costs of this device are known, and else takes the pair's best length.
        verify: As `Engine` says.
    """

    draft_length: DraftLength | None = None
    verify: LosslessMode = "rejection"


def prepare(
    pair: Pair, name: str, version: str | None, *, options: EngineOptions, limits: Limits
) -> ServedPair:
    """Join a pair and an engine; nothing is decoded yet, but costs may be measured."""
    length = options.draft_length
    if length is None and pair.has_costs(limits.max_rows):
        length = "adaptive"
    engine = pair.engine(length, max_rows=limits.max_rows, verify=options.verify)
    if length is None:
        length = pair.lengths_at(limits.max_rows).draft
    max_tokens = min(limits.max_context, engine.max_positions)
    return ServedPair(pair, engine, name, version, length, max_tokens)


def self_test(served: ServedPair) -> Generator[None, None, None]:
    """Decode a few prompts with drafts and without, a forward at a time; then open the engine.

    In float32 the answers must be equal. In another dtype they may part where the target itself
    hardly prefers one token: by no more than its forwards of other widths differ.

    Raises:
        EvidenceError: They differ by more.
    """
    pair = served.pair
    prompts = [(str(place), pair.encode(text)) for place, text in enumerate(_PROMPTS)]
    expected = _PLAIN.get(pair.target.model)
    if expected is None:
        plain = Engine(pair.target.model, NoProposer(), max_rows=len(prompts), draft_length=0)
        _PLAIN[pair.target.model] = expected = yield from _greedy(plain, prompts)
    answers = yield from _greedy(served.engine, prompts)
    served.engine.open(served.max_tokens)
    differing = [name for name in expected if answers[name] != expected[name]]
    if differing:
        width = served.engine.max_width
        judged = yield from judging(pair.target.model, prompts, expected, answers, width=width)
        worst = max(divergence.gap for divergence in judged.divergences)
        _LOG.info("event=near_ties answers=%d gap=%.3g", len(differing), worst)
        if not judged.holds or str(pair.target.model.dtype) == "torch.float32":
            raise EvidenceError(
                f"testing the pair {served.digest}",
                found=f"{len(differing)} of {len(prompts)} greedy answers that differ with drafts, "
                f"by a margin of {worst:.3g}",
                expected=f"the answers without drafts, or near-ties within {judged.tolerance:.3g}",
                remedy="run `draftsmith verify` on the version; keep serving another one",
            )


def _greedy(
    engine: Engine, prompts: Sequence[tuple[str, list[int]]]
) -> Generator[None, None, dict[str, list[int]]]:
    params = SamplingParams(max_new_tokens=_NUM_TOKENS)
    engine.open(max(len(ids) for _, ids in prompts) + _NUM_TOKENS, prefill_chunk=None)
    engine.submit([Request(name, ids, params) for name, ids in prompts])
    answers: dict[str, list[int]] = {}
    while engine.is_busy:
        for event in engine.step():
            answers.setdefault(event.request_id, []).extend(event.token_ids)
        yield
    return answers
