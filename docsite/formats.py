"""Reference of records and requests, read off the classes that write and check them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from docsite.tables import code, plain, table

_FIELD = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_KINDS = {"string": "text", "array": "list", "object": "mapping"}


def record(cls: type) -> str:
    """A table of a dataclass' fields: their types, and what its docstring says of them."""
    said = dict(_FIELD.findall(inspect.getdoc(cls) or ""))
    rows = [
        (code(field.name), code(str(field.type)), plain(said.get(field.name, "")))
        for field in dataclasses.fields(cls)
    ]
    return table(("field", "type", "meaning"), rows)


def request(model: type[BaseModel]) -> str:
    """A table of a request's fields, with the limits that are checked."""
    schema = model.model_json_schema()
    required = set(schema.get("required", ()))
    rows = [
        (
            code(name),
            plain(_form(field)),
            "required" if name in required else code(_default(field)),
            plain(field.get("description", "")),
        )
        for name, field in schema["properties"].items()
    ]
    return table(("field", "form", "default", "meaning"), rows)


def _form(field: Mapping[str, Any]) -> str:
    """The form of a value: `number >=0 <=2`, `integer or null`, `list of text`."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_form(form) for form in field["anyOf"]))
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field or "const" in field:
        return " or ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    kind = _KINDS.get(field.get("type", ""), field.get("type", "value"))
    inner = field.get("items") if kind == "list" else None
    limits = [f"{sign}{field[name]}" for name, sign in _LIMITS.items() if name in field]
    return " ".join([kind, *([f"of {_form(inner)}"] if inner else []), *limits])


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    return "" if default is None else json.dumps(default)
