"""Codecs: what is declared once is read, written and told as JSON Schema alike."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pase.common.codecs import (
    FLAG,
    NULL,
    NUMBER,
    POSITIVE,
    SCALAR,
    TEXT,
    WHOLE,
    Codec,
    array,
    choice,
    constant,
    defined,
    json_schema,
    nullable,
    number,
    record,
    row,
    table,
    union,
    version,
    wholes,
    wrapped,
)
from pase.common.documents import Field
from pase.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value to write: places, and what is left out where it is the usual."""

    place: tuple[int, ...]
    weight: float = 1.0
    unit: str = ""
    scale: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """Another one."""

    radius: float


POINT = record(
    Point,
    kind=constant("point"),
    at=wholes().of("place"),
    weight=NUMBER.optional(1.0),
    unit=TEXT.optional(""),
    scale=WHOLE.optional(0, beside="unit"),
    size=WHOLE.derived(lambda point: len(point.place)),
)
CIRCLE = record(Circle, kind=constant("circle"), radius=number(above=0))
PAIR = row("a name and a number", TEXT, WHOLE)
SHAPE = union("shape", "one of point, circle", POINT, CIRCLE, tag="kind")


def _read(codec: Codec[Any], value: object) -> Any:
    return codec.read(Field(value, "", PlanError, "f"))


@pytest.mark.parametrize(
    ("value", "document"),
    [
        (Point(place=(1, 2)), {"kind": "point", "at": [1, 2], "size": 2}),
        (Point(place=(), weight=0.5), {"kind": "point", "at": [], "weight": 0.5, "size": 0}),
        (Point(place=(), unit="m"), {"kind": "point", "at": [], "unit": "m", "scale": 0, "size": 0}),
        (Circle(radius=2.0), {"kind": "circle", "radius": 2.0}),
    ],
)
def test_members_are_left_out_named_and_derived_as_declared(value: object, document: dict[str, Any]) -> None:
    assert SHAPE.write(value) == document
    assert list(SHAPE.write(value)) == list(document)
    assert _read(SHAPE, document) == value
    assert _read(SHAPE, document | {"later": 1}) == value


@pytest.mark.parametrize(
    ("codec", "value", "message"),
    [
        (SHAPE, {"kind": "square"}, "^f: kind is 'square'; expected one of point, circle$"),
        (SHAPE, {}, "^f: kind is missing$"),
        (SHAPE, [], r"^f: the document is an array; expected an object$"),
        (SHAPE, {"kind": "circle", "radius": 0}, "^f: radius is 0; expected a number above 0$"),
        (
            SHAPE,
            {"kind": "point", "at": [1, -1], "size": 2},
            r"^f: at\[1\] is -1; expected a whole number",
        ),
        (SHAPE, {"kind": "point", "at": [], "size": "2"}, "^f: size is '2'; expected a whole number"),
        (SHAPE, {"kind": "point", "at": [], "size": 0, "unit": None}, "^f: unit is None; expected text$"),
        (
            PAIR,
            ["x"],
            "^f: the document has 1 entries; expected a name and a number",
        ),
        (
            PAIR,
            ["x", "y"],
            r"^f: \[1\] is 'y'; expected a whole number of 0 or more",
        ),
        (table(POSITIVE), {"x": 0}, "^f: x is 0; expected a whole number of 1 or more$"),
        (array(FLAG), [True, 1], r"^f: \[1\] is 1; expected true or false$"),
        (choice(("a", "b")), "c", "^f: the document is 'c'; expected one of a, b$"),
        (choice(("a", "b")), ["a"], r"^f: the document is \['a'\]; expected one of a, b$"),
        (version(2), 3, "^f: the document is 3; this version of PaSE reads 2$"),
        (version(2, hint=lambda found: f": not {found}"), 3, "reads 2: not 3$"),
        (union("axis", "a name or null", TEXT, NULL), 1, "^f: the document is no axis; expected a name or null$"),
        (union("axis", "a name, or an object", TEXT, wrapped("part", WHOLE)), {"x": 1}, "is no axis; expected a name"),
        (wrapped("part", WHOLE), {"part": -1}, "^f: part is -1; expected a whole number of 0 or more$"),
        (nullable(NUMBER), "x", "^f: the document is 'x'; expected a number of 0 or more$"),
        (WHOLE, True, "^f: the document is True; expected a whole number of 0 or more$"),
        (SCALAR, None, "^f: the document is None; expected text, a number, or true or false$"),
    ],
)
def test_what_is_wrong_is_told_with_its_path(codec: Codec[Any], value: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _read(codec, value)


KINDS = [
    (TEXT, st.text()),
    (FLAG, st.booleans()),
    (WHOLE, st.integers(0, 2**63 - 1)),
    (NUMBER, st.floats(min_value=0, allow_infinity=False)),
    (nullable(WHOLE), st.none() | st.integers(0, 9)),
    (array(row("two", TEXT, POSITIVE)), st.lists(st.tuples(st.text(), st.integers(1, 9))).map(tuple)),
    (table(SCALAR), st.dictionaries(st.text(), st.text() | st.booleans() | st.integers(-9, 9))),
    (union("one", "any", NULL, TEXT, wholes()), st.none() | st.text() | st.lists(st.integers(0, 9)).map(tuple)),
]


@pytest.mark.parametrize(("codec", "values"), KINDS)
@given(data=st.data())
def test_values_come_back_from_text(codec: Codec[Any], values: st.SearchStrategy[Any], data: st.DataObject) -> None:
    value = data.draw(values)
    document = json.loads(json.dumps(codec.write(value)))
    found = _read(codec, document)
    assert found == value
    assert type(found) is type(value)


TEXTS = {
    "document": {"": "a list", "[]": "one of them"},
    "shape": {
        "": "a shape",
        "<point>": "a point",
        "<circle>": "a circle",
        "kind": "which",
        "radius": "its radius",
        "at": "where",
        "at[]": "along a dim",
        "weight": "its weight",
        "unit": "of it",
        "scale": "a power of ten",
        "size": "how many dims",
    },
}


def test_the_schema_is_of_the_same_declaration() -> None:
    shapes = array(defined("shape", "Shape", SHAPE), minItems=1)
    schema = json_schema(shapes, identifier="urn:x", title="Shapes", described=TEXTS)
    Draft202012Validator.check_schema(schema)
    point, circle = schema["$defs"]["shape"]["oneOf"]
    assert schema["items"] == {"$ref": "#/$defs/shape", "description": "one of them"}
    assert (schema["$id"], schema["title"], schema["$defs"]["shape"]["title"]) == ("urn:x", "Shapes", "Shape")
    assert point["required"] == ["kind", "at", "size"]
    assert circle["properties"]["radius"] == {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 1.7976931348623157e308,
        "description": "its radius",
    }
    assert (point["description"], circle["description"]) == ("a point", "a circle")
    assert point["properties"]["at"]["items"]["description"] == "along a dim"
    validator = Draft202012Validator(schema)
    right = [SHAPE.write(Point(place=(1,), unit="m")), SHAPE.write(Circle(radius=1.0))]
    assert validator.is_valid(right)
    for wrong in ([], [{}], [{"kind": "square"}], [right[0] | {"at": [-1]}], [right[1] | {"radius": 0}], {}):
        assert not validator.is_valid(wrong)
