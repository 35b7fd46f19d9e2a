"""The fields of a schema as lines of text, one for each thing that a reader may rely on.

python -m tests.exports.plan_fields adds what is new to plan_fields.txt; nothing takes a line away from it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pase.planning.plan_file import plan_schema

GOLDEN = Path(__file__).with_name("plan_fields.txt")


def fields(schema: dict[str, Any]) -> set[str]:
    """Return what a schema promises: the type of every field, which fields are always there, values of a choice."""
    return set(_fields(schema, schema, ""))


def golden_fields() -> set[str]:
    """Return what was promised."""
    return set(GOLDEN.read_text(encoding="utf-8").splitlines())


def _fields(schema: dict[str, Any], root: dict[str, Any], path: str) -> Iterator[str]:
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    here = path or "the document"
    types = schema.get("type", [])
    for name in [types] if isinstance(types, str) else types:
        yield f"{here}: {name}"
    for value in [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]:
        yield f"{here}: {json.dumps(value)}"
    for name, member in schema.get("properties", {}).items():
        yield from _fields(member, root, f"{path}.{name}".lstrip("."))
    for name in schema.get("required", ()):
        yield f"{here}: always has {name}"
    for i, item in enumerate(schema.get("prefixItems", ())):
        yield from _fields(item, root, f"{path}[{i}]")
    if isinstance(schema.get("items"), dict):
        yield from _fields(schema["items"], root, f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _fields(schema["additionalProperties"], root, f"{path}.*")
    # What is null by default is left out of plans.
    is_left_out = schema.get("default", "") is None
    choices = [choice for choice in schema.get("anyOf", ()) if not is_left_out or choice != {"type": "null"}]
    if len(choices) == 1:
        yield from _fields(choices[0], root, path)
        return
    for choice in choices:
        yield from _fields(choice, root, f"{path}<{_name(choice, root)}>")


def _name(choice: dict[str, Any], root: dict[str, Any]) -> str:
    """Return what tells one of several things from the others."""
    while "$ref" in choice:
        choice = root["$defs"][choice["$ref"].rpartition("/")[2]]
    tags = [member["enum"][0] for member in choice.get("properties", {}).values() if len(member.get("enum", ())) == 1]
    return str(next(iter([*tags, *choice.get("required", ()), choice["type"]])))


if __name__ == "__main__":
    found = fields(json.loads(plan_schema())) | (golden_fields() if GOLDEN.exists() else set())
    GOLDEN.write_text("".join(f"{line}\n" for line in sorted(found)), encoding="utf-8")
