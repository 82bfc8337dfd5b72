"""The part of JSON Schema that our schemas use; an unknown keyword is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}
_KNOWN = {
    "$schema",
    "$id",
    "$ref",
    "$defs",
    "title",
    "description",
    "type",
    "enum",
    "const",
    "minimum",
    "maximum",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "maxItems",
    "anyOf",
}


def list_errors(value: Any, schema: Any, root: Any | None = None, path: str = "$") -> Iterator[str]:
    """Yield one line for everything in which a value is not what the schema says."""
    root = schema if root is None else root
    unknown = set(schema) - _KNOWN
    assert not unknown, f"the checker does not know {unknown}"
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        yield from list_errors(value, root["$defs"][name], root, path)
        return
    for choice in schema.get("anyOf", ()):  # of one type, or null
        if (choice == {"type": "null"}) == (value is None):
            yield from list_errors(value, choice, root, path)
    if "const" in schema and value != schema["const"]:
        yield f"{path} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is not one of {schema['enum']}"
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(_has_type(value, type_) for type_ in types):
            yield f"{path} is not of type {types}"
            return
    if _has_type(value, "number"):
        if value < schema.get("minimum", value):
            yield f"{path} is below {schema['minimum']}"
        if value > schema.get("maximum", value):
            yield f"{path} is above {schema['maximum']}"
    if isinstance(value, dict):
        yield from _list_object_errors(value, schema, root, path)
    if isinstance(value, list) and len(value) > schema.get("maxItems", len(value)):
        yield f"{path} has more than {schema['maxItems']} items"
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from list_errors(item, schema["items"], root, f"{path}[{index}]")


def _list_object_errors(value: dict[str, Any], schema: Any, root: Any, path: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    yield from (
        f"{path}.{key} is missing" for key in schema.get("required", ()) if key not in value
    )
    for key, item in value.items():
        if key in properties:
            yield from list_errors(item, properties[key], root, f"{path}.{key}")
        elif schema.get("additionalProperties") is False:
            yield f"{path}.{key} is not in the schema"


def _has_type(value: Any, type_: str) -> bool:
    if type_ == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if type_ == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, _TYPES[type_])
