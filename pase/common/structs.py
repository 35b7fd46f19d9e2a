"""`Document`: a file format declared once as a `msgspec.Struct`, used for reading, checks, writing and JSON Schema."""

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, reduce
from itertools import pairwise
from math import inf, isclose
from sys import float_info
from types import MappingProxyType
from typing import Annotated, Any, Self, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Struct

from pase.common.containers import FrozenDict
from pase.common.documents import LARGEST_INTEGER, DocumentSource, shown

T = TypeVar("T")
D = TypeVar("D", bound="Document")

VERSION = "schema_version"
"""Field that gives the version of a document's format; described values do not have it."""

Schema = dict[str, Any]
Steps = tuple[str | int, ...]
"""Path to a value in a document: keys of objects and positions in arrays."""

Whole = Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST_INTEGER)]
Number = Annotated[float, Meta(ge=0, le=float_info.max)]
AboveZero = Annotated[float, Meta(gt=0, le=float_info.max)]
Integer = Annotated[int, Meta(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)]
Finite = Annotated[float, Meta(ge=-float_info.max, le=float_info.max)]
Scalar = Annotated[str | Integer | Finite | bool, Meta(title="text, a number, or true or false")]
Scalars = dict[str, Scalar]


def choice(names: Iterable[str]) -> Meta:
    """Return the constraint that a text is one of some names."""
    known = list(names)
    return Meta(pattern=f"^(?:{'|'.join(map(re.escape, known))})$", extra_json_schema={"enum": known})


class Document(Struct, kw_only=True, omit_defaults=True, gc=False):
    """An object in a document: its fields, their bounds and, as docstrings, their descriptions.

    Fields are named after the attributes of the described value; a field that is UNSET by default corresponds to an
    attribute that may be None. `describes` links it to the class of the values.
    """

    @classmethod
    def of(cls, value: Any, **others: Any) -> Self:
        """Return the document of a value, with `others` replacing some of its attributes."""
        for name, default in _fields(cls):
            if name not in others:
                member = getattr(value, name)
                # Fields with default values are omitted; msgspec would compare identities.
                if member is not default and member != default and not (member is None and default is UNSET):
                    others[name] = document_of(member)
        return cls(**others)

    def value(self, **others: Any) -> Any:
        """Return the value that the document describes, with `others` replacing some of its fields."""
        for name in _made_of(type(self)):
            if name not in others:
                member = getattr(self, name)
                if type(member) not in _PLAIN:
                    member = value_of(member)
                if member is not UNSET:
                    others[name] = member
        return _VALUES[type(self)](**others)

    def builtins(self) -> dict[str, Any]:
        """Return the document as dicts and lists of plain values."""
        document: dict[str, Any] = _with_lists(msgspec.to_builtins(self, enc_hook=lambda number: number.item()))
        return document


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(member) for key, member in value.items()}
    if isinstance(value, tuple):
        return [*value] if _SCALARS.issuperset(map(type, value)) else [_with_lists(member) for member in value]
    return value


_SCALARS = frozenset({str, int, float, bool, type(None)})
_PLAIN = _SCALARS | {dict, FrozenDict}
"""Classes of values that are written unchanged."""

_DOCUMENTS: dict[type, type[Document]] = {}
"""The document class of each class of values."""

_VALUES: dict[type, Any] = {}
"""All classes of values that documents describe."""


def describes(kind: type) -> Callable[[type[D]], type[D]]:
    """Return a decorator that links a document class to the class of values that it describes."""

    def register(document: type[D]) -> type[D]:
        _DOCUMENTS[kind], _VALUES[document] = document, kind
        return document

    return register


def document_of(value: Any) -> Any:
    """Return the document of a value, or of each item of a collection; plain values are returned unchanged."""
    if type(value) in _PLAIN or isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return value if _PLAIN.issuperset(map(type, value)) else tuple(map(document_of, value))
    kind = _DOCUMENTS.get(type(value))
    if kind:
        return kind.of(value)
    return fields_of(value) if dataclasses.is_dataclass(value) else value


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a self-describing dataclass, without those that have their default value."""
    members = {name: (getattr(value, name), default) for name, default in _fields(cast(Any, type(value)))}
    return {name: document_of(member) for name, (member, default) in members.items() if member != default}


def value_of(document: Any) -> Any:
    """Return the value that a document describes, or each of several; anything else is returned unchanged."""
    if type(document) in _PLAIN:
        return document
    if isinstance(document, tuple):
        return document if _PLAIN.issuperset(map(type, document)) else tuple(map(value_of, document))
    return document.value() if isinstance(document, Document) else document


@cache
def _made_of(document: type[Document]) -> tuple[str, ...]:
    """Return the fields of a document class that are passed to the constructor of the described value."""
    made_with = {name for name, _ in _fields(_VALUES[document])} - {VERSION}
    return tuple(name for name, _ in _fields(document) if name in made_with)


@cache
def _fields(kind: type[Any]) -> tuple[tuple[str, object], ...]:
    """Return the fields of a class with their defaults."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else msgspec.structs.fields(kind)
    return tuple((field.name, field.default) for field in fields)


# -- reading


def read(
    kind: type[T],
    document: object,
    source: DocumentSource,
    *,
    hint: Callable[[str, object], str] = lambda *_: "",
    unknown: Callable[[str, Sequence[str]], str] | None = None,
) -> T:
    """Validate a document against its declaration and return it.

    Args:
        kind: Class of the document.
        document: Its value, of dicts and lists; or JSON as bytes.
        source: Where it comes from, for messages.
        hint: Returns an addition to a message, given the path of the offending value and the value.
        unknown: Returns the message for an undeclared key, given it and the declared ones; None to ignore such keys.

    Raises:
        PaseError: The source's error, for values that do not match the declaration, with their path.
        ValueError, RecursionError: The bytes are not JSON.
    """
    if isinstance(document, bytes):
        try:
            return msgspec.json.decode(document, type=kind)
        except (ValueError, RecursionError):
            # Python also accepts surrogates and special numbers such as NaN; otherwise its error says what is wrong.
            document = json.loads(document.decode())
    if unknown is not None:
        _refuse_unknown_keys(_schema(cast(Any, kind)), document, source, unknown)
    try:
        return msgspec.convert(document, kind)
    except UnicodeEncodeError:
        raise source.fail("", "has text with surrogates where names are expected") from None
    except msgspec.ValidationError as error:
        steps, problem, value = _explained(kind, document, str(error))
    path = path_text(steps)
    raise source.fail(path, f"{problem}{hint(path, value)}")


def path_text(steps: Steps) -> str:
    """Return a path as messages show it: "layers[0].splits.b"."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


_STEP = re.compile(r"\.(\w+)|\[(?:(\d+)|\.\.\.)\]")
_MISSING = re.compile("Object missing required field `(.*)`")
_UNKNOWN = re.compile("Object contains unknown field `(.*)`", re.DOTALL)
_OWN = re.compile("Expected |Invalid |Number out of range|Integer value out of range")
"""Prefixes of msgspec's own messages; other messages come from checks of the documents themselves."""


def _explained(kind: type[Any], document: object, error: str) -> tuple[Steps, str, object]:
    """Return the path at which a document does not match its declaration, the problem, and the value there."""
    if isinstance(document, dict) and VERSION in document:
        # A document of another version may differ in anything else, so the version is checked first.
        choices = _inner(_schema(cast(Any, kind)), VERSION).get("enum", ())
        if choices and document[VERSION] not in choices:
            error = f"Invalid version - at `$.{VERSION}`"
    text, mark, where = error.rpartition(" - at `")
    if not mark:
        text, where = error, ""
    try:
        steps = _steps(kind, document, where)
        value = _at(document, steps)
    except (LookupError, TypeError):
        # An undeclared key may look like a path.
        text, steps, value = error, (), document
    schema = reduce(_inner, steps, _schema(cast(Any, kind)))
    unknown = _UNKNOWN.match(text)
    if unknown:
        return (*steps, unknown[1]), unknown_key(unknown[1], _keys(schema), "here"), None
    missing = _MISSING.match(text)
    if missing:
        return (*steps, missing[1]), "is missing", None
    if not _OWN.match(text):
        return steps, text, value
    if steps[-1:] == (VERSION,):
        return steps, f"is {shown(value)}; this version of PaSE reads {max(schema['enum'])}", value
    what = f"is {shown(value)}"
    if isinstance(value, dict | list) and " of length " in text:
        what = f"has {len(value)} entries" if value else "is empty"
    return steps, f"{what}; expected {_expected(schema, value)}", value


def _steps(kind: type[Any], document: Any, where: str) -> Steps:
    """Return the path in an error of msgspec, completed with the keys of tables, which msgspec omits."""
    steps: Steps = ()
    for found in _STEP.finditer(where):
        name, position = found.groups()
        if name or position:
            steps = (*steps, name or int(position))
        else:
            document = _with_first_failing(kind, document, steps, where[: found.end()])
            (key,) = _at(document, steps)
            steps = (*steps, key)
    return steps


def _with_first_failing(kind: type[Any], document: Any, steps: Steps, where: str) -> Any:
    """Return a document with only the member of a table that fails validation, at a path given by msgspec."""
    table = _at(document, steps)
    keys = [*table]
    while len(keys) > 1:
        half = keys[: len(keys) // 2]
        try:
            msgspec.convert(_with(document, steps, {key: table[key] for key in half}), kind)
            fails = False
        except msgspec.ValidationError as error:
            fails = f" - at `{where}" in str(error)
        keys = half if fails else keys[len(half) :]
    return _with(document, steps, {key: table[key] for key in keys})


def _at(value: Any, steps: Steps) -> Any:
    for step in steps:
        value = value[step]
    return value


def _with(value: Any, steps: Steps, member: object) -> Any:
    """Return a copy of a document with another value at a path."""
    if not steps:
        return member
    changed = value.copy()
    changed[steps[0]] = _with(value[steps[0]], steps[1:], member)
    return changed


def _refuse_unknown_keys(
    schema: Schema,
    value: object,
    source: DocumentSource,
    unknown: Callable[[str, Sequence[str]], str],
    steps: Steps = (),
) -> None:
    """Raise the source's error for an undeclared key; values of a wrong type are skipped."""
    if isinstance(value, dict):
        known = _keys(schema)
        for key, member in value.items():
            path = (*steps, key)
            if known and key not in known:
                raise source.fail(path_text(path), unknown(key, known))
            _refuse_unknown_keys(_inner(schema, key), member, source, unknown, path)
    elif isinstance(value, list):
        for position, member in enumerate(value):
            _refuse_unknown_keys(_inner(schema, position), member, source, unknown, (*steps, position))


def difference(given: Any, expected: Any, tolerance: float) -> tuple[str, object, object] | None:
    """Return the first path at which two documents differ, and both values there; None if they are equal.

    Args:
        given: A document, or a part of one.
        expected: Another one of the same kind.
        tolerance: Relative tolerance of numbers; other values must be equal.
    """
    members: list[tuple[str, Any, Any]]
    if isinstance(given, Struct) and type(given) is type(expected):
        names = zip(given.__struct_fields__, given.__struct_encode_fields__, strict=True)
        members = [(f".{key}", getattr(given, name), getattr(expected, name)) for name, key in names]
    elif isinstance(given, dict) and isinstance(expected, dict) and list(given) == list(expected):
        members = [(f".{key}", member, expected[key]) for key, member in given.items()]
    elif isinstance(given, tuple) and isinstance(expected, tuple) and len(given) == len(expected):
        members = [(f"[{i}]", *pair) for i, pair in enumerate(zip(given, expected, strict=True))]
    elif isinstance(given, float) and isinstance(expected, int | float):
        return None if isclose(given, expected, rel_tol=tolerance) else ("", given, expected)
    else:
        # Compare as text, because 1, 1.0 and true are equal in Python.
        return None if repr(given) == repr(expected) else ("", given, expected)
    for step, one, other in members:
        found = difference(one, other, tolerance)
        if found is not None:
            return (f"{step}{found[0]}", *found[1:])
    return None


# -- expected values in words, taken from the JSON Schema


@cache
def _schema(kind: type[Any]) -> Schema:
    """Return the JSON Schema of a class, with all definitions in every part."""
    (schema,), definitions = msgspec.json.schema_components((kind,))
    return _with_definitions(schema, definitions)


def _with_definitions(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    return {**schema, "$defs": definitions}


def _choices(schema: Schema) -> Iterator[Schema]:
    """Yield the alternative schemas, with references resolved."""
    definitions = schema.get("$defs", {})
    if "$ref" in schema:
        yield from _choices(_with_definitions(definitions[schema["$ref"].rpartition("/")[2]], definitions))
    elif "anyOf" in schema:
        for choice in schema["anyOf"]:
            yield from _choices(_with_definitions(choice, definitions))
    else:
        yield schema


def _inner(schema: Schema, step: str | int) -> Schema:
    """Return the schema of a member of an object or an entry of an array; an empty one if it is undeclared."""
    found: Schema = {}
    for choice in _choices(schema):
        if isinstance(step, str):
            inner = choice.get("properties", {}).get(step) or choice.get("additionalProperties")
        else:
            inner = dict(enumerate(choice.get("prefixItems", ()))).get(step) or choice.get("items")
        if inner:
            # Several kinds of objects share one tag field.
            names = [*found.get("enum", ()), *inner.get("enum", ())]
            found = _with_definitions(inner | ({"enum": names} if names else {}), choice["$defs"])
    return found


def _keys(schema: Schema) -> list[str]:
    return [key for choice in _choices(schema) for key in choice.get("properties", ())]


def _expected(schema: Schema, value: object) -> str:
    """Describe in words what a schema expects in place of a value."""
    if "title" in schema:
        title: str = schema["title"]
        return title
    return " or ".join(dict.fromkeys(_words(choice, value) for choice in _choices(schema)))


def _words(schema: Schema, value: object) -> str:
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    match schema.get("type"):
        case "integer" if isinstance(value, int) and value > schema.get("maximum", value):
            return f"a whole number of at most {schema['maximum']}"
        case "integer":
            return f"a whole number of {schema['minimum']} or more"
        case "number" if "exclusiveMinimum" in schema:
            return f"a number above {schema['exclusiveMinimum']}"
        case "number" if schema.get("maximum", inf) < float_info.max:
            return f"a number from {schema['minimum']} to {schema['maximum']}"
        case "number":
            return "a number of 0 or more" if schema.get("minimum") == 0 else "a number"
        case "string":
            return f"text such as {schema['pattern']}" if "pattern" in schema else "text"
        case "boolean":
            return "true or false"
        case "array":
            return f"an array of {schema['minItems']} or more" if schema.get("minItems") else "an array"
        case "object":
            return f"an object of {schema['minProperties']} or more" if schema.get("minProperties") else "an object"
    return "null"


def unknown_key(key: str, known: Sequence[str], of: str, units: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the message for an undeclared key, with the nearest declared one.

    Args:
        key: The undeclared key.
        known: The declared keys.
        of: Where the key does not belong: "here", "of a machine file".
        units: Unit to mention for some keys.
    """
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    unit = f" ({units[near[0]]})" if near and near[0] in units else ""
    suggestion = f"did you mean {near[0]}{unit}?" if near else f"known here are {', '.join(known)}"
    return f"is not a key {of}; {suggestion}"


# -- JSON Schema


def json_schema(kind: type[Document], *, identifier: str, title: str, is_closed: bool = False) -> str:
    """Return the JSON Schema of a document, draft 2020-12, as text.

    Args:
        kind: Class of the document.
        identifier: Identifier of the schema.
        title: Title of the document.
        is_closed: Whether objects may have declared members only.
    """
    _, definitions = msgspec.json.schema_components((kind,), ref_template="#/$defs/{name}")
    for declared in set(_classes(msgspec.inspect.type_info(kind))):
        schema = definitions[declared.__name__]
        schema["description"] = " ".join(schema["description"].split())
        if "properties" not in schema:
            continue
        texts = _field_docstrings(declared)
        for name, member in schema["properties"].items():
            if name in texts:
                member.setdefault("description", texts[name])
        if is_closed:
            schema["additionalProperties"] = False
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": identifier,
        **definitions.pop(kind.__name__),
        "title": title,
        "$defs": definitions,
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _classes(part: object) -> Iterator[type[Any]]:
    """Yield all classes in a type annotation."""
    if isinstance(part, tuple):
        for member in part:
            yield from _classes(member)
    elif isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
        if isinstance(part, msgspec.inspect.StructType | msgspec.inspect.DataclassType | msgspec.inspect.EnumType):
            yield part.cls
        for name in part.__struct_fields__:
            yield from _classes(getattr(part, name))


def _field_docstrings(kind: type[Any]) -> dict[str, str]:
    """Return the docstrings of fields by their names in documents."""
    fields = msgspec.structs.fields(kind) if issubclass(kind, Struct) else ()
    encoded = {field.name: field.encode_name for field in fields}
    tag = kind.__struct_config__.tag_field if issubclass(kind, Struct) else None
    texts = {tag: "Which kind of object this is."} if tag else {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base) or (issubclass(base, Document) and base is not Document):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            for field, text in pairwise(definition.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(found))):
                        texts[encoded.get(name, name)] = inspect.cleandoc(found).replace("\n", " ")
    return texts
