"""What the project's text must not hold."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "pipeline", "docsite", "conf", "docs", "tests", ".ci")
FILES = (
    "models/README.md",
    "README.md",
    "Makefile",
    "pyproject.toml",
    "params.yaml",
    "zensical.toml",
    "dvc.yaml",
    ".gitignore",
)
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".html", ".jinja", ".j2", ".css", ".js", ".txt", ""}
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 50
# Written in two pieces so that this file does not hold what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/" + r"work\b(?=/|$|[\s`'\"])")


def texts() -> list[Path]:
    found = [ROOT / name for name in FILES if (ROOT / name).is_file()]
    for folder in FOLDERS:
        found += [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    return [path for path in found if path.is_file()]


def modules() -> list[Path]:
    folders = ("src", "pipeline", "docsite")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_path_of_one_machine():
    lines = [
        f"{relative(path)}:{number}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert lines == []


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("cd /" + "work/main", True),
        ("`/" + "work`", True),
        ("build/" + "work/a", False),
        ("net/" + "work", False),
        ("~/" + "work/a", False),
        ("a /" + "workspace", False),
    ],
)
def test_the_search_for_paths_finds_only_those(line, is_found):
    assert bool(MACHINE_PATH.search(line)) is is_found


def test_no_print_in_the_package():
    calls = [
        f"{relative(path)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert calls == []


def test_modules_are_short():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in modules()}
    assert {name: n for name, n in lengths.items() if n > MAX_MODULE_LINES} == {}


def test_functions_are_short():
    long = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or 0) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    long[f"{relative(path)}:{node.name}"] = num_lines
    assert long == {}


def test_every_module_says_what_it_is():
    silent = [
        relative(path) for path in modules() if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []
