"""What a batch pays beside the forwards of its rounds, timed: reading prompts, judging drafts.

Prompts are read in the pieces in which the engine reads them, by the real proposer, so that a
head's fusing of features is paid for. Judging is what follows a forward: laws from logits, the rule
of acceptance, the draw.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decoding.acceptance import Proposal, verify
from draftsmith.decoding.admission import PREFILL_CHUNK
from draftsmith.decoding.distribution import OneHot, SamplingTensors, distribution
from draftsmith.decoding.proposers import reader_of
from draftsmith.decoding.slot_model import SlotModel
from draftsmith.drafts.joined import Drafter, LoadedDraft
from draftsmith.evaluation.course import Reading
from draftsmith.evaluation.timing import median_ms
from draftsmith.evaluation.workload import JudgingMs, PrefillMs

_REPEATS = 2
_JUDGED_WIDTH = 4


@torch.inference_mode()
def reading_ms(
    target: PreTrainedModel, draft: LoadedDraft, *, rows: int, context: int
) -> PrefillMs:
    """Time of reading all prompts of a batch; what is read together is timed once.

    Args:
        target: Live target.
        draft: Joined to it.
        rows: Prompts.
        context: Tokens of each.
    """
    together = Reading.of(rows, context).together
    slots, proposer = SlotModel(target), draft.proposer()
    slots.reserve(rows=together, slots=context)
    proposer.reserve(rows=together, slots=context)
    places = torch.arange(context, device=target.device).expand(together, context)
    times = median_ms(
        {
            "target": partial(_read, slots, places),
            "draft": partial(_admit, proposer, slots, places),
        },
        _REPEATS,
    )
    share = rows / together
    return PrefillMs(times["target"] * share, times["draft"] * share)


def _pieces(context: int) -> list[tuple[int, int]]:
    last = context - 1  # begins the first round
    return [(start, min(start + PREFILL_CHUNK, last)) for start in range(0, last, PREFILL_CHUNK)]


def _read(slots: SlotModel, places: Tensor) -> None:
    for start, end in _pieces(places.shape[1]):
        piece = places[:, start:end]
        slots.forward(piece % 100, piece, span=end, keep=0)


def _admit(proposer: Drafter, slots: SlotModel, places: Tensor) -> None:
    reader = reader_of(proposer)
    width = 0 if reader is None else len(reader.feature_layers) * int(slots.config.hidden_size)
    texts = (places % 100).tolist()
    for start, end in _pieces(places.shape[1]):
        if reader is not None:
            features = torch.zeros(
                len(places), end - start, width, dtype=slots.model.dtype, device=slots.device
            )
            reader.read(features, places[:, start:end], first_row=0)
        proposer.admit([text[: end + 1] for text in texts], first_row=0, start=start)


@torch.inference_mode()
def judging_ms(target: PreTrainedModel, *, rows: int) -> JudgingMs:
    """Time a position of what follows a verification of `rows` rows."""
    vocab, device = int(target.config.get_text_config().vocab_size), target.device
    line = torch.linspace(-8, 8, vocab, device=device).to(target.dtype)
    logits = line.expand(rows, _JUDGED_WIDTH, vocab).contiguous()
    times = median_ms(
        {"greedy": partial(_judge, logits, 0.0), "sampled": partial(_judge, logits, 1.0)}, _REPEATS
    )
    positions = rows * _JUDGED_WIDTH
    return JudgingMs(times["greedy"] / positions, times["sampled"] / positions)


def _judge(logits: Tensor, temperature: float) -> None:
    rows, width, _ = logits.shape
    scores = logits.float()
    torch.isfinite(scores.amax(-1)).all(-1)
    drafts = torch.zeros(rows, width - 1, dtype=torch.long, device=logits.device)
    proposal = Proposal(drafts, OneHot(drafts), drafts.new_full((rows,), width - 1))
    uniforms = torch.full((rows, width), 0.5, device=logits.device)
    sampling = SamplingTensors(
        temperature=torch.full((rows,), temperature, device=logits.device),
        top_k=torch.zeros(rows, dtype=torch.long, device=logits.device),
        top_p=torch.ones(rows, dtype=torch.float64, device=logits.device),
        is_greedy=temperature == 0,
        is_truncated=False,
    )
    verify(distribution(scores, sampling), proposal, uniforms[:, 1:], uniforms)
