"""How many tokens a corpus has: counted where the corpus stage has run, else at most so many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftsmith.corpus.prompts import distinct
from draftsmith.corpus.rollouts import Rollout
from draftsmith.corpus.settings import CorpusConfig, SourceConfig
from draftsmith.corpus.sources import read_source
from draftsmith.distillation.batches import make_sequences, with_prompts
from draftsmith.errors import CorpusError


@dataclass(frozen=True)
class Expected:
    """What somebody expects of a corpus; None leaves it to the configuration.

    Attributes:
        prompts: Prompts of all sources together.
        prompt_tokens: Mean tokens of a prompt, template included.
        response_tokens: Mean tokens of a response.
    """

    prompts: int | None = None
    prompt_tokens: int | None = None
    response_tokens: int | None = None

    @property
    def is_anything(self) -> bool:
        """Whether anything is expected."""
        return any((self.prompts, self.prompt_tokens, self.response_tokens))


@dataclass(frozen=True)
class CorpusSize:
    """Tokens of a corpus.

    Attributes:
        origin: `data/corpus` (counted) or `limits` (at most so many).
        train_responses: Responses that are trained on.
        train_tokens: Their tokens.
        train_prompt_tokens: Tokens of the prompts before them, once for each response.
        learned_prompt_tokens: Those of them that are learned with `distill.prompt_positions`.
        rollout_tokens: Tokens of all responses, those for the evaluation included.
        longest_prompt: Tokens of a prompt before the longest response.
        longest_response: Tokens.
    """

    origin: str
    train_responses: int
    train_tokens: int
    train_prompt_tokens: int
    learned_prompt_tokens: int
    rollout_tokens: int
    longest_prompt: int
    longest_response: int

    @property
    def num_entries(self) -> int:
        """Positions of all training sequences but the last of each."""
        return self.train_prompt_tokens + self.train_tokens - self.train_responses

    def predicted_tokens(self, *, prompt_positions: bool) -> int:
        """Tokens that all training sequences predict."""
        return self.train_tokens + (self.learned_prompt_tokens if prompt_positions else 0)


def _require_some(number: int, what: str) -> None:
    if number == 0:
        raise CorpusError(
            "planning the corpus",
            found=f"no {what} outside the eval split",
            expected="something to learn from",
            remedy="name more prompts, or lower `corpus.eval_fraction`",
        )


def counted(splits: Mapping[str, Sequence[Rollout]]) -> CorpusSize:
    """The size of a corpus that is there.

    Args:
        splits: Rollouts of `train` and `eval`.

    Raises:
        CorpusError: There is nothing to train on.
    """
    train = [row for row in splits["train"] if row.response_ids]
    _require_some(len(train), "rollouts with a response")
    longest = max(len(row.prompt_ids) + len(row.response_ids) for row in train)
    response = max(len(row.response_ids) for row in train)
    tokens = sum(len(row.response_ids) for row in train)
    learned = with_prompts(make_sequences([(row.prompt_ids, row.response_ids) for row in train]))
    return CorpusSize(
        origin="data/corpus",
        train_responses=len(train),
        train_tokens=tokens,
        train_prompt_tokens=sum(len(row.prompt_ids) for row in train),
        learned_prompt_tokens=sum(sequence.num_predicted for sequence in learned) - tokens,
        rollout_tokens=sum(len(row.response_ids) for rows in splits.values() for row in rows),
        longest_prompt=max(2, longest - response),
        longest_response=response,
    )


def at_most(config: CorpusConfig, expected: Expected, *, root: Path) -> CorpusSize:
    """The size of a corpus whose sources are only named.

    Where no mean is expected, every prompt and response counts with the limit of its length.

    Args:
        config: The corpus section.
        expected: What is known besides.
        root: The project's folder, which paths of sources are relative to.

    Raises:
        CorpusError: The prompts of a source cannot be counted, or a mean is above its limit.
    """
    _require_within(expected.prompt_tokens, "prompt_tokens", config.max_prompt_tokens)
    _require_within(expected.response_tokens, "new_tokens", config.max_new_tokens)
    given, written = (expected.prompts, 0) if expected.prompts else _prompts(config, root)
    # Self-written prompts are for the evaluation only if there are no others.
    held_out = round((given or written) * config.eval_fraction)
    train = (given + written - held_out) * config.train_answers
    _require_some(train, "training prompts")
    evaluated = held_out * len(config.eval_temperatures)
    prompt = expected.prompt_tokens or config.max_prompt_tokens
    response = expected.response_tokens or config.max_new_tokens
    return CorpusSize(
        origin="limits",
        train_responses=train,
        train_tokens=train * response,
        train_prompt_tokens=train * prompt,
        learned_prompt_tokens=train // config.train_answers * (prompt - 1),
        rollout_tokens=(train + evaluated) * response,
        longest_prompt=config.max_prompt_tokens,
        longest_response=config.max_new_tokens,
    )


def _require_within(mean: int | None, name: str, limit: int) -> None:
    if mean is not None and mean > limit:
        raise CorpusError(
            "planning the corpus",
            found=f"a mean of {mean} tokens",
            expected=f"at most corpus.max_{name} = {limit}, which cuts longer ones off",
            remedy=f"expect fewer, or raise corpus.max_{name} in params.yaml",
        )


def _prompts(config: CorpusConfig, root: Path) -> tuple[int, int]:
    """Prompts that are given, and those that the target is asked to write."""
    written = sum(source.count for source in config.sources if source.kind == "self")
    given = [source for source in config.sources if source.kind != "self"]
    unread = sum(source.count for source in given if source.kind == "dataset")
    texts = [
        prompt
        for source in given
        if source.kind != "dataset"
        for prompt in read_source(_below(root, source))
    ]
    if any(source.kind == "dataset" and not source.count for source in given):
        raise CorpusError(
            "counting the prompts of corpus.sources",
            found="a dataset without a count, which would have to be downloaded",
            expected="a number of prompts",
            remedy="pass --prompts, or set `count` of that source",
        )
    return len(distinct(texts)) + unread, written


def _below(root: Path, source: SourceConfig) -> SourceConfig:
    return replace(source, path=str(root / source.path)) if source.path else source
