"""A JSON Schema as tables: one for the document, one for each of its definitions."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pase.machine import machine_schema
from pase.planning.plan_file import plan_schema

ROOT = Path(__file__).parents[2]

PUBLISHED: Mapping[str, Callable[[], str]] = MappingProxyType({"machine": machine_schema, "plan": plan_schema})
"""Schemas by the name of the file that the site has them in: schemas/plan.schema.json."""

Node = Mapping[str, Any]

_BOUNDS = (
    ("const", "{}"), ("minimum", "≥ {}"), ("exclusiveMinimum", "> {}"), ("maximum", "≤ {}"),
    ("minItems", "at least {}"), ("minProperties", "at least {}"), ("minLength", "at least {} characters"),
    ("pattern", "`{}`"),
)  # fmt: skip
_ABSURD = 1e18
"""A maximum beyond this says what a number can hold, and nothing of the document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One field. path: with `[]` for the entries of an array and `*` for any name."""

    path: str
    type: str
    is_required: bool
    description: str


def schema_page(name: str) -> str:
    """Return the link to a schema and its tables, as Markdown, for a page in docs/reference."""
    schema = json.loads(PUBLISHED[name]())
    sections = [("The document", "document", schema)]
    sections += [(f"`{name}`", name, node) for name, node in schema.get("$defs", {}).items()]
    lines = [line for title, anchor, node in sections for line in _section(title, anchor, node)]
    return "\n".join([f"The [JSON Schema](../schemas/{name}.schema.json) of it as a file.", "", *lines])


def _section(title: str, anchor: str, node: Node) -> Iterator[str]:
    yield from (f"## {title} {{#{anchor}}}", "", node.get("description", ""), "")
    rows = list(_inside(node, ""))
    if not rows:
        yield from (_type(node), "")
        return
    yield from ("| field | type | | what it is |", "| --- | --- | --- | --- |")
    for row in rows:
        name = f"`{row.path}`" if row.path else ""
        yield f"| {name} | {row.type} | {'' if row.is_required else 'optional'} | {_cell(row.description)} |"
    yield ""


def _rows(node: Node, path: str, *, is_required: bool) -> Iterator[Row]:
    alternatives = node.get("anyOf") or node.get("oneOf")
    if alternatives:
        for one in alternatives:
            yield from _rows(one, path, is_required=is_required)
        return
    yield Row(path=path, type=_type(node), is_required=is_required, description=node.get("description", ""))
    yield from _inside(node, path)


def _inside(node: Node, path: str) -> Iterator[Row]:
    """Yield the fields of an object, the entries of an array, the alternatives of a choice."""
    required = node.get("required", ())
    prefix = f"{path}." if path else ""
    for name, child in node.get("properties", {}).items():
        yield from _rows(child, prefix + name, is_required=name in required)
    others = node.get("additionalProperties")
    if isinstance(others, Mapping):
        yield from _rows(others, f"{prefix}*", is_required=True)
    items = node.get("items", {})
    if items and "$ref" not in items:
        yield from _entries(items, f"{path}[]")
    if not path:
        for one in node.get("anyOf") or node.get("oneOf") or ():
            yield from _rows(one, "", is_required=True)


def _entries(items: Node, path: str) -> Iterator[Row]:
    if items.get("anyOf") or items.get("oneOf"):
        yield from _rows(items, path, is_required=True)
    else:
        yield from _inside(items, path)


def _type(node: Node) -> str:
    """Return a node's type, with the bounds of its values, as Markdown."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "enum" in node:
        return " or ".join(f"`{json.dumps(value, ensure_ascii=False)}`" for value in node["enum"])
    kinds = node.get("type", ())
    text = kinds if isinstance(kinds, str) else " or ".join(kinds)
    items = node.get("items", {})
    if text == "array" and items:
        text = f"array of {_type(items) or 'entries'}"
    bounds = [form.format(_value(node[key])) for key, form in _BOUNDS if key in node and not _is_absurd(node[key])]
    return _cell(", ".join(filter(None, (text, *bounds))))


def _is_absurd(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) > _ABSURD


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
