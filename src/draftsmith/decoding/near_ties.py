"""Near-ties: whether rounding explains where two greedy outputs of one target part.

A forward over one position and one over several round differently, and another engine rounds in
its own way; so an argmax may flip where the target hardly prefers one token. Outputs must be equal,
or the target's own margin between the two tokens at the first difference must lie within the
measured rounding difference of its forwards.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decoding.batch import pad_prompts, to_device
from draftsmith.decoding.slot_model import SlotModel

T = TypeVar("T")
ROWS = 8  # of the batches that are compared
Prompts = Sequence[tuple[str, list[int]]]
Steps = Generator[None, None, T]  # pauses behind every forward


@dataclass(frozen=True)
class Divergence:
    """First difference of two outputs, and the target's margin between the two tokens there."""

    prompt_id: str
    position: int
    gap: float


@dataclass(frozen=True)
class Judgement:
    """Greedy outputs against those of the engine without drafts.

    Attributes:
        tolerance: How much the target's own margins differ between forwards of other widths.
        divergences: One for each output that differs.
    """

    tolerance: float
    divergences: list[Divergence]

    @property
    def holds(self) -> bool:
        """Whether rounding explains all that differs."""
        return all(divergence.gap <= self.tolerance for divergence in self.divergences)


def judge_divergences(
    target: PreTrainedModel,
    prompts: Prompts,
    plain: Mapping[str, list[int]],
    other: Mapping[str, list[int]],
    *,
    width: int,
) -> Judgement:
    """Whether rounding explains where greedy outputs differ from the engine's without drafts.

    Args:
        target: The target that both are outputs of.
        prompts: Name and tokens of each.
        plain: Output of the engine without drafts, by name.
        other: Output with drafts, or of another engine, by name.
        width: Positions of a verification; of an engine without one, any number above 1.
    """
    return _finished(judging(target, prompts, plain, other, width=width))


def judging(
    target: PreTrainedModel,
    prompts: Prompts,
    plain: Mapping[str, list[int]],
    other: Mapping[str, list[int]],
    *,
    width: int,
) -> Steps[Judgement]:
    """`judge_divergences`, a forward at a time, for who has other work between them."""
    tolerance = yield from _rounding(target, prompts, plain, width=width)
    divergences = []
    for name, ids in prompts:
        divergence = _compare(target, name, ids, plain[name], other[name])
        if divergence is not None:
            divergences.append(divergence)
            yield
    return Judgement(tolerance, divergences)


def rounding_difference(
    target: PreTrainedModel, prompts: Prompts, responses: Mapping[str, list[int]], *, width: int
) -> float:
    """Largest change of the target's margin between forwards of 1, of `width` and of all positions.

    The margin is the difference of the two largest logits, the two that a near-tie swaps. Outputs
    part where forwards of 1 and of `width` positions disagree; the gap there is read off a forward
    of all positions, so its rounding counts as well.

    The responses are replayed over the slot cache in batches of `ROWS`; each replay
    reads the keys and values that it wrote itself. So the figure holds all that decoding with
    drafts rounds differently.
    """
    return _finished(_rounding(target, prompts, responses, width=width))


def _finished(steps: Steps[T]) -> T:
    """What comes of them, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value


@torch.inference_mode()
def _rounding(
    target: PreTrainedModel, prompts: Prompts, responses: Mapping[str, list[int]], *, width: int
) -> Steps[float]:
    worst = 0.0
    for start in range(0, len(prompts), ROWS):
        group = prompts[start : start + ROWS]
        heads = [ids[:-1] for _, ids in group]
        inputs = [ids[-1:] + responses[name][:-1] for name, ids in group]
        widths = (1, width, max(map(len, inputs)))
        replays = []
        for positions in widths:
            replays.append((yield from _replay(target, heads, inputs, width=positions)))
        for row, tokens in enumerate(inputs):
            logits = torch.stack([replay[row, : len(tokens)] for replay in replays])
            top = logits[:1].topk(2, dim=-1).indices.expand(len(logits), -1, -1)
            margins = logits.gather(-1, top).diff()
            worst = max(worst, float((margins.amax(0) - margins.amin(0)).max()))
    return worst


def _replay(
    target: PreTrainedModel, heads: list[list[int]], inputs: list[list[int]], *, width: int
) -> Steps[Tensor]:
    """Logits of `inputs` behind their `heads`, `width` positions a forward.

    Returns:
        float32 `[rows, steps, vocab]`; a row's logits behind its own inputs mean nothing.
    """
    slots = SlotModel(target)
    steps = -(-max(map(len, inputs)) // width) * width
    longest = max(map(len, heads))
    slots.reserve(rows=len(heads), slots=longest + steps)
    if longest:
        tokens, positions = pad_prompts(heads, target.device)
        slots.forward(tokens, positions, span=longest, keep=0)
        yield
    tokens, places = pad_prompts([i + [0] * (steps - len(i)) for i in inputs], target.device)
    positions = places + to_device([[len(head)] for head in heads], target.device)
    logits, span = [], longest + steps
    for i in range(0, steps, width):
        some = slice(i, i + width)
        logits.append(slots.forward(tokens[:, some], positions[:, some], span=span))
        yield
    return torch.cat(logits, 1).float()


@torch.inference_mode()
def _compare(
    target: PreTrainedModel, name: str, prompt_ids: list[int], plain: list[int], other: list[int]
) -> Divergence | None:
    """The first difference of two outputs and the target's margin there; None if they are equal."""
    if plain == other:
        return None
    shared = min(len(plain), len(other))
    position = next((i for i in range(shared) if plain[i] != other[i]), shared)
    if position == shared:
        # One is a prefix of the other: no two tokens to compare, so nothing can excuse it.
        return Divergence(name, position, float("1e9"))
    ids = to_device([prompt_ids + plain[:position]], target.device)
    logits = target(input_ids=ids).logits[0, -1].float()
    gap = abs(float(logits[plain[position]] - logits[other[position]]))
    return Divergence(name, position, gap)
