"""A reader of the DOT language, after its published grammar: an independent judge of what a text says.

Quoted strings end at the first " that no \\ precedes; in them \\" stands for ". What labels make of other escapes and
of entities is undone by `shown`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape

_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<word>[A-Za-z_\x80-\U0010ffff][\w\x80-\U0010ffff]*|-?(?:\.\d+|\d+(?:\.\d*)?))
    | (?P<mark>->|--|[{}\[\];,=:+])
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(slots=True)
class Read:
    """What a graph holds: attributes of nodes by id, edges with theirs, subgraphs with theirs and their nodes."""

    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    edges: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    clusters: dict[str, tuple[dict[str, str], list[str]]] = field(default_factory=dict)
    graph: dict[str, str] = field(default_factory=dict)


def read_dot(text: str) -> Read:
    """Return what a directed graph says; ValueError where it is not DOT, or holds what exports have no use for."""
    tokens = list(_tokens(text))
    read = Read()
    position = _expect(tokens, 0, "digraph")
    position = _expect(tokens, position + 1, "{")
    position = _statements(tokens, position, read, read.graph, None)
    if position != len(tokens):
        raise ValueError(f"more follows: {tokens[position:][:5]}")
    return read


def shown(label: str) -> list[str]:
    """Return the lines that a label shows."""
    lines = [""]
    for part in re.findall(r"\\.|[^\\]+", label, re.DOTALL):
        if part == "\\n":
            lines.append("")
        elif part == "\\\\":
            lines[-1] += "\\"
        elif part.startswith("\\"):
            raise ValueError(f"escape {part!r}")
        else:
            lines[-1] += unescape(part)
    return lines


def _tokens(text: str) -> Iterator[str]:
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise ValueError(f"no token at {text[position : position + 40]!r}")
        if found.lastgroup != "space":
            yield found[0]
        position = found.end()


def _expect(tokens: list[str], position: int, token: str) -> int:
    if tokens[position] != token:
        raise ValueError(f"{tokens[position]!r} where {token!r} is expected")
    return position + 1


def _value(token: str) -> str:
    return token[1:-1].replace('\\"', '"') if token.startswith('"') else token


def _attributes(tokens: list[str], position: int) -> tuple[dict[str, str], int]:
    found: dict[str, str] = {}
    if tokens[position] != "[":
        return found, position
    position += 1
    while tokens[position] != "]":
        name, equals, value = tokens[position : position + 3]
        if equals != "=" or not re.fullmatch(r"\w+", name):
            raise ValueError(f"no attribute: {name} {equals} {value}")
        found[name] = _value(value)
        position += 3
        if tokens[position] == ",":
            position += 1
    return found, position + 1


def _statements(tokens: list[str], position: int, read: Read, own: dict[str, str], inside: list[str] | None) -> int:
    while tokens[position] != "}":
        word = tokens[position]
        if word == "subgraph":
            attributes: dict[str, str] = {}
            nodes: list[str] = []
            read.clusters[tokens[position + 1]] = (attributes, nodes)
            start = _expect(tokens, position + 2, "{")
            position = _statements(tokens, start, read, attributes, nodes)
            continue
        if not re.fullmatch(r"[A-Za-z]\w*", word):
            raise ValueError(f"a statement begins with {word!r}")
        position += 1
        if tokens[position] == "=":
            own[word] = _value(tokens[position + 1])
            position += 2
        elif tokens[position] == "->":
            attributes, end = _attributes(tokens, position + 2)
            read.edges.append((word, tokens[position + 1], attributes))
            position = end
        else:
            attributes, position = _attributes(tokens, position)
            if word == "graph":
                own |= attributes
            elif word not in ("node", "edge"):
                read.nodes.setdefault(word, {}).update(attributes)
                if inside is not None:
                    inside.append(word)
        position = _expect(tokens, position, ";")
    return position + 1
