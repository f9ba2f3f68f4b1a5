"""Where an answer ends: behind a stop token, behind a stop string, or at its length.

A stop string ends an answer with the token that completes it, wherever it begins or ends inside
tokens, and whether the round commits more tokens behind it or not. Only the answer's own text
counts: a prompt that ends in the first half of a stop string completes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.decoding.batch import Row
from draftsmith.decoding.token_text import TokenText


@dataclass(frozen=True)
class StopMatch:
    """A stop string that a text ends in.

    Attributes:
        string: Which one.
        num_bytes: From its first byte to the end of the text; more than its own when the last token
            goes on behind it.
    """

    string: str
    num_bytes: int


class StopStrings:
    """Finds stop strings in what tokens spell.

    Args:
        strings: None of them empty.
        token_text: What the tokens spell.
    """

    def __init__(self, strings: Sequence[str], token_text: TokenText) -> None:
        self._sought = {string: string.encode() for string in strings}
        self._longest = max(map(len, self._sought.values()), default=0)
        self._token_text = token_text

    def completed(self, token_ids: Sequence[int]) -> StopMatch | None:
        """The stop string that the last token completes, None where it completes none.

        Of several it is the one that ends first, then the longest, so that it does not depend on
        how the text was cut into tokens.
        """
        before = self._tail(token_ids[:-1])
        text = before + self._token_text.spelled(token_ids[-1])
        found = []
        for string, sought in self._sought.items():
            start = text.find(sought, max(0, len(before) + 1 - len(sought)))
            if start >= 0:
                found.append((start + len(sought), start, string))
        if not found:
            return None
        _, start, string = min(found)
        return StopMatch(string, len(text) - start)

    def num_held(self, token_ids: Sequence[int]) -> int:
        """Bytes at the end of the text that begin a stop string, so that they may not be shown."""
        text = self._tail(token_ids)
        for length in range(len(text), 0, -1):
            begun = (s for s in self._sought.values() if len(s) > length)
            if any(sought.startswith(text[-length:]) for sought in begun):
                return length
        return 0

    def _tail(self, token_ids: Sequence[int]) -> bytes:
        """The end of the text, one byte shorter than the longest stop string."""
        pieces: list[bytes] = []
        wanted, length = self._longest - 1, 0
        for token_id in reversed(token_ids):
            if length >= wanted:
                break
            pieces.append(self._token_text.spelled(token_id))
            length += len(pieces[-1])
        text = b"".join(reversed(pieces))
        return text[max(0, length - wanted) :]


def trim(
    token_ids: list[int], row: Row, token_text: TokenText | None
) -> tuple[list[int], int | str | None]:
    """Cut a round's tokens behind the first that ends the answer, and at the length limit.

    A stop string that is complete before `min_new_tokens` tokens is text like any other. A token
    that is a stop token and completes a stop string counts as the latter.

    Returns:
        What the row commits, and the stop token or string that ended it; None when none did.
    """
    params = row.request.params
    token_ids = token_ids[: row.num_remaining]
    stops = None
    if params.stop_strings and token_text is not None:
        stops = StopStrings(params.stop_strings, token_text)
    answer = row.answer_ids if stops else []
    for num_tokens, token in enumerate(token_ids, start=1):
        answer.append(token)
        if stops and len(answer) >= params.min_new_tokens and (match := stops.completed(answer)):
            return token_ids[:num_tokens], match.string
        if token in params.stop_token_ids:
            return token_ids[:num_tokens], token
    return token_ids, None
