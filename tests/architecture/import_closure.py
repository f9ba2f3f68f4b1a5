"""Which files of this repository a script imports, found by reading the syntax tree.

Imports inside functions count, those under `if TYPE_CHECKING:` do not. Importing `a.b.c` also runs
the `__init__.py` of `a` and `a.b`; such a file counts when it imports something on load or when a
name is taken from it, because only then can it change what the importer does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = ("src", ".")
PACKAGES = ("draftsmith", "pipeline")


def import_closure(script: Path, root: Path) -> set[str]:
    """Relative paths of all files of the repository that `script` may load, itself included."""
    script = script.resolve()
    found = {script}
    pending = [script]
    while pending:
        for file in imported_files(pending.pop(), root.resolve()) - found:
            found.add(file)
            pending.append(file)
    return {file.relative_to(root.resolve()).as_posix() for file in found}


def imported_files(file: Path, root: Path) -> set[Path]:
    """Files of the repository that one file imports itself."""
    files: set[Path] = set()
    for module, name in imports(file, root):
        submodule = _locate(f"{module}.{name}", root) if name else None
        target = submodule or _locate(module, root)
        if target is None:
            continue
        files.add(target)
        full_name = f"{module}.{name}" if submodule else module
        parents = full_name.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            package = _locate(".".join(parents[:depth]), root)
            if package and any(_walk(ast.parse(package.read_text()), into_functions=False)):
                files.add(package)
    return files


def imports(file: Path, root: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name) for `from module import name`; (module, None) for `import module`."""
    package = _module_name(file, root).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in _walk(ast.parse(file.read_text()), into_functions=True):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def _walk(tree: ast.AST, *, into_functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if getattr(node, "module", None) != "__future__":
                yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from _walk(ast.Module([other], []), into_functions=into_functions)
        elif into_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(node, into_functions=into_functions)


def _module_name(file: Path, root: Path) -> str:
    for source in SOURCES:
        folder = (root / source).resolve()
        if file.is_relative_to(folder):
            parts = file.relative_to(folder).with_suffix("").parts
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    raise ValueError(f"{file} lies outside {root}")


def _locate(module: str, root: Path) -> Path | None:
    if module.split(".", 1)[0] not in PACKAGES:
        return None
    for source in SOURCES:
        path = (root / source).resolve().joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None
