"""`Document`: what a document holds, declared once as a `msgspec.Struct`: reading, checks, writing, JSON Schema."""

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
"""The field of a document that tells the version of its format; what it describes has none."""

Schema = dict[str, Any]
Steps = tuple[str | int, ...]
"""Where a value stands: keys of objects and positions in arrays."""

Whole = Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST_INTEGER)]
Number = Annotated[float, Meta(ge=0, le=float_info.max)]
AboveZero = Annotated[float, Meta(gt=0, le=float_info.max)]
Integer = Annotated[int, Meta(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)]
Finite = Annotated[float, Meta(ge=-float_info.max, le=float_info.max)]
Scalar = Annotated[str | Integer | Finite | bool, Meta(title="text, a number, or true or false")]
Scalars = dict[str, Scalar]


def choice(names: Iterable[str]) -> Meta:
    """Return what allows a text to be one of some names only."""
    known = list(names)
    return Meta(pattern=f"^(?:{'|'.join(map(re.escape, known))})$", extra_json_schema={"enum": known})


class Document(Struct, kw_only=True, omit_defaults=True):
    """An object in a document: its fields, their bounds and, as docstrings, what they are.

    Fields have the names of the attributes that they are; one that is UNSET by default is an attribute that may be
    None. The class of the values that it describes is named by `describes`.
    """

    @classmethod
    def of(cls, value: Any, **others: Any) -> Self:
        """Return the document of a value, with these others in place of some of its attributes."""
        for name, default in _fields(cls):
            if name not in others:
                member = getattr(value, name)
                # What has its default is left out; msgspec would compare identities.
                if member is not default and member != default and not (member is None and default is UNSET):
                    others[name] = document_of(member)
        return cls(**others)

    def value(self, **others: Any) -> Any:
        """Return the value that it describes, made with these others in place of some of its fields."""
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
"""Classes of values that are their own documents."""

_DOCUMENTS: dict[type, type[Document]] = {}
"""Documents by the class of the values that they describe."""

_VALUES: dict[type, Any] = {}
"""The classes of values that documents describe."""


def describes(kind: type) -> Callable[[type[D]], type[D]]:
    """Return what has a class of documents describe values of a class, which are made with its fields."""

    def register(document: type[D]) -> type[D]:
        _DOCUMENTS[kind], _VALUES[document] = document, kind
        return document

    return register


def document_of(value: Any) -> Any:
    """Return the document of a value, or of each of several; that of a plain value is the value itself."""
    if type(value) in _PLAIN or isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return value if _PLAIN.issuperset(map(type, value)) else tuple(map(document_of, value))
    kind = _DOCUMENTS.get(type(value))
    if kind:
        return kind.of(value)
    return fields_of(value) if dataclasses.is_dataclass(value) else value


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that is its own declaration, without those that have their defaults."""
    members = {name: (getattr(value, name), default) for name, default in _fields(cast(Any, type(value)))}
    return {name: document_of(member) for name, (member, default) in members.items() if member != default}


def value_of(document: Any) -> Any:
    """Return the value that a document describes, or each of several; what is none is its own."""
    if type(document) in _PLAIN:
        return document
    if isinstance(document, tuple):
        return document if _PLAIN.issuperset(map(type, document)) else tuple(map(value_of, document))
    return document.value() if isinstance(document, Document) else document


@cache
def _made_of(document: type[Document]) -> tuple[str, ...]:
    """Return the fields of a class of documents that the values which they describe are made with."""
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
    """Return a document as it is declared.

    Args:
        kind: Class of the document.
        document: Its value, of dicts and lists; or JSON as bytes.
        source: Where it comes from, for messages.
        hint: What to add to a message, given the path of what is wrong and its value.
        unknown: What to say of a key that is not declared, given it and those that are; None to pass over such keys.

    Raises:
        PaseError: The source's, for what is not as declared, by its path.
        ValueError, RecursionError: The bytes are not JSON.
    """
    if isinstance(document, bytes):
        try:
            return msgspec.json.decode(document, type=kind)
        except (ValueError, RecursionError):
            # Python takes some texts besides, with surrogates and with numbers that are none; else it says why not.
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
    """Return where a value stands as messages write it: "layers[0].splits.b"."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


_STEP = re.compile(r"\.(\w+)|\[(?:(\d+)|\.\.\.)\]")
_MISSING = re.compile("Object missing required field `(.*)`")
_UNKNOWN = re.compile("Object contains unknown field `(.*)`", re.DOTALL)
_OWN = re.compile("Expected |Invalid |Number out of range|Integer value out of range")
"""What messages of msgspec begin with; others are those of checks that documents have themselves."""


def _explained(kind: type[Any], document: object, error: str) -> tuple[Steps, str, object]:
    """Return where a document is not as declared, what is wrong there, and the value there."""
    if isinstance(document, dict) and VERSION in document:
        # Documents of other versions may be wrong in anything else.
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
        # A key that is not declared and looks like a path.
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
    """Return the path in an error of msgspec, with the keys of tables, which it does not name."""
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
    """Return a document with the one member of a table alone in which it fails, at a path that msgspec gives."""
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
    """Return a copy of a document with another member at a place."""
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
    """Raise the source's error for a key that is not declared; what has a wrong type is passed over."""
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
    """Return where a document first differs from another one, by its path, and what both have there; None if nowhere.

    Args:
        given: A document, or a part of one.
        expected: One of the same kind.
        tolerance: Relative to a number; other values must be the same.
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
        # As text, because 1, 1.0 and true are equal.
        return None if repr(given) == repr(expected) else ("", given, expected)
    for step, one, other in members:
        found = difference(one, other, tolerance)
        if found is not None:
            return (f"{step}{found[0]}", *found[1:])
    return None


# -- what is expected, as the JSON Schema has it


@cache
def _schema(kind: type[Any]) -> Schema:
    """Return the JSON Schema of a class, of which every part has all definitions."""
    (schema,), definitions = msgspec.json.schema_components((kind,))
    return _with_definitions(schema, definitions)


def _with_definitions(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    return {**schema, "$defs": definitions}


def _choices(schema: Schema) -> Iterator[Schema]:
    """Yield the schemas of which a value fits one, without references."""
    definitions = schema.get("$defs", {})
    if "$ref" in schema:
        yield from _choices(_with_definitions(definitions[schema["$ref"].rpartition("/")[2]], definitions))
    elif "anyOf" in schema:
        for choice in schema["anyOf"]:
            yield from _choices(_with_definitions(choice, definitions))
    else:
        yield schema


def _inner(schema: Schema, step: str | int) -> Schema:
    """Return the schema of a member of an object, or of an entry of an array; an empty one where there is none."""
    found: Schema = {}
    for choice in _choices(schema):
        if isinstance(step, str):
            inner = choice.get("properties", {}).get(step) or choice.get("additionalProperties")
        else:
            inner = dict(enumerate(choice.get("prefixItems", ()))).get(step) or choice.get("items")
        if inner:
            # Tags of several kinds of objects are told together.
            names = [*found.get("enum", ()), *inner.get("enum", ())]
            found = _with_definitions(inner | ({"enum": names} if names else {}), choice["$defs"])
    return found


def _keys(schema: Schema) -> list[str]:
    return [key for choice in _choices(schema) for key in choice.get("properties", ())]


def _expected(schema: Schema, value: object) -> str:
    """Return in words what a schema expects in place of a value."""
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
    """Return what is wrong with a key that is not declared, with the nearest one that is.

    Args:
        key: What may be meant.
        known: The keys that are declared.
        of: Where it is not a key: "here", "of a machine file".
        units: What to say of some keys.
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
        identifier: Of the schema.
        title: Of the document.
        is_closed: Whether objects have no other members than those that are declared.
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
    """Yield the classes that a type is made of."""
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
