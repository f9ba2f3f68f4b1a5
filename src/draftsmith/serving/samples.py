"""The answer of one sample as callers see it: text, finish reason, log-probabilities.

Log-probabilities wait with the text that they belong to, and those of tokens that show nothing,
the stop token and what a stop string hides, are left out: text and tokens agree.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.decoding import AnswerText, Request, Result, TokenLogprobs, TokenText
from draftsmith.serving.engine_thread import Update

_LEAST = -9999.0  # what OpenAI's API says of a token that is next to impossible


@dataclass(frozen=True)
class Token:
    """A token that is shown.

    Attributes:
        token_id: Which one.
        found: Its log-probabilities.
        offset: Characters of the answer's text before it.
    """

    token_id: int
    found: TokenLogprobs
    offset: int


@dataclass(frozen=True)
class Piece:
    """What an update lets be shown.

    Attributes:
        text: Maybe empty.
        tokens: Their log-probabilities, where asked for.
        token_ids: All that was committed, also what shows nothing or waits.
        finish_reason: stop or length, with the last piece.
    """

    text: str
    tokens: Sequence[Token]
    token_ids: Sequence[int]
    finish_reason: str | None

    @property
    def is_worth_sending(self) -> bool:
        """Whether there is anything in it."""
        return bool(self.text or self.tokens or self.finish_reason)


class Sample:
    """One sample.

    Args:
        request: The engine's request.
        token_text: What tokens spell.
    """

    def __init__(self, request: Request, token_text: TokenText) -> None:
        self._token_text = token_text
        self._text = AnswerText(token_text, request.params.stop_strings)
        self._waiting: list[Token] = []
        self._offsets = _Offsets(token_text)
        self.result: Result | None = None

    def add(self, update: Update) -> Piece:
        """Take in what a round committed."""
        self.result = update.result
        text = self._text.add(update.token_ids, update.result)
        tokens = zip(update.token_ids, update.logprobs, strict=bool(update.logprobs))
        self._waiting += [Token(i, found, self._offsets.next(i)) for i, found in tokens]
        reason = None
        if self.result is not None:
            reason = self.result.finish_reason
            self._hide(self.result)
        shown: list[Token] = []
        if text or reason:
            # What a stop string may hide yet waits with its text.
            num_held = 0 if reason else self._num_within(self._text.num_held)
            num_shown = len(self._waiting) - num_held
            shown, self._waiting = self._waiting[:num_shown], self._waiting[num_shown:]
        return Piece(text, shown, update.token_ids, reason)

    def _hide(self, result: Result) -> None:
        """Leave out the tokens at the end that show nothing."""
        if isinstance(result.stopped_by, int):
            del self._waiting[-1:]
        num_hidden = self._num_within(self._text.num_hidden(result))
        del self._waiting[len(self._waiting) - num_hidden :]

    def _num_within(self, num_bytes: int) -> int:
        """Tokens that wait and lie wholly within so many bytes at the end."""
        count = 0
        for token in reversed(self._waiting):
            length = len(self._token_text.spelled(token.token_id))
            if not 0 < num_bytes >= length:
                break
            num_bytes -= length
            count += 1
        return count


class _Offsets:
    """Where tokens begin in the text of an answer, in characters.

    A token that goes on inside a character begins where that character does.
    """

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_before = 0
        self._is_first = True

    def next(self, token_id: int) -> int:
        """Of the next token."""
        offset = self._num_before
        self._num_before += len(self._decoder.decode(self._shown(token_id)))
        self._is_first = False
        return offset

    def _shown(self, token_id: int) -> bytes:
        """What it adds to the text: no special token, and with some tokenizers no first space."""
        spelled, alone = self._token_text.spelled(token_id), self._token_text.text([token_id])
        if not alone:
            return b""
        is_cut = self._is_first and spelled.startswith(b" ") and not alone.startswith(" ")
        return spelled[1:] if is_cut else spelled


def chat_logprobs(tokens: Sequence[Token], token_text: TokenText) -> dict[str, Any]:
    """As chat completions show them."""
    entries = []
    for token in tokens:
        top = [_entry(token_id, value, token_text) for token_id, value in token.found.top]
        entry = _entry(token.token_id, token.found.logprob, token_text)
        entries.append({**entry, "top_logprobs": top})
    return {"content": entries, "refusal": None}


def completion_logprobs(tokens: Sequence[Token], token_text: TokenText) -> dict[str, Any]:
    """As completions show them, by name; of several tokens with one name the most probable."""
    return {
        "tokens": [_name(token.token_id, token_text) for token in tokens],
        "token_logprobs": [max(token.found.logprob, _LEAST) for token in tokens],
        "top_logprobs": [_named(token, token_text) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _named(token: Token, token_text: TokenText) -> dict[str, float]:
    """The most probable tokens and the chosen one, the best first."""
    named: dict[str, float] = {}
    for token_id, value in (*token.found.top, (token.token_id, token.found.logprob)):
        named.setdefault(_name(token_id, token_text), max(value, _LEAST))
    return named


def _name(token_id: int, token_text: TokenText) -> str:
    r"""What a token spells; of one that cuts a character its bytes, as `bytes:\xf0\x9f`."""
    spelled = token_text.spelled(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _entry(token_id: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
    spelled = token_text.spelled(token_id)
    name = spelled.decode(errors="replace")
    return {"token": name, "bytes": list(spelled), "logprob": max(logprob, _LEAST)}
