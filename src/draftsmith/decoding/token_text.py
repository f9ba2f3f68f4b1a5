"""What token ids spell: the bytes of one token, the text of many.

Bytes, because a byte-level vocabulary cuts characters in two: a token may end inside a character
and the next one begin there. Knows a tokenizer and nothing of requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"
_ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies (GPT-2's) write every byte as one of these characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    written = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | written


_BYTES = _byte_alphabet()


class TokenText:
    """A tokenizer's vocabulary, token by token as it is asked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._spelled: dict[int, bytes] = {}

    def spelled(self, token_id: int) -> bytes:
        """What a token adds to a text behind other tokens; special tokens by their names."""
        if token_id not in self._spelled:
            self._spelled[token_id] = self._spell(token_id)
        return self._spelled[token_id]

    def text(self, token_ids: Sequence[int], *, num_hidden: int = 0) -> str:
        """The tokens' text, special tokens left out, without its last bytes.

        Args:
            token_ids: Any tokens.
            num_hidden: So many bytes of what they spell, special tokens included, are left out at
                the end; the first of them begins a character.
        """
        num_shown = len(token_ids)
        while num_hidden > 0 and num_shown:
            length = len(self.spelled(token_ids[num_shown - 1]))
            if length > num_hidden:
                break
            num_hidden -= length
            num_shown -= 1
        text = self._decode(token_ids[:num_shown], skip_special_tokens=True)
        if num_hidden == 0 or num_shown == 0:
            return text
        last = token_ids[num_shown - 1]
        if not self._decode([last], skip_special_tokens=True):
            return text  # a special token: nothing of it is in the text
        return text.removesuffix(self.spelled(last)[-num_hidden:].decode(errors="replace"))

    def _spell(self, token_id: int) -> bytes:
        # Its second occurrence: at the start of a text some tokenizers drop a leading space.
        once, twice = (
            self._decode([token_id] * times, clean_up_tokenization_spaces=False) for times in (1, 2)
        )
        text = twice[len(once) :]
        if _INCOMPLETE not in text:
            return text.encode()
        name = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if byte := _ONE_BYTE.fullmatch(name):
            return bytes.fromhex(byte[1])
        if all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        return text.encode()  # the mark itself

    def _decode(self, token_ids: Sequence[int], **options: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), **options))
