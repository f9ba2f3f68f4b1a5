"""Requests in line, and how their prompts get into the caches: whole, or in pieces.

A prompt longer than a chunk is read in pieces, one a step, between which the rows in flight decode
a round each. It stands in the last cache row, apart from the batch, until it is read; then it moves
to the batch's end. One such prompt is read at a time. Shorter ones do not wait for it: they are
read whole, several in one padded forward. Knows nothing of drafts or of acceptance.

Source: Agrawal et al. 2024 (arXiv 2403.02310), chunked prefill between decoding steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from draftsmith.decoding.batch import Batch, Row, pad_prompts
from draftsmith.decoding.proposers import Proposer
from draftsmith.decoding.slot_model import SlotModel

PREFILL_CHUNK = 512  # so wide a forward keeps a device busy; a wider one only stalls others longer
_FORWARD = 128  # what a forward more costs, in positions that it must save to be worth it
_REFILL_SHARE = 8  # where prompts are read whole and more wait than rows are free, an eighth enters


class Admission:
    """The line in front of a batch.

    Args:
        target: Reads every prompt.
        proposer: Reads it too.
    """

    def __init__(self, target: SlotModel, proposer: Proposer) -> None:
        self._target, self._proposer = target, proposer
        self._waiting: deque[Row] = deque()
        self._reading: Row | None = None  # a long prompt in the last cache row
        self._num_read = 0
        self._num_rows = 0
        self._chunk: int | None = None

    def reset(self, *, num_rows: int, chunk: int | None) -> None:
        """Forget all requests.

        Args:
            num_rows: Cache rows, shared by the batch and the prompt that is being read.
            chunk: Positions of a prefill; a longer prompt is read in pieces. None is no limit.
        """
        self._waiting.clear()
        self._stop_reading()
        self._num_rows, self._chunk = num_rows, chunk

    def __len__(self) -> int:
        return len(self._waiting) + (self._reading is not None)

    @property
    def rows(self) -> Iterator[Row]:
        """All that are not in the batch yet."""
        yield from self._waiting
        if self._reading is not None:
            yield self._reading

    def add(self, rows: Sequence[Row]) -> None:
        """Put rows at the end of the line."""
        self._waiting.extend(rows)

    def put_back(self, row: Row) -> None:
        """Put a row first in line."""
        self._waiting.appendleft(row)

    def take_out(self, row: Row) -> None:
        """Forget one of `rows`."""
        if row is self._reading:
            self._stop_reading()
        else:
            self._waiting.remove(row)

    def step(self, batch: Batch) -> None:
        """Read a piece of the long prompt, and whole ones; what is read joins the batch."""
        whole = self._next(len(batch))
        if self._reading is not None:
            self._read_piece(self._reading, batch)
        for group in alike(whole):
            self._read([row.token_ids for row in group], first_row=len(batch))
            for row in group:
                self._waiting.remove(row)
                batch.append(row)

    def _next(self, num_in_flight: int) -> list[Row]:
        """The first in line that are read whole in this step; begins with a long one among them.

        A long one waits where another is being read, and those behind it pass.
        """
        whole: list[Row] = []
        long: Row | None = None
        longest = 0
        num_free = self._num_rows - num_in_flight - (self._reading is not None)
        is_short_of_rows = False
        for row in self._waiting:
            if self._is_long(row) and (self._reading or long) is not None:
                continue
            if num_free == 0:
                is_short_of_rows = True
                break
            if self._is_long(row):
                long = row
            else:
                longest = max(longest, len(row.token_ids) - 1)
                if self._chunk is not None and (len(whole) + 1) * longest > self._chunk:
                    break  # the padded prefill would be wider than a chunk
                whole.append(row)
            num_free -= 1
        if long is not None:
            self._waiting.remove(long)
            self._reading, self._num_read = long, 0
        # Who was here from the start may wait for a common prefill; a service leaves no row idle.
        is_patient = self._chunk is None and is_short_of_rows
        return [] if is_patient and len(whole) * _REFILL_SHARE < self._num_rows else whole

    def _is_long(self, row: Row) -> bool:
        return self._chunk is not None and len(row.token_ids) - 1 > self._chunk

    def _read_piece(self, row: Row, batch: Batch) -> None:
        assert self._chunk is not None, "without a chunk no prompt is long"
        last_row = self._num_rows - 1
        end = min(self._num_read + self._chunk, len(row.token_ids) - 1)
        self._read([row.token_ids[: end + 1]], first_row=last_row, start=self._num_read)
        self._num_read = end
        if end == len(row.token_ids) - 1:
            self._reading = None
            if len(batch) != last_row:
                self._target.move_row(last_row, len(batch))
                self._proposer.move_row(last_row, len(batch))
                self._target.clear_row(last_row)  # nobody has looked at its logits yet
            batch.append(row)

    def _read(self, texts: list[list[int]], *, first_row: int, start: int = 0) -> None:
        """Prefill all tokens but the last of every text, from position `start` on."""
        heads = [text[start:-1] for text in texts]
        if any(heads):
            tokens, positions = pad_prompts(heads, self._target.device, start=start)
            span = start + tokens.shape[1]
            self._target.forward(tokens, positions, span=span, first_row=first_row, keep=0)
        self._proposer.admit(texts, first_row=first_row, start=start)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            # Nobody has looked at its logits: NaN there would outlive it.
            self._target.clear_row(self._num_rows - 1)
            self._reading = None


def alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by length, cut into groups that are read together, each padded to its longest.

    Cut where that saves more positions than the forwards cost that it adds.
    """
    ordered = sorted(rows, key=lambda row: len(row.token_ids))
    costs, cuts = [0], [0]  # of the first n rows: positions, and where their last group begins
    for end, row in enumerate(ordered, start=1):
        by_start = [
            costs[start] + (end - start) * len(row.token_ids) + _FORWARD for start in range(end)
        ]
        costs.append(min(by_start))
        cuts.append(by_start.index(costs[-1]))
    groups = []
    end = len(ordered)
    while end:
        groups.append(ordered[cuts[end] : end])
        end = cuts[end]
    return groups[::-1]
