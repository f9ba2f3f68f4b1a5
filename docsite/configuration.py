"""Reference of the configuration, read off conf/: every key, its default and its comment.

A key means what the comment behind it says, and the one above it; one above a file's first key is
the file's where that key has its own. What a key does is known to the code of its section alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from docsite.tables import code, plain, table

_COMMENT = re.compile(r"(?:^|\s)#\s?(.*)$")
_RECIPES = "draft"
_OVERLAYS = "profile"


@dataclass(frozen=True)
class Key:
    """A key of a file.

    Attributes:
        name: Dotted where it is nested.
        default: Its value as the file has it; empty for a mapping, whose keys follow.
        comments: What the file says of it.
    """

    name: str
    default: str
    comments: tuple[str, ...]


def read_keys(text: str) -> tuple[str, list[Key]]:
    """A file's own comment, and its keys.

    Args:
        text: YAML whose top is a mapping with keys.
    """
    lines = text.splitlines()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    first, *others = _keys(root, text, prefix="", end=len(lines))
    start = root.value[0][0].start_mark.line
    heading = _above(lines, start) if _behind(lines, start) else ""
    if heading:
        first = replace(first, comments=first.comments[1:])
    return heading, [first, *others]


def _keys(node: yaml.MappingNode, text: str, *, prefix: str, end: int) -> Iterator[Key]:
    """The keys of a mapping whose last line is before `end`, and those of mappings below it."""
    lines = text.splitlines()
    starts = [key.start_mark.line for key, _ in node.value]
    for (key, value), start, stop in zip(node.value, starts, [*starts[1:], end], strict=True):
        name = f"{prefix}{key.value}"
        is_block = isinstance(value, yaml.MappingNode) and not value.flow_style
        own = range(start, start + 1 if is_block else stop)
        comments = [_above(lines, start), *(_behind(lines, line) for line in own)]
        yield Key(name, "" if is_block else _source(value, text), tuple(filter(None, comments)))
        if is_block:
            yield from _keys(value, text, prefix=f"{name}.", end=stop)


def _source(node: yaml.Node, text: str) -> str:
    """A value in one line, spelled as in the file."""
    if isinstance(node, yaml.SequenceNode) and not node.flow_style:
        return f"[{', '.join(_source(item, text) for item in node.value)}]"
    return text[node.start_mark.index : node.end_mark.index].strip()


def _above(lines: Sequence[str], line: int) -> str:
    """The comment that ends right above a line."""
    said = list(itertools.takewhile(_is_comment, reversed(lines[:line])))
    return " ".join(text.lstrip("# ") for text in reversed(said))


def _behind(lines: Sequence[str], line: int) -> str:
    """The comment behind what a line holds."""
    found = None if _is_comment(lines[line]) else _COMMENT.search(lines[line])
    return found.group(1) if found else ""


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def configuration(root: Path) -> str:
    """Markdown: params.yaml as it is, and a section for every group of conf/."""
    groups = sorted(path for path in (root / "conf").iterdir() if path.is_dir())
    parts = [f"## params.yaml\n\n{_verbatim(root / 'params.yaml')}"]
    for group in groups:
        parts += [f"## {group.name}", *(_file(file) for file in sorted(group.glob("*.yaml")))]
    return "\n\n".join(parts)


def _file(file: Path) -> str:
    title = f"`conf/{file.parent.name}/{file.name}`"
    if file.parent.name == _OVERLAYS:
        return f"{title}\n\n{_verbatim(file)}"
    section = f"drafts.{file.stem}" if file.parent.name == _RECIPES else file.parent.name
    heading, keys = read_keys(file.read_text(encoding="utf-8"))
    told = f"{title}: {plain(heading)}" if heading else title
    return f"{told}\n\n{_table(section, keys)}"


def _table(section: str, keys: Sequence[Key]) -> str:
    rows = [
        (code(f"{section}.{key.name}"), code(key.default), "<br>".join(map(plain, key.comments)))
        for key in keys
    ]
    return table(("key", "default", "meaning"), rows)


def _verbatim(file: Path) -> str:
    return f"```yaml\n{file.read_text(encoding='utf-8').rstrip()}\n```"
