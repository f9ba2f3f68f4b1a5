"""A mapping becomes a frozen dataclass: no unknown key, no missing one, no silent conversion.

Pure. Knows nothing of files or YAML; `draftsmith.config` is its public door.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union

from draftsmith.errors import ConfigError

T = TypeVar("T")

_WHERE = "in params.yaml or in conf/"


def build(cls: type[T], mapping: Mapping[str, object], path: str) -> T:
    """Make the dataclass `cls` of `mapping`, strictly.

    Args:
        cls: A dataclass whose fields are bool, int, float, str, `Literal`, `list[X]`,
            `tuple[X, ...]`, `dict[str, X]`, dataclasses, or unions of these and None. An int is
            taken for a float; nothing else is converted. Of several dataclasses in a union, the
            first field says which: a `Literal` of its own.
        mapping: Plain values, as read from YAML.
        path: Dotted path of `mapping` in the configuration, for messages; may be empty.

    Raises:
        ConfigError: A key is unknown, missing or ill-typed, or the dataclass refused the values.
    """
    if not isinstance(mapping, Mapping):
        raise ill_typed(path, mapping, expected="a mapping of keys")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]  # T is any dataclass
    for key in mapping:
        if key not in fields:
            raise unknown(join(path, str(key)), str(key), fields, kind="key", where=_WHERE)
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in mapping:
            values[name] = convert(mapping[name], hints[name], join(path, name))
        elif not _has_default(field):
            raise ConfigError(
                f"reading the key `{join(path, name)}`",
                found="no such key",
                expected=f"a value: {_describe(hints[name])}",
                remedy=f"add `{join(path, name)}` {_WHERE}",
            )
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(
            f"checking the section `{path}`",
            found=str(error),
            expected="values within their range",
            remedy=f"correct `{path}` {_WHERE}",
        ) from error


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return (
        field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    )


def convert(value: object, hint: Any, path: str) -> object:  # noqa: ANN401  a type form has no type
    """Check a plain value against a type form; see `build` for the forms.

    Raises:
        ConfigError: The value does not fit.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    container = origin or hint
    result: object
    if hint is Any or hint is object:
        result = value
    elif origin in (Union, types.UnionType):
        result = _convert_union(value, arguments, path)
    elif origin is Literal:
        result = _convert_literal(value, arguments, path)
    elif dataclasses.is_dataclass(hint):
        result = build(typing.cast("type[object]", hint), typing.cast("Any", value), path)
    elif container in (list, tuple, Sequence):
        result = _convert_sequence(value, container, arguments, path)
    elif container in (dict, Mapping):
        result = _convert_mapping(value, arguments, path)
    else:
        result = _convert_scalar(value, hint, path)
    return result


def _convert_union(value: object, members: tuple[Any, ...], path: str) -> object:
    if value is None and type(None) in members:
        return None
    candidates = [member for member in members if member is not type(None)]
    # An exact match goes first, so that `float | int` keeps an int an int.
    exact = [member for member in candidates if type(value) is member]
    nested = [member for member in candidates if dataclasses.is_dataclass(member)]
    if len(candidates) == 1 or (isinstance(value, Mapping) and len(nested) == 1):
        return convert(value, (nested or candidates)[0], path)
    if isinstance(value, Mapping) and nested:
        return convert(value, _tagged(value, nested, path), path)
    for member in exact + candidates:
        with contextlib.suppress(ConfigError):
            return convert(value, member, path)
    raise ill_typed(path, value, expected=" or ".join(_describe(member) for member in members))


def _tagged(value: Mapping[str, object], members: Sequence[Any], path: str) -> object:
    """The dataclass that the value's tag names, such as `family: student`."""
    tag = dataclasses.fields(members[0])[0].name
    by_choice = {
        choice: member
        for member in members
        for choice in typing.get_args(typing.get_type_hints(member)[tag])
    }
    return by_choice[_convert_literal(value.get(tag), tuple(by_choice), join(path, tag))]


def _convert_literal(value: object, choices: tuple[Any, ...], path: str) -> object:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return value
    near = _nearest(str(value), [str(choice) for choice in choices])
    listed = ", ".join(f"`{choice}`" for choice in choices)
    raise ill_typed(path, value, expected=f"one of {listed}", hint=near)


def _convert_sequence(
    value: object, container: object, arguments: tuple[Any, ...], path: str
) -> object:
    if not isinstance(value, list | tuple):
        raise ill_typed(path, value, expected="a list")
    if container is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise ill_typed(path, value, expected=f"a list of {len(arguments)} values")
        hints = list(arguments)
    else:
        hints = [arguments[0] if arguments else Any] * len(value)
    items = [
        convert(item, hint, f"{path}[{i}]")
        for i, (item, hint) in enumerate(zip(value, hints, strict=True))
    ]
    return items if container is list else tuple(items)


def _convert_mapping(value: object, arguments: tuple[Any, ...], path: str) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise ill_typed(path, value, expected="a mapping of keys")
    hint = arguments[1] if arguments else Any
    for key in value:
        if not isinstance(key, str):
            raise ill_typed(path, key, expected='keys that are text (quote them: "0.7")')
    return {key: convert(item, hint, join(path, key)) for key, item in value.items()}


def _convert_scalar(value: object, hint: Any, path: str) -> object:  # noqa: ANN401  as in convert
    if hint not in (bool, int, float, str):
        raise TypeError(f"{path}: a configuration dataclass cannot hold {hint!r}")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ill_typed(path, value, expected=_describe(hint))
    if isinstance(value, float) and not math.isfinite(value):
        raise ill_typed(path, value, expected="a finite number")
    return value


def _describe(hint: Any) -> str:  # noqa: ANN401  as in convert
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if hint in names:
        return names[hint]
    if hint is type(None):
        return "null"
    return str(getattr(hint, "__name__", hint)) if not typing.get_args(hint) else str(hint)


def join(path: str, key: str) -> str:
    """The dotted path of `key` below `path`, which may be empty."""
    return f"{path}.{key}" if path else key


def _nearest(name: str, valid: Collection[str]) -> str | None:
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return matches[0] if matches else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def unknown(path: str, name: str, valid: Collection[str], *, kind: str, where: str) -> ConfigError:
    """The error for a name that is none of `valid`; it offers the nearest one.

    Args:
        path: Dotted path of the name.
        name: What was found.
        valid: What would have been accepted.
        kind: What the name stands for: key, group, section, file.
        where: Clause that ends "Correct it ...".
    """
    near = _nearest(name, valid)
    question = f"did you mean `{near}`? " if near else ""
    return ConfigError(
        f"reading `{path}`",
        found=f"the unknown {kind} `{name}`",
        expected=f"one of {', '.join(f'`{choice}`' for choice in sorted(valid)) or 'none'}",
        remedy=f"{question}Correct it {where}",
    )


def ill_typed(path: str, value: object, *, expected: str, hint: str | None = None) -> ConfigError:
    """The error for a value at `path` that is not `expected`; `hint` is the nearest valid one."""
    shown = "null" if value is None else f"{value!r} ({type(value).__name__})"
    question = f"did you mean `{hint}`? " if hint else ""
    return ConfigError(
        f"reading `{path}`",
        found=shown,
        expected=expected,
        remedy=f"{question}Correct the value {_WHERE}",
    )
