"""The JSON Schema of the report, from the types in `clusterprof/report/document.py`.

msgspec knows the types and their limits. What it cannot know is added here: every key is written,
a number that is not finite is null, and what a key means stands in the docstring below it.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from itertools import pairwise
from typing import Any

import msgspec

from clusterprof.report import code, document, document_base, history, impact, life, model

PAGE = "clusterprof/output/renderers/schema/report.schema.json"
NULL = {"type": "null"}
MODULES = (model, impact, history, code, life)
MAX_INT64 = (1 << 63) - 1  # a limit of the reader; it says nothing about reports


def make_report_schema() -> str:
    (reference,), definitions = msgspec.json.schema_components(
        [document.Report], ref_template="#/$defs/{name}"
    )
    classes = {
        **list_classes(model),
        **list_classes(impact),
        **list_classes(document_base),
        **list_classes(document),
    }
    for name, definition in definitions.items():
        describe_class(definition, classes[name])
    root = definitions.pop(reference["$ref"].rpartition("/")[2])
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:clusterprof:report:1",
        "title": "clusterprof report",
    }
    ordered = {name: definitions[name] for name in sorted(definitions)}
    return format_json({**head, **root, "$defs": ordered}) + "\n"


def format_json(value: Any, indent: int = 0) -> str:
    """JSON with an object on one line where it fits there, and lists on one line."""
    line = json.dumps(value)
    if not isinstance(value, dict) or indent + len(line) <= 100:
        return line
    inner = indent + 2
    items = [f"{' ' * inner}{json.dumps(key)}: {format_json(value[key], inner)}" for key in value]
    return "{\n" + ",\n".join(items) + "\n" + " " * indent + "}"


def list_classes(module: Any) -> dict[str, type]:
    classes = inspect.getmembers(module, inspect.isclass)
    return {name: value for name, value in classes if value.__module__ == module.__name__}


def describe_class(definition: dict[str, Any], class_: type) -> None:
    """Make an object closed and complete, and describe it and its keys."""
    classes = [class_, *(vars(module).get(class_.__name__) for module in MODULES)]
    classes = [described for described in classes if described is not None]
    properties, required = {}, []
    for field in msgspec.inspect.type_info(class_).fields:
        value = simplify_schema(definition["properties"][field.name])
        value.pop("default", None)
        extra = getattr(field.type, "extra", None) or {}
        attribute = extra.get("source", field.name).rpartition(".")[2]
        texts = [list_docstrings(class_).get(field.name)]
        texts += [list_docstrings(described).get(attribute) for described in classes[1:]]
        text = next(filter(None, texts), "")
        properties[field.name] = {"description": make_plain_text(text), **value} if text else value
        if not extra.get("omit_if_empty"):
            required.append(field.name)
    definition.clear()
    definition["description"] = make_plain_text(next(filter(None, (c.__doc__ for c in classes))))
    definition["type"] = "object"
    definition["additionalProperties"] = False
    definition["required"] = required
    definition["properties"] = properties


def list_docstrings(class_: type) -> dict[str, str]:
    """Attribute of a class -> the docstring below it."""
    body = ast.parse(inspect.getsource(class_)).body[0].body
    return {
        field.target.id: text.value.value
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def make_plain_text(text: str) -> str:
    """One line, with the word of JSON for None."""
    return re.sub(r"\bNone\b", "null", " ".join(text.split()))


def simplify_schema(value: Any) -> Any:
    """A number may be null, what may be null has a list of types, and the limit of int64 goes."""
    if isinstance(value, list):
        return [simplify_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    if NULL in value.get("anyOf", ()):
        others = [item for item in value["anyOf"] if item != NULL]
        if len(others) == 1 and "type" in others[0]:
            rest = {key: item for key, item in value.items() if key != "anyOf"}
            known = simplify_schema(others[0])
            return {**rest, **known, "type": [others[0]["type"], "null"]}
        value = {**value, "anyOf": [*others, NULL]}  # the order differs between versions of msgspec
    if value.get("maximum") == MAX_INT64:
        return simplify_schema({key: item for key, item in value.items() if key != "maximum"})
    if value.get("type") == "number":
        return {**value, "type": ["number", "null"]}
    return {key: simplify_schema(item) for key, item in value.items()}
