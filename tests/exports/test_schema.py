"""The published schema of plans: what it promised stays, and it is said what everything in it is."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from pase.planning.plan_file import plan_document, plan_schema
from tests.exports.plan_fields import fields, golden_fields
from tests.networks import small_plan

SCHEMA: dict[str, Any] = json.loads(plan_schema())


def test_nothing_that_was_promised_is_gone() -> None:
    lost = golden_fields() - fields(SCHEMA)
    assert not lost, f"readers of schema version 2 rely on these; they need a new version: {sorted(lost)}"


def test_what_is_new_is_promised_from_now_on() -> None:
    new = fields(SCHEMA) - golden_fields()
    assert not new, f"python -m tests.exports.plan_fields adds these: {sorted(new)}"


def _schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema and all within it."""
    yield schema
    for key in ("properties", "$defs"):
        for member in schema.get(key, {}).values():
            yield from _schemas(member)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _schemas(schema[key])
    for key in ("prefixItems", "anyOf", "oneOf"):
        for member in schema.get(key, ()):
            yield from _schemas(member)


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [
        (lambda schema: schema["$defs"]["LayerDocument"]["properties"].pop("splits"), True),
        (lambda schema: schema["$defs"]["LayerDocument"]["required"].remove("splits"), True),
        (lambda schema: schema["properties"]["total_cost"].update(type="string"), True),
        (lambda schema: schema["$defs"]["LayerDocument"]["properties"].update(added={"type": "number"}), False),
    ],
)
def test_a_change_that_breaks_readers_is_seen(change: Callable[[dict[str, Any]], Any], is_seen: bool) -> None:
    """A field that is gone, that need not be there, of another type; what is added breaks nothing."""
    changed = deepcopy(SCHEMA)
    change(changed)
    assert bool(golden_fields() - fields(changed)) == is_seen


def test_every_field_in_it_is_described() -> None:
    assert SCHEMA["$id"] == "urn:pase:plan:2"
    assert SCHEMA["title"]
    for schema in _schemas(SCHEMA):
        for name, field in schema.get("properties", {}).items():
            assert field.get("description"), (schema.get("title"), name)
    for name, definition in SCHEMA["$defs"].items():
        assert definition.get("title"), name
        assert definition.get("description"), name


def test_plans_hold_what_is_promised() -> None:
    document = json.loads(json.dumps(plan_document(small_plan("rnnlm", 4))))
    seen = 0
    for line in golden_fields():
        path, _, promise = line.partition(": ")
        # What is one of several things has a < in its path.
        if promise.startswith("always has ") and "<" not in path:
            found = _values(document, path)
            assert all(promise.removeprefix("always has ") in value for value in found), line
            seen += len(found)
    assert seen > 20 * len(document["layers"])


def _values(document: Any, path: str) -> list[Any]:
    """Return every value at a path such as layers[].dims.*."""
    if path == "the document":
        return [document]
    found = [document]
    for step in path.replace("[]", ".[]").split("."):
        if step == "[]":
            found = [item for value in found if isinstance(value, list) for item in value]
        elif step == "*":
            found = [item for value in found if isinstance(value, dict) for item in value.values()]
        else:
            found = [value[step] for value in found if isinstance(value, dict) and step in value]
    return found
