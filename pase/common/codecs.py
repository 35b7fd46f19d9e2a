"""`Codec`: what a document holds, declared once: how it is read and checked, how it is written, its JSON Schema."""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from operator import attrgetter
from sys import float_info
from types import NoneType
from typing import Any, Generic, TypeVar, cast

from pase.common.documents import LARGEST_INTEGER, Field

T = TypeVar("T")
S = TypeVar("S")
Schema = Mapping[str, Any]

_REQUIRED = object()
"""The default of a member that is never left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec(Generic[T]):
    """A kind of value in documents.

    read: returns the value of a field, or raises the document's error. write: returns its JSON form. schema: its JSON
    Schema, without descriptions; definitions: the schemas that it refers to, by name. kind: the class of its values;
    fits: whether a part of a document can be one of them. members: of an object, by key; entries: of an array.

    As a member of an object: source: the attribute of the object's value that it is, "" for one of the member's key,
    or a function of the value. is_argument: whether the object's value is made with it, or it follows from the rest.
    default: what it is where it is left out; beside: the attribute beside which it is there, whatever it is.
    """

    read: Callable[[Field], T]
    write: Callable[[T], Any] = lambda value: value
    schema: Schema = field(default_factory=dict)
    definitions: Mapping[str, Schema] = field(default_factory=dict)
    kind: type = object
    fits: Callable[[Any], bool] = lambda _: True
    members: Mapping[str, "Codec[Any]"] = field(default_factory=dict)
    entries: "Codec[Any] | None" = None
    source: str | Callable[[Any], Any] = ""
    is_argument: bool = True
    default: Any = _REQUIRED
    beside: str = ""

    def optional(self, default: Any, *, beside: str = "") -> "Codec[T]":
        """Return the codec of a member that is left out where it, or the one beside it, has its default."""
        return replace(self, default=default, beside=beside)

    def of(self, attribute: str) -> "Codec[T]":
        """Return the codec of a member that is an attribute of another name."""
        return replace(self, source=attribute)

    def derived(self, source: str | Callable[[Any], Any]) -> "Codec[T]":
        """Return the codec of a member that is read and checked, but follows from others."""
        return replace(self, source=source, is_argument=False)

    def checked(self, check: Callable[[T, Field], T]) -> "Codec[T]":
        """Return the codec of values that pass a check, which is given the field, too."""
        read = self.read
        return replace(self, read=lambda document: check(read(document), document))

    def mapped(self, make: Callable[[T], S], take: Callable[[S], T]) -> "Codec[S]":
        """Return the codec of values that are made of these."""
        read, write, this = self.read, self.write, cast(Any, self)
        changed: Codec[S] = replace(this, read=lambda found: make(read(found)), write=lambda value: write(take(value)))
        return changed


# -- single values


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def text(**schema: Any) -> Codec[str]:
    """Return the codec of text; schema: what else its JSON Schema says."""
    return Codec(read=Field.text, schema={"type": "string"} | schema, kind=str, fits=_is(str))


def whole(minimum: int = 0) -> Codec[int]:
    """Return the codec of whole numbers that are not below the minimum."""
    schema = {"type": "integer", "minimum": minimum, "maximum": LARGEST_INTEGER}
    return Codec(read=lambda document: document.integer(minimum), schema=schema, kind=int, fits=_is(int))


def number(*, above: float | None = None, **schema: Any) -> Codec[float]:
    """Return the codec of finite numbers of 0 or more, or above one."""
    bounds = {"minimum": 0} if above is None else {"exclusiveMinimum": above}
    return Codec(
        read=lambda document: document.number() if above is None else document.number(above=above),
        schema={"type": "number"} | bounds | {"maximum": float_info.max} | schema,
    )


def choice(of: Iterable[str], make: type[Any] = str) -> Codec[Any]:
    """Return the codec of one of these texts; make: of it, the value."""

    known = list(map(str, of))

    def read(document: Field) -> Any:
        if document.value not in known:
            raise document.fail(f"is {document.value!r}; expected one of {', '.join(known)}")
        return make(document.text())

    return Codec(read=read, write=str, schema={"enum": known})


def constant(value: object) -> Codec[Any]:
    """Return the codec of a member that is always the same, which tells objects apart."""
    fits: Callable[[Any], bool] = lambda found: found == value  # noqa: E731
    return Codec(read=lambda _: value, schema={"const": value}, fits=fits).derived(lambda _: value)


def version(
    current: int, *, before: tuple[int, ...] = (), minimum: int = 0, hint: Callable[[int], str] = lambda _: ""
) -> Codec[Any]:
    """Return the codec of the version of a format, which is written.

    Args:
        current: The version.
        before: Others that are read.
        minimum: Of all there have been.
        hint: What to do about another one.
    """

    def read(document: Field) -> int:
        found = document.integer(minimum)
        if found not in (*before, current):
            raise document.fail(f"is {found}; this version of PaSE reads {current}{hint(found)}")
        return found

    is_one: dict[str, Any] = {"enum": [*before, current]} if before else {"const": current}
    return Codec(read=read, schema={"type": "integer", **is_one}).derived(lambda _: current)


TEXT = text()
FLAG = Codec(read=Field.boolean, schema={"type": "boolean"}, kind=bool, fits=_is(bool))
WHOLE, POSITIVE = whole(), whole(1)
NUMBER = number()
NULL: Codec[None] = Codec(read=lambda _: None, schema={"type": "null"}, kind=NoneType, fits=_is(NoneType))
SCALAR = Codec(read=Field.scalar, schema={"type": ["string", "integer", "number", "boolean"]})


# -- arrays and objects


def array(entries: Codec[T], **schema: Any) -> Codec[tuple[T, ...]]:
    """Return the codec of arrays; schema: what else their JSON Schema says."""
    return Codec(
        read=lambda document: tuple(entries.read(item) for item in document.items()),
        write=lambda value: [entries.write(item) for item in value],
        schema={"type": "array", "items": entries.schema} | schema,
        definitions=entries.definitions,
        kind=tuple,
        fits=_is(list),
        entries=entries,
    )


def wholes(minimum: int = 0, **schema: Any) -> Codec[tuple[int, ...]]:
    """Return the codec of arrays of whole numbers, which may be long."""
    return replace(array(whole(minimum), **schema), read=lambda document: document.integers(minimum), write=list)


def row(expected: str, *places: Codec[Any]) -> Codec[tuple[Any, ...]]:
    """Return the codec of arrays that have a meaning for each place; expected: of all, for messages."""

    def read(document: Field) -> tuple[Any, ...]:
        found = document.items()
        if len(found) != len(places):
            raise document.fail(f"has {len(found)} entries; expected {expected}")
        return tuple(codec.read(item) for codec, item in zip(places, found, strict=True))

    schema = {"prefixItems": [place.schema for place in places], "minItems": len(places), "maxItems": len(places)}
    return Codec(read=read, write=list, schema={"type": "array"} | schema)


def table(entries: Codec[T], **schema: Any) -> Codec[dict[str, T]]:
    """Return the codec of objects whose keys are any names; schema: what else their JSON Schema says."""
    return Codec(
        read=lambda document: {key: entries.read(item) for key, item in document.members()},
        write=lambda value: {key: entries.write(item) for key, item in value.items()},
        schema={"type": "object", "additionalProperties": entries.schema} | schema,
        definitions=entries.definitions,
    )


def record(make: Callable[..., T], /, **members: Codec[Any]) -> Codec[T]:
    """Return the codec of objects with these members; make: of members by name, the value."""
    sources = {key: codec.source or key for key, codec in members.items()}
    names = {key: source if isinstance(source, str) else key for key, source in sources.items()}
    getters = {key: attrgetter(source) if isinstance(source, str) else source for key, source in sources.items()}
    required = [key for key, codec in members.items() if codec.default is _REQUIRED]
    constants = {key: codec for key, codec in members.items() if "const" in codec.schema}

    def read(document: Field) -> T:
        found = {}
        for key, codec in members.items():
            member = document[key] if codec.default is _REQUIRED else document.get(key)
            value = codec.default if member is None else codec.read(member)
            if codec.is_argument:
                found[names[key]] = value
        return make(**found)

    def write(value: T) -> dict[str, Any]:
        found = {}
        for key, codec in members.items():
            member = getters[key](value)
            if getattr(value, codec.beside) if codec.beside else member != codec.default:
                found[key] = codec.write(member)
        return found

    properties = {key: codec.schema for key, codec in members.items()}
    return Codec(
        read=read,
        write=write,
        schema={"type": "object", "required": required, "properties": properties},
        definitions=_definitions(members.values()),
        kind=make if isinstance(make, type) else object,
        fits=lambda value: isinstance(value, dict) and all(c.fits(value.get(key)) for key, c in constants.items()),
        members=members,
    )


def wrapped(key: str, codec: Codec[T]) -> Codec[T]:
    """Return the codec of objects with one member, whose key tells them apart."""
    return replace(
        codec,
        read=lambda document: codec.read(document[key]),
        write=lambda value: {key: codec.write(value)},
        schema={"type": "object", "required": [key], "properties": {key: codec.schema}},
        fits=lambda value: isinstance(value, dict) and key in value,
    )


def union(name: str, expected: str, *choices: Codec[Any], tag: str = "") -> Codec[Any]:
    """Return the codec of one of several; name, expected: for messages; tag: the member that tells them apart."""

    def read(document: Field) -> Any:
        for codec in choices:
            if codec.fits(document.value):
                return codec.read(document)
        found = document[tag] if tag else document
        raise found.fail(f"is {repr(found.text()) if tag else f'no {name}'}; expected {expected}")

    return Codec(
        read=read,
        write=lambda value: next(codec for codec in choices if isinstance(value, codec.kind)).write(value),
        schema={"oneOf" if tag else "anyOf": [codec.schema for codec in choices]},
        definitions=_definitions(choices),
    )


def nullable(codec: Codec[T]) -> Codec[T | None]:
    """Return the codec of a value or null."""
    return Codec(
        read=lambda document: None if document.value is None else codec.read(document),
        write=lambda value: None if value is None else codec.write(value),
    )


def defined(name: str, title: str, codec: Codec[T]) -> Codec[T]:
    """Return the codec with a name in JSON Schemas, which refer to it wherever it is used."""
    own = {name: {"title": title, **codec.schema}}
    return replace(codec, schema={"$ref": f"#/$defs/{name}"}, definitions={**codec.definitions, **own})


def _definitions(codecs: Iterable[Codec[Any]]) -> dict[str, Schema]:
    return {name: schema for codec in codecs for name, schema in codec.definitions.items()}


# -- JSON Schema


def json_schema(
    codec: Codec[Any], *, identifier: str, title: str, described: Mapping[str, Mapping[str, str]]
) -> Schema:
    """Return the JSON Schema of a document, draft 2020-12.

    Args:
        codec: of the document.
        identifier: of the schema.
        title: of the document.
        described: what everything is, by the name of a definition, "document" for the document itself, and then by
            path within it: "" for itself, "levels[].name" for a member of an array's entries, "scalars.*" for what has
            any name, "axes[]<null>" for one of several kinds, whose members have the path of all kinds.
    """
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": identifier,
        "title": title,
        **_described(codec.schema, described["document"], ""),
    }
    definitions = {name: _described(of, described[name], "") for name, of in codec.definitions.items()}
    return schema | ({"$defs": definitions} if definitions else {})


def descriptions(package: str, name: str) -> dict[str, dict[str, str]]:
    """Return what is said of everything in a document, from a TOML file of a package."""
    return tomllib.loads((resources.files(package) / name).read_text(encoding="utf-8"))


def _described(schema: Schema, texts: Mapping[str, str], path: str, kind: str = "") -> dict[str, Any]:
    found: dict[str, Any] = dict(schema)
    if path + kind in texts:
        found["description"] = texts[path + kind]
    if "properties" in found:
        inner = {key: _described(of, texts, f"{path}.{key}".lstrip(".")) for key, of in found["properties"].items()}
        found["properties"] = inner
    for key, step in (("items", "[]"), ("additionalProperties", ".*")):
        if key in found:
            found[key] = _described(found[key], texts, f"{path}{step}".lstrip("."))
    if "prefixItems" in found:
        found["prefixItems"] = [_described(of, texts, f"{path}[{i}]") for i, of in enumerate(found["prefixItems"])]
    for key in {"anyOf", "oneOf"} & found.keys():
        found[key] = [_described(of, texts, path, f"<{_name(of)}>") for of in found[key]]
    return found


def _name(choice: Schema) -> str:
    """Return what tells one of several kinds from the others."""
    constants = [of["const"] for of in choice.get("properties", {}).values() if "const" in of]
    return str(next(iter([*constants, *choice.get("required", ()), choice.get("type") or choice["$ref"]])))
