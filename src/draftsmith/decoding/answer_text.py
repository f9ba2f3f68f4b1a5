"""The text of an answer, piece by piece as its tokens come.

A stop token shows nothing. A stop string ends the text before its first character, as in OpenAI's
API, so what may yet become one is held back until it is known; so is a character of which some
bytes are still missing. Only the newest tokens are decoded, however long the answer is.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.decoding.request import Result
from draftsmith.decoding.stopping import StopStrings
from draftsmith.decoding.token_text import TokenText

_INCOMPLETE = "\ufffd"


class AnswerText:
    """One answer.

    Args:
        token_text: What tokens spell.
        stop_strings: Those of its request.
    """

    def __init__(self, token_text: TokenText, stop_strings: Sequence[str]) -> None:
        self._token_text = token_text
        self._stops = StopStrings(stop_strings, token_text)
        self._token_ids: list[int] = []  # from the first that is decoded again
        self._shown = ""  # what these have shown
        self.num_held = 0  # bytes at the end that may begin a stop string, after the last tokens

    def add(self, token_ids: Sequence[int], result: Result | None = None) -> str:
        """The text that these tokens let be shown; empty while it is held back.

        Args:
            token_ids: The next tokens.
            result: Of the whole answer, when they are its last.
        """
        num_before = len(self._token_ids)
        self._token_ids.extend(token_ids)
        if result is not None:
            if isinstance(result.stopped_by, int):
                self._token_ids.pop()  # a stop token shows nothing
            return self._text(self.num_hidden(result))[len(self._shown) :]
        self.num_held = self._stops.num_held(self._token_ids)
        text = self._text(self.num_held)
        if text.endswith(_INCOMPLETE):
            return ""
        piece = text[len(self._shown) :]
        self._shown = text if piece else self._shown
        if self.num_held == 0:
            self._forget(num_before)
        return piece

    def num_hidden(self, result: Result) -> int:
        """Bytes at the end of the answer that a stop string hides."""
        if not isinstance(result.stopped_by, str):
            return 0
        match = self._stops.completed(result.token_ids)
        return match.num_bytes if match else 0

    def _text(self, num_hidden: int) -> str:
        return self._token_text.text(self._token_ids, num_hidden=num_hidden)

    def _forget(self, num_tokens: int) -> None:
        """Decode the first tokens no more; those that stay must show where a text begins."""
        rest = self._token_ids[num_tokens:]
        shown = self._token_text.text(rest)
        if shown and not shown.startswith(_INCOMPLETE):
            self._token_ids, self._shown = rest, shown
