"""Statements of a program's functions, as values: emitted as text to files, or executed directly by PyTorch modules."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

from pase.targets.emitter.text import INDENT, WIDTH, Text, code, comment, identifier, joined

_DEEPER = code("{}{}", INDENT, INDENT)

Value = Union[Text, str, float, Sequence["Value"], Mapping[Any, "Value"], "Call", "Sum"]
"""A name (`Text`), another text or a number as a literal, a list, tuple or dict of values, a call or a sum."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call; `function` is the name of a layer, or, after a dot, of a method of the program or of `fn`."""

    function: Text
    arguments: Sequence[Value]
    keywords: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum, from its first term to its last."""

    terms: Sequence[Value]


RETURN = code("return")


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of a function.

    Attributes:
        target: Name of the value; names of its elements; RETURN where the function returns it; None for none of these.
        value: The computed value; a dict by itself is a dict of outputs.
        comment: Comment, "" for none.
    """

    target: Text | tuple[Text, ...] | None
    value: Value
    comment: str = ""

    def lines(self) -> list[Text]:
        """Return its text, with the comment after a single line that has room, otherwise before it."""
        lines = _lines(self.target, self.value)
        if not self.comment:
            return lines
        behind = code("{}  {}", lines[0], comment(self.comment))
        if len(lines) == 1 and len(behind) <= WIDTH:
            return [behind]
        return [code("{}{}", INDENT, comment(self.comment)), *lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that declares layers.

    Attributes:
        name: Its name.
        parameters: Names of its parameters after the program.
        returned: Type of its result.
        about: Its docstring.
        body: Its statements, and text lines between them: comments and empty lines.
    """

    name: Text
    parameters: tuple[Text, ...]
    returned: Text
    about: Text
    body: tuple[Statement | Text, ...]

    def lines(self) -> list[Text]:
        """Return its text."""
        parameters = [code("program: Program"), *(code("{}: Tensor", name) for name in self.parameters)]
        head = code("def {}({}) -> {}:", self.name, parameters, self.returned)
        lines = [head, code('{}"""{}"""', INDENT, self.about)]
        for line in self.body:
            lines += [line] if isinstance(line, Text) else line.lines()
        return lines


def nonzero(**options: Value) -> dict[str, Value]:
    """Return the keywords whose values are not zero, false or empty, which are the functions' defaults."""
    return {name: value for name, value in options.items() if value}


def names_in(values: Iterable[Value | Statement]) -> set[str]:
    """Return the names that values use; of dotted names the part before the dot."""
    names = set[str]()
    for value in values:
        match value:
            case Statement():
                names |= names_in([value.value])
            case Call():
                names |= names_in([value.function, *value.arguments, *value.keywords.values()])
            case Sum():
                names |= names_in(value.terms)
            case Text():
                names.add(value.partition(".")[0])
            case list() | tuple():
                names |= names_in(value)
            case dict():
                names |= names_in(value.values())
    return names


# -- conversion to text


def written(value: Value) -> Text:
    """Return the text of a value."""
    match value:
        case Call():
            return code("{}({})", value.function, _arguments(value))
        case Sum():
            terms = enumerate(value.terms)
            texts = [code("({})" if i and isinstance(term, Sum) else "{}", written(term)) for i, term in terms]
            return joined(texts, code(" + "))
        case list():
            return code("[{}]", _written(value))
        case tuple():
            return code("({},)" if len(value) == 1 else "({})", _written(value))
        case dict():
            return code("dict([{}])", _written(value.items()))
        case str() | float() | int():
            return code("{}", value)
    raise AssertionError(f"{value!r} is not a value of a program")


def _written(values: Iterable[Value]) -> list[Text]:
    return [written(value) for value in values]


def _arguments(call: Call) -> list[Text]:
    named = [code("{}={}", identifier(name), written(value)) for name, value in call.keywords.items()]
    return [*_written(call.arguments), *named]


def _lines(target: Text | tuple[Text, ...] | None, value: Value) -> list[Text]:
    if isinstance(target, tuple) and isinstance(value, tuple):
        line = code("{}{} = {}", INDENT, target, _written(value))
        if len(line) <= WIDTH:
            return [line]
        return [line for pair in zip(target, value, strict=True) for line in _lines(*pair)]
    match target:
        case None:
            head = INDENT
        case "return":
            head = code("{}return ", INDENT)
        case str() if isinstance(value, dict):
            head = code("{}{}: Outputs = ", INDENT, target)
        case _:
            head = code("{}{}, = " if isinstance(target, tuple) and len(target) == 1 else "{}{} = ", INDENT, target)
    match value:
        case Call():
            return _call(code("{}{}", head, value.function), value)
        case tuple():
            return [code("{}{}", head, _written(value))]
        case dict():
            items = [code("{}: {}", name, written(item)) for name, item in value.items()]
            line = code("{}{{}}", head, items)
            if len(line) <= WIDTH:
                return [line]
            return [code("{}{", head), *(code("{}{},", _DEEPER, item) for item in items), code("{}}", INDENT)]
    text = written(value)
    line = code("{}{}", head, text)
    return [line] if len(line) <= WIDTH else [code("{}(", head), code("{}{}", _DEEPER, text), code("{})", INDENT)]


def _call(head: Text, call: Call) -> list[Text]:
    """Return the lines of a call: one line, or arguments on a line of their own, or one argument per line."""
    arguments = _arguments(call)
    line = code("{}({})", head, arguments)
    if len(line) <= WIDTH:
        return [line]
    inner = code("{}{}", _DEEPER, arguments)
    lines = [inner] if len(inner) <= WIDTH else [code("{}{},", _DEEPER, argument) for argument in arguments]
    end = code("{})", INDENT)
    if "devices" in call.keywords and any(len(line) > WIDTH for line in lines):
        others = {name: value for name, value in call.keywords.items() if name != "devices"}
        lines = [code("{}{},", _DEEPER, argument) for argument in _arguments(replace(call, keywords=others))]
        lines += _in_rows(call.keywords["devices"])
        end = code("{})  # fmt: skip", INDENT)
    return [code("{}(", head), *lines, end]


def _in_rows(devices: Value) -> list[Text]:
    """Return the lines of an argument ``devices=[…]`` that does not fit on one line."""
    assert isinstance(devices, list)
    rows: list[list[Text]] = []
    room = 0
    for device in _written(devices):
        needed = len(device) + 2
        if not rows or needed > room:
            rows.append([])
            room = WIDTH - 3 * len(INDENT) + 1
        rows[-1].append(device)
        room -= needed
    inner = [code("{}{}{},", _DEEPER, INDENT, row) for row in rows]
    return [code("{}devices=[", _DEEPER), *inner, code("{}],", _DEEPER)]
