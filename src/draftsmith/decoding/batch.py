"""The active rows of an engine: host-side token lists and the per-row tensors that go with them.

Active rows are contiguous from 0, so a forward over them is one slice of the cache; when a row
retires the last one takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.decoding.bad_words import ANY, NOTHING, BadWords, aligned, forbid
from draftsmith.decoding.distribution import SamplingTensors
from draftsmith.decoding.ngrams import NgramIndex
from draftsmith.decoding.penalties import History, Penalties, add_bias, penalise
from draftsmith.decoding.randomness import Purpose, request_key
from draftsmith.decoding.request import Request
from draftsmith.decoding.trace import Trace


@dataclass
class Row:
    """A request in flight.

    `token_ids` holds prompt and committed tokens; the last one is not in the cache yet. `ngrams` is
    of these tokens, wherever the row goes.
    """

    request: Request
    token_ids: list[int]
    trace: Trace = field(default_factory=Trace)
    ngrams: NgramIndex = field(default_factory=NgramIndex)

    @property
    def answer_ids(self) -> list[int]:
        """Tokens committed so far; a copy."""
        return self.token_ids[len(self.request.prompt_ids) :]

    @property
    def num_new(self) -> int:
        """How many these are."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be committed; at least 1 while the row is active."""
        return self.request.params.max_new_tokens - self.num_new


class Batch:
    """Rows in order of their cache rows, and their sampling parameters as tensors on `device`.

    `draft_purpose` is what drafts are drawn for: with the target's own uniforms a draft of the same
    law draws the same token, which is what verification by comparison hopes for.
    """

    def __init__(
        self, device: torch.device, vocab_size: int, draft_purpose: Purpose = Purpose.DRAFT
    ) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.draft_purpose = draft_purpose
        self.rows: list[Row] = []
        self._forget_parameters()

    def _forget_parameters(self) -> None:
        self._sampling: SamplingTensors | None = None
        self._keys: Tensor | None = None
        self._penalties: Penalties | None = None
        self._bias: Tensor | None = None
        self._words: BadWords | None = None
        self._counts: tuple[list[int], History] | None = None  # lengths they are counts of

    def __len__(self) -> int:
        return len(self.rows)

    def append(self, row: Row) -> None:
        """Add a row behind the active ones."""
        self.rows.append(row)
        self._forget_parameters()

    def remove(self, index: int) -> int:
        """Take row `index` out.

        Returns:
            The row that must be moved into its place in every cache (the old last one).
        """
        last = len(self.rows) - 1
        self.rows[index] = self.rows[last]
        self.rows.pop()
        self._forget_parameters()
        return last

    @property
    def sampling(self) -> SamplingTensors:
        """Parameters of all rows."""
        if self._sampling is None:
            params = [row.request.params for row in self.rows]
            self._sampling = SamplingTensors(
                temperature=self._tensor([p.temperature for p in params], torch.float32),
                top_k=self._tensor([p.top_k for p in params], torch.long),
                top_p=self._tensor([p.top_p for p in params], torch.float64),
                is_greedy=all(p.temperature == 0 for p in params),
                is_truncated=any(p.top_k > 0 or p.top_p < 1 for p in params),
                min_p=self._tensor([p.min_p for p in params], torch.float32)
                if any(p.min_p > 0 for p in params)
                else None,
            )
        return self._sampling

    @property
    def keys(self) -> Tensor:
        """Random keys, int64 `[rows]`."""
        if self._keys is None:
            requests = [row.request for row in self.rows]
            keys = [request_key(r.params.seed, r.draw_key or r.request_id) for r in requests]
            self._keys = self._tensor(keys, torch.long)
        return self._keys

    def adjust(
        self,
        logits: Tensor,
        drafts: Tensor,
        token_ids: Tensor | None = None,
        prefixes: Sequence[tuple[int, ...]] = (),
    ) -> Tensor:
        """Logits after the rows' bias, penalties, minimum lengths and bad words; see `penalise`."""
        params = [row.request.params for row in self.rows]
        if any(one.logit_bias for one in params):
            logits = add_bias(logits, self._row_bias(), token_ids)
        if any(one.depends_on_history for one in params):
            penalties, history = self._row_penalties(), self._history()
            logits = penalise(logits, penalties, history, drafts, token_ids, prefixes)
        if not any(one.bad_words_ids for one in params):
            return logits
        words = self._row_words()
        tails = self._tails(words.before.shape[1])
        return forbid(logits, words, tails, drafts, token_ids, prefixes)

    def _row_bias(self) -> Tensor:
        if self._bias is None:
            bias = torch.zeros(len(self.rows), self.vocab_size, dtype=torch.float32)
            for index, row in enumerate(self.rows):
                for token_id, added in row.request.params.logit_bias:
                    bias[index, token_id] = added
            self._bias = bias.to(self.device, non_blocking=True)
        return self._bias

    def _row_words(self) -> BadWords:
        if self._words is None:
            by_row = [row.request.params.bad_words_ids for row in self.rows]
            words = [(index, word) for index, of_row in enumerate(by_row) for word in of_row]
            span = max(len(word) for _, word in words) - 1
            self._words = BadWords(
                rows=self._tensor([index for index, _ in words], torch.long),
                before=self._tensor([aligned(w[:-1], span, ANY) for _, w in words], torch.long),
                last=self._tensor([word[-1] for _, word in words], torch.long),
            )
        return self._words

    def _tails(self, span: int) -> Tensor:
        """The last tokens of the answers, int64 `[rows, span]`."""
        first = [max(len(row.request.prompt_ids), len(row.token_ids) - span) for row in self.rows]
        answers = [row.token_ids[start:] for row, start in zip(self.rows, first, strict=True)]
        return self._tensor([aligned(ids, span, NOTHING) for ids in answers], torch.long)

    def _row_penalties(self) -> Penalties:
        if self._penalties is None:
            params = [row.request.params for row in self.rows]
            stops = torch.zeros(len(params), self.vocab_size, dtype=torch.bool)
            for index, one in enumerate(params):
                stops[index, [t for t in one.stop_token_ids if t < self.vocab_size]] = True
            self._penalties = Penalties(
                repetition=self._tensor([p.repetition_penalty for p in params], torch.float32),
                presence=self._tensor([p.presence_penalty for p in params], torch.float32),
                frequency=self._tensor([p.frequency_penalty for p in params], torch.float32),
                min_new=self._tensor([p.min_new_tokens for p in params], torch.long),
                stops=stops.to(self.device, non_blocking=True),
            )
        return self._penalties

    def _history(self) -> History:
        lengths = [len(row.token_ids) for row in self.rows]
        if self._counts is None or self._counts[0] != lengths:
            self._counts = lengths, self._count()
        return self._counts[1]

    def _count(self) -> History:
        used = torch.zeros(len(self.rows), self.vocab_size, dtype=torch.int32)
        new = torch.zeros_like(used)
        for index, row in enumerate(self.rows):
            for table, held in ((used, row.token_ids), (new, row.answer_ids)):
                ids = torch.tensor(held, dtype=torch.long)
                table[index].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        num_new = self._tensor([row.num_new for row in self.rows], torch.long)
        used, new = (table.to(self.device, non_blocking=True) for table in (used, new))
        return History(used, new, num_new)

    @property
    def span(self) -> int:
        """Tokens of the longest row."""
        return max(len(row.token_ids) for row in self.rows)

    def lengths(self) -> Tensor:
        """Tokens of every row, prompt included: int64 `[rows]`."""
        return self._tensor([len(row.token_ids) for row in self.rows], torch.long)

    def tail(self, width: int, *, least: int = 0) -> tuple[Tensor, Tensor]:
        """The last `width` tokens of every row and their positions, int64 `[rows, width]` each.

        A row shorter than `width` repeats its first token at position 0, which writes the same key
        and value again.

        Args:
            width: Tokens wanted.
            least: No token before this position is given where a row has one there.
        """
        positions = []
        for length in (len(row.token_ids) for row in self.rows):
            first = min(least, length - 1)
            positions.append([max(first, length - width + i) for i in range(width)])
        tokens = [
            [row.token_ids[position] for position in places]
            for row, places in zip(self.rows, positions, strict=True)
        ]
        return self._tensor(tokens, torch.long), self._tensor(positions, torch.long)

    def _tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        return to_device(values, self.device, dtype)


def to_device(values: object, device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Values of the host as a tensor on `device`.

    `torch.tensor(..., device=...)` would wait for everything that the device has been given to do.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def pad_prompts(
    prompts: list[list[int]], device: torch.device, *, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Right-padded tokens and positions for a prefill, int64 `[rows, longest]`.

    Padding repeats token 0 at the positions behind the row's end: slots that are masked until the
    row overwrites them.

    Args:
        prompts: Tokens of every row.
        device: Where the tensors are wanted.
        start: Position of their first tokens.
    """
    width = max(len(prompt) for prompt in prompts)
    tokens = to_device([p + [0] * (width - len(p)) for p in prompts], device)
    positions = torch.arange(start, start + width, device=device).expand(len(prompts), width)
    return tokens, positions
