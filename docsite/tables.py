"""Tables of Markdown whose cells may hold any text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]*`)")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(text: str) -> str:
    """Text in one line of a cell: code in backticks stays, what would be markup is escaped."""
    pieces = _CODE.split(" ".join(text.split()))
    return "".join(piece if piece.startswith("`") else _escaped(piece) for piece in pieces)


def code(text: str) -> str:
    """Code of a cell; nothing where there is none."""
    return f"`{text}`" if text else ""


def _escaped(text: str) -> str:
    for sign, stand_in in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("*", "&#42;")):
        text = text.replace(sign, stand_in)
    return text
