"""Documents declared as structs: what is declared once is read, explained, written and described alike."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from msgspec import UNSET, Meta, UnsetType, field

from pase.common.documents import DocumentSource
from pase.common.structs import (
    AboveZero,
    Document,
    Finite,
    Integer,
    Number,
    Positive,
    Whole,
    choice,
    describes,
    json_schema,
    read,
    unknown_key,
)
from pase.errors import PlanError

SOURCE = DocumentSource(PlanError, "f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit, which is its own declaration."""

    name: str
    """Its name."""
    power: Whole = 1
    """Of ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    place: tuple[int, ...]
    weight: float = 1.0
    unit: Unit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    radius: float


@describes(Point)
class PointDocument(Document, tag_field="kind", tag="point"):
    """A point."""

    place: tuple[Whole, ...] = field(name="at")
    """Where it is, along
    each dim."""
    weight: Number = 1.0
    """Its weight."""
    unit: Unit | UnsetType = UNSET
    """Of its places."""


@describes(Circle)
class CircleDocument(Document, tag_field="kind", tag="circle"):
    """A circle."""

    radius: AboveZero
    """Its radius."""


class DrawingDocument(Document, kw_only=True):
    """A drawing."""

    schema_version: Literal[1, 2]
    """Of the format."""
    shapes: Annotated[tuple[PointDocument | CircleDocument, ...], Meta(min_length=1)]
    """What is drawn."""
    layers: dict[str, dict[str, Positive]] = field(default_factory=dict)
    """Numbers by name."""
    pair: Annotated[tuple[str, Whole], Meta(title="a name and a number")] = ("", 0)
    """A pair."""
    style: Annotated[str, choice(("a.b", "c"))] = "c"
    """Its style."""
    value: Annotated[str | Integer | Finite | bool, Meta(title="text, a number, or true or false")] = ""  # type: ignore[assignment]
    """Any value."""


class ClosedDocument(Document, forbid_unknown_fields=True):
    """An object with nothing else."""

    width: Whole = 0
    """Its width."""
    height: Whole = 0
    """Its height."""


POINT, CIRCLE = {"kind": "point", "at": [1, 2]}, {"kind": "circle", "radius": 2.0}
DRAWING: dict[str, Any] = {"schema_version": 2, "shapes": [POINT, CIRCLE]}


@pytest.mark.parametrize(
    ("value", "document"),
    [
        (Point(place=(1, 2)), POINT),
        (Point(place=(), weight=0.5), {"kind": "point", "at": [], "weight": 0.5}),
        (Point(place=(), unit=Unit(name="m")), {"kind": "point", "at": [], "unit": {"name": "m"}}),
        (
            Point(place=(), unit=Unit(name="m", power=3)),
            {"kind": "point", "at": [], "unit": {"name": "m", "power": 3}},
        ),
    ],
)
def test_values_come_back_and_defaults_are_left_out(value: Point, document: dict[str, Any]) -> None:
    assert PointDocument.of(value).builtins() == document
    for given_as in (document, document | {"later": 1}, json.dumps(document).encode()):
        assert read(PointDocument, given_as, SOURCE).value() == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 3}, "schema_version is 3; this version of PaSE reads 2"),
        ({"schema_version": 3, "shapes": 1}, "schema_version is 3; this version of PaSE reads 2"),
        ({"shapes": []}, "shapes is empty; expected an array of 1 or more"),
        ({"shapes": {}}, "shapes is an object; expected an array of 1 or more"),
        ({"shapes": [{"kind": "square"}]}, r"shapes\[0\].kind is 'square'; expected one of point, circle"),
        ({"shapes": [POINT, {}]}, r"shapes\[1\].kind is missing"),
        ({"shapes": [CIRCLE | {"radius": 0}]}, r"shapes\[0\].radius is 0; expected a number above 0"),
        ({"shapes": [CIRCLE | {"radius": float("inf")}]}, r"shapes\[0\].radius is inf; expected a number above 0"),
        ({"shapes": [POINT | {"at": [1, -1]}]}, r"shapes\[0\].at\[1\] is -1; expected a whole number of 0 or more"),
        (
            {"shapes": [POINT | {"at": [2**63]}]},
            rf"shapes\[0\].at\[0\] is {2**63}; expected a whole number of at most {2**63 - 1}",
        ),
        ({"shapes": [POINT | {"weight": None}]}, r"shapes\[0\].weight is None; expected a number of 0 or more"),
        ({"shapes": [POINT | {"weight": 10**400}]}, r"shapes\[0\].weight is .* bits; expected a number of 0 or more"),
        ({"shapes": [POINT | {"unit": {"power": 1}}]}, r"shapes\[0\].unit.name is missing"),
        ({"pair": ["x"]}, "pair has 1 entries; expected a name and a number"),
        ({"pair": ["x", "y"]}, r"pair\[1\] is 'y'; expected a whole number of 0 or more"),
        ({"style": "axb"}, "style is 'axb'; expected one of a.b, c"),
        ({"value": None}, "value is None; expected text, a number, or true or false"),
        ({"value": float("nan")}, "value is nan; expected text, a number, or true or false"),
        ({"layers": {"x": 1}}, "layers.x is 1; expected an object"),
    ],
)
def test_what_is_wrong_is_told_with_its_path(change: dict[str, Any], message: str) -> None:
    document = DRAWING | change
    for given_as in (document, json.dumps(document).encode()):
        with pytest.raises(PlanError, match=f"^f: {message}$"):
            read(DrawingDocument, given_as, SOURCE)


@given(st.dictionaries(st.text(), st.dictionaries(st.text(), st.integers(1, 9), min_size=1), min_size=1), st.data())
def test_the_key_of_a_table_is_found_that_msgspec_does_not_tell(
    layers: dict[str, dict[str, int]], data: st.DataObject
) -> None:
    outer = data.draw(st.sampled_from(sorted(layers)))
    inner = data.draw(st.sampled_from(sorted(layers[outer])))
    layers[outer][inner] = 0
    with pytest.raises(PlanError, match="expected a whole number of 1 or more") as found:
        read(DrawingDocument, DRAWING | {"layers": layers}, SOURCE)
    assert str(found.value).startswith(str(PlanError(f"f: layers.{outer}.{inner} is 0;")))


@pytest.mark.parametrize("key", ["widht", "x", "x` - at `$.width", "x` - at `$.a[...].b[0]", "x` - at `$[3]"])
def test_unknown_keys_are_refused_whatever_they_are_called(key: str) -> None:
    with pytest.raises(PlanError, match=r"^f: ") as found:
        read(ClosedDocument, {key: 1}, SOURCE)
    if key == "widht":
        assert str(found.value) == "f: widht is not a key here; did you mean width?"
    with pytest.raises(PlanError, match=r"^f: .* is not a key of a drawing; "):
        read(
            DrawingDocument,
            DRAWING | {"layers": {"any": {}}, key: 1},
            SOURCE,
            unknown=lambda name, known: unknown_key(name, known, "of a drawing"),
        )


def test_bytes_that_are_no_json_are_not_taken_for_documents() -> None:
    for raw in (b"", b"{", b"[" * 100_000, b"\xff", b'{"schema_version": ' + b"9" * 5000):
        with pytest.raises((ValueError, RecursionError), match=r"."):
            read(DrawingDocument, raw, SOURCE)


def test_the_schema_is_of_the_same_declaration() -> None:
    schema = json.loads(json_schema(DrawingDocument, identifier="urn:x", title="Drawing"))
    Draft202012Validator.check_schema(schema)
    assert (schema["$id"], schema["title"], schema["description"]) == ("urn:x", "Drawing", "A drawing.")
    assert schema["required"] == ["schema_version", "shapes"]
    point = schema["$defs"]["PointDocument"]["properties"]
    assert point["at"]["description"] == "Where it is, along each dim."
    assert schema["$defs"]["Unit"]["properties"]["power"]["description"] == "Of ten."
    validator = Draft202012Validator(schema)
    assert validator.is_valid(DRAWING | {"later": 1})
    for wrong in ({"schema_version": 3}, {"shapes": []}, {"style": "axb"}, {"layers": {"x": {"y": 0}}}):
        assert not validator.is_valid(DRAWING | wrong)
    closed = json.loads(json_schema(DrawingDocument, identifier="urn:x", title="Drawing", is_closed=True))
    assert not Draft202012Validator(closed).is_valid(DRAWING | {"later": 1})
