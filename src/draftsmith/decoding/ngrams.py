"""Where the last words of a growing text occurred before.

Every n-gram is entered once, when the text has grown behind it, so that a look costs no more for a
long text than for a short one. Knows texts as lists of token ids and nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """The last occurrence of each n-gram of one text, by n; what is never asked for costs nothing.

    The text is always the same one, and only ever longer.
    """

    def __init__(self) -> None:
        self._behind: dict[int, dict[tuple[int, ...], int]] = {}
        self._num_entered: dict[int, int] = {}

    def find(self, token_ids: Sequence[int], size: int) -> int | None:
        """The place behind the last occurrence of the text's last `size` tokens.

        The end of the text is none. Example: for 1 2 5 1 2 7 1 2 and size 2 it is 5, where 7
        stands.

        Args:
            token_ids: The text.
            size: At least 1.
        """
        behind = self._behind.setdefault(size, {})
        length = len(token_ids)
        for end in range(max(size, self._num_entered.get(size, 0)), length):
            behind[tuple(token_ids[end - size : end])] = end
        self._num_entered[size] = length
        return behind.get(tuple(token_ids[length - size :])) if length > size else None
