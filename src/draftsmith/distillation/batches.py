"""Sequences and their order.

The order of step n follows from (seed, n), so a resumed run sees the data it would have seen.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftsmith.errors import CorpusError

_WINDOW = 16  # batches sorted by length together: little padding, still shuffled


@dataclass(frozen=True)
class TrainingSequence:
    """Token ids of prompt and response.

    `start` is the first position whose next token is learned: that before the response, or one in
    the prompt.
    """

    token_ids: list[int]
    start: int

    @property
    def num_predicted(self) -> int:
        """Tokens that are learned: positions start .. len - 2 predict them."""
        return len(self.token_ids) - 1 - self.start


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences.

    Attributes:
        indices: Which sequences these are.
        token_ids: int64 `[sequences, width]`.
        mask: bool `[sequences, width]`: positions whose next token is learned.
    """

    indices: list[int]
    token_ids: Tensor
    mask: Tensor


def make_sequences(rows: Sequence[tuple[list[int], list[int]]]) -> list[TrainingSequence]:
    """Sequences of (prompt ids, response ids); rows without a response are left out.

    Raises:
        CorpusError: Nothing is left to learn from.
    """
    sequences = [
        TrainingSequence(prompt + response, len(prompt) - 1)
        for prompt, response in rows
        if response
    ]
    if not sequences:
        raise CorpusError(
            "preparing the training sequences",
            found=f"{len(rows)} rollouts, none with a response",
            expected="at least one response token",
            remedy="check the rollouts in data/corpus/ and `corpus.max_new_tokens`",
        )
    return sequences


def with_prompts(
    sequences: Sequence[TrainingSequence], held_out: Container[int] = ()
) -> list[TrainingSequence]:
    """The same sequences, which predict the tokens of their prompts, too.

    What all prompts begin with is left out, and a prompt is learned once.

    Args:
        sequences: They begin to predict with the response.
        held_out: Indices of those that drafts are judged by; they stay as they are.
    """
    prompts = [tuple(sequence.token_ids[: sequence.start + 1]) for sequence in sequences]
    columns = enumerate(zip(*prompts, strict=False))
    shared = next((n for n, tokens in columns if len(set(tokens)) > 1), min(map(len, prompts)))
    first = {prompt: index for index, prompt in reversed(list(enumerate(prompts)))}
    return [
        replace(sequence, start=max(0, shared - 1))
        if first[prompt] == index and index not in held_out
        else sequence
        for index, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True))
    ]


def epoch_batches(
    lengths: Sequence[int], batch_size: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """Indices of one epoch in batches of similar length, shuffled; the incomplete batch is kept."""
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    window = batch_size * _WINDOW
    batches = []
    for start in range(0, len(order), window):
        nearby = sorted(order[start : start + window].tolist(), key=lambda index: lengths[index])
        batches += [nearby[i : i + batch_size] for i in range(0, len(nearby), batch_size)]
    return [batches[index] for index in generator.permutation(len(batches))]


def step_indices(lengths: Sequence[int], batch_size: int, *, seed: int, step: int) -> list[int]:
    """The sequences of optimizer step `step` (from 0)."""
    per_epoch = -(-len(lengths) // batch_size)
    epoch, place = divmod(step, per_epoch)
    return epoch_batches(lengths, batch_size, seed=seed, epoch=epoch)[place]


def collate(sequences: Sequence[TrainingSequence], indices: Sequence[int]) -> TokenBatch:
    """Pad the sequences `indices` to a batch."""
    chosen = [sequences[index] for index in indices]
    width = max(len(sequence.token_ids) for sequence in chosen)
    token_ids = torch.zeros(len(chosen), width, dtype=torch.long)
    mask = torch.zeros(len(chosen), width, dtype=torch.bool)
    for row, sequence in enumerate(chosen):
        length = len(sequence.token_ids)
        token_ids[row, :length] = torch.tensor(sequence.token_ids)
        mask[row, sequence.start : length - 1] = True
    return TokenBatch(list(indices), token_ids, mask)


def places_in_responses(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where each masked position stands among those of its sequence.

    Args:
        mask: bool `[sequences, width]`, of a batch.

    Returns:
        How many of the sequence come before it, and how many there are in all: int64 `[positions]`
        each, in row-major order.

    Example: sequences of 2 and 3 positions give 0 1 0 1 2 and 2 2 3 3 3.
    """
    counts = mask.sum(1)
    lengths = counts.repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.arange(len(lengths), device=mask.device) - first, lengths
