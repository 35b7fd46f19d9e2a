"""What a plan's file says never becomes part of a program or a format, however it is put there.

Graphs are changed as documents, as a stranger would change a plan's file. Whatever is read is written in every way
there is, and each result is taken apart by a parser of its language: it must be built as that of tame names is.
"""

import ast
import csv
import io
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest

from pase import search
from pase.common.documents import DocumentSource
from pase.errors import EmitError, PaseError, PlanError
from pase.graph import Graph, graph_document, graph_from_document
from pase.graph.body import Step
from pase.planning.plan import Plan
from pase.targets.programs import TARGETS, emit
from pase.views.exports import FORMATS, export
from pase.views.reports.document import render, report_document
from tests.emitter.test_forward import network
from tests.exports.dot_grammar import read_dot
from tests.graph.test_attributes import CODE
from tests.hostile import HOSTILE_NAMES
from tests.runtime.networks import EXCHANGING, dropping, mixed, tied
from tests.runtime.plans import random_plan

NETWORKS = (mixed, tied, dropping, network, *EXCHANGING.values())

PIECES = (
    *(name for name in HOSTILE_NAMES if len(name) < 100),
    *(CODE, "\\", '"', "'", "\n", "\r", "\u2028", "\u2029", "\x85", "\x0c", "#", "'''", '"""', "{}", "{0}", "%s"),
    *("__import__", "</script>", "]]>", "-->", "&#x3c;", "<br>", ";", "|", "]", "exit()", "\N{FULLWIDTH EQUALS SIGN}1"),
    *("\ud800", "$(x)"),
)  # fmt: skip


def text_of(random: Random) -> str:
    return "".join(random.choice(PIECES) for _ in range(random.randint(1, 4)))


# -- what programs and formats are built of


def of_python(source: str) -> Any:
    """Return what a program calls, reads from outside and imports, and how its statements are nested.

    Names that it gives itself, numbers and strings are its own affair.
    """
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    given = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    given |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    free = {node.id for node in nodes if isinstance(node, ast.Name)} - given
    calls = Counter(ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call))
    # Two assignments may stand in one line.
    statements = Counter(type(node).__name__ for node in nodes if isinstance(node, ast.stmt))
    del statements["Assign"]
    imports = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    attributes = Counter(node.attr for node in nodes if isinstance(node, ast.Attribute))
    return free, calls, statements, imports, attributes


def of_dot(source: str) -> Any:
    found = read_dot(source)
    nodes = {name: sorted(attributes) for name, attributes in found.nodes.items()}
    edges = [(source, target, sorted(attributes)) for source, target, attributes in found.edges]
    return nodes, edges, sorted(found.graph), {name: (sorted(a), n) for name, (a, n) in found.clusters.items()}


def of_mermaid(source: str) -> Any:
    """Return the lines without what their labels show, in which nothing but words and codes may stand."""
    labels = re.findall(r'"([^"\n]*)"', source)
    assert all(re.fullmatch(r"(\w| |#\d+;|<br>)*", label) for label in labels)
    return [re.sub(r'"[^"]*"', '""', line) for line in source.split("\n")]


def of_xml(source: str) -> Any:
    """Return the elements with the names of their attributes; only colours and lines may differ with what is split."""
    root = ElementTree.fromstring(source)
    assert not any(node.tag.endswith(("script", "foreignObject", "a", "image")) for node in root.iter())
    assert not any(key.startswith("on") or key.endswith("href") for node in root.iter() for key in node.attrib)
    return [(node.tag, sorted(node.attrib)) for node in root.iter()]


FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")


def of_csv(source: str) -> Any:
    rows = list(csv.reader(io.StringIO(source), strict=True))
    texts = [cell for row in rows for cell in row if not _is_number(cell)]
    assert not any(text.lstrip().startswith(FORMULA) for text in texts)
    return [len(row) for row in rows]


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"-?[0-9.]+(e[-+]?\d+)?", cell) is not None


def of_toml(source: str) -> Any:
    document = tomllib.loads(source)
    return {key: type(value).__name__ for key, value in document.items()}, [
        (sorted(layout.keys() - {"dims"}), len(layout["layers"])) for layout in document["layouts"]
    ]


class _Elements(HTMLParser):
    """The elements of a page, with the names of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, sorted(name for name, _ in attrs)))


def of_html(source: str) -> Any:
    parser = _Elements()
    parser.feed(source)
    return parser.found


BUILT = {
    "csv": of_csv,
    "dot": of_dot,
    "mermaid": of_mermaid,
    "svg": of_xml,
    "mesh-tensorflow-layout": of_toml,
    "jax": of_python,
    "torch": of_python,
}


def written(graph: Graph, *, with_page: bool = False) -> dict[str, Any]:
    """Return, for each way of writing a plan of a graph, what the result is built of, or why there is none."""
    plan = random_plan(graph, 4, 1)
    found: dict[str, Any] = {}
    for target in TARGETS:
        try:
            source = emit(plan, target=target)
        except EmitError as error:
            found[f"emit {target}"] = type(error)
            continue
        found[f"emit {target}"] = of_python(source)
    for name in FORMATS:
        found[name] = BUILT[name](export(plan, name).text)
    if with_page:
        found["page"] = of_html(render(report_document({graph.name: search(graph, 4)}, explains=False)))
    return found


# -- graphs with other names


def read(document: Any) -> Graph:
    return graph_from_document(json.loads(json.dumps(document)), DocumentSource(PlanError, "plan.json"))


def renamed(graph: Graph, names: dict[str, str]) -> Graph:
    """Return a graph that has other names for itself, its layers, dims and shared weights."""
    # Of a step what it computes from what: its dims alone are names of the graph.
    kept = {"kind", "role", "pattern", "tensor", "function", "operands", "result"}

    def change(value: Any, key: str = "") -> Any:
        match value:
            case dict():
                return {
                    names.get(k, k) if key == "dims" else k: told(v) if k in ("attributes", "options") else change(v, k)
                    for k, v in value.items()
                }
            case list():
                return [change(item, key) for item in value]
            case str() if key not in kept:
                return names.get(value, value)
        return value

    def told(found: dict[str, Any]) -> dict[str, Any]:
        return {key: names.get(value, value) if key in ("along", "over") else value for key, value in found.items()}

    return read(change(graph_document(graph)))


def names_of(graph: Graph) -> list[str]:
    """Return every name of a graph that is its own, but for tensors: which of these are weights, kinds go by."""
    found = {graph.name, *(operator.name for operator in graph.operators), *graph.owners}
    found |= {dim.name for operator in graph.operators for dim in operator.dims}
    return sorted(found)


def check(seed: int) -> None:
    """Write a graph with random hostile names, and that with tame ones: both are built alike."""
    random = Random(seed)
    graph = NETWORKS[seed % len(NETWORKS)]()
    names = names_of(graph)
    hostile = {name: f"{text_of(random)}{i}" for i, name in enumerate(names)}
    # In one order: what is split decides about colours, in the order of dims' names.
    tame = {name: f"tame {i:03}" for i, name in enumerate(sorted(names, key=hostile.__getitem__))}
    with_page = seed % 5 == 0
    found = written(renamed(graph, hostile), with_page=with_page)
    for way, expected in written(renamed(graph, tame), with_page=with_page).items():
        assert found[way] == expected, (seed, way)


def check_anywhere(seed: int) -> None:
    """Put hostile text in place of any text of a graph: it is refused, or what is written is built as before.

    But where a name is one that nothing refers to, nothing else can follow: the program is none, or has other layers.
    """
    random = Random(seed)
    graph = NETWORKS[seed % len(NETWORKS)]()
    document = json.loads(json.dumps(graph_document(graph)))
    places = list(_texts(document))
    holder, key = random.choice(places)
    text = text_of(random)
    if isinstance(holder, dict) and random.random() < 0.3:
        items = [(text if other == key else other, value) for other, value in holder.items()]
        holder.clear()
        holder.update(items)
    else:
        holder[key] = text
    try:
        found = written(read(document))
    except PaseError:
        return
    expected = written(graph)
    for way in found:
        if found[way] is EmitError or expected[way] is EmitError:
            continue
        if way.startswith("emit ") or way in ("jax", "torch"):
            # A layer may be left out, or read data in place of what no edge feeds: no new word can come in.
            assert found[way][0] <= expected[way][0] | VOCABULARY, (seed, way)
            assert set(found[way][1]) <= set(expected[way][1]) | VOCABULARY, (seed, way)
            assert set(found[way][2]) <= set(expected[way][2]), (seed, way)
        elif way != "mesh-tensorflow-layout":
            assert found[way] == expected[way], (seed, way)


VOCABULARY = {
    *("P", "P.UNCONSTRAINED", "Partial", "Replicate", "Shard"),
    *("arrange", "fn", "fn.add", "piece", "program.floats", "reshard", "window"),
}


def _texts(value: Any) -> Any:
    """Yield every place of a document that holds text, and every key: (holder, key)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in items:
        if isinstance(member, str) or isinstance(key, str):
            yield value, key
        yield from _texts(member)


@pytest.mark.parametrize("seed", range(20))
def test_names_are_never_more_than_names(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("block", range(4))
def test_whatever_text_of_a_graph_is_changed(block: int) -> None:
    for seed in range(60 * block, 60 * (block + 1)):
        check_anywhere(seed)


# -- attributes that no reading checked


def changed_in_memory(plan: Plan, layer: str, **attributes: str) -> Plan:
    operators = tuple(
        replace(operator, attributes=tuple((dict(operator.attributes) | attributes).items()))
        if operator.name == layer
        else operator
        for operator in plan.graph.operators
    )
    return replace(plan, graph=replace(plan.graph, operators=operators))


@pytest.mark.parametrize(
    ("layer", "attribute"),
    [("a", "activation"), ("c", "reduction"), ("f", "function"), ("g", "function"), ("joined", "along")],
)
@pytest.mark.parametrize("text", [CODE, "exit", 'relu"', "relu\n", "mean_pool2d(stem, mesh) or max"])
def test_what_is_no_word_of_a_vocabulary_is_not_written(layer: str, attribute: str, text: str) -> None:
    """By itself, too: an emitter looks every word up, whether or not the graph was checked before."""
    plan = changed_in_memory(random_plan(mixed(), 4, 1), layer, **{attribute: text})
    with pytest.raises(EmitError, match=r"unknown|none of its dims|expected one"):
        emit(plan)


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        ("a", lambda step: replace(step, function=CODE)),
        ("c", lambda step: replace(step, options=(("reduction", CODE),))),
        ("joined", lambda step: replace(step, options=(("along", CODE),))),
        ("f", lambda step: replace(step, operands=(CODE,))),
        ("e", lambda step: replace(step, dims=(CODE,))),
    ],
)
def test_what_is_no_word_of_a_body_is_not_written(layer: str, change: Callable[[Step], Step]) -> None:
    plan = random_plan(mixed(), 4, 1)
    body = plan.graph[layer].body
    assert body is not None
    changed = replace(body, steps=(*body.steps[:-1], change(body.steps[-1])))
    operators = tuple(replace(o, body=changed) if o.name == layer else o for o in plan.graph.operators)
    with pytest.raises(EmitError, match=r"a step of its body.*(unknown|has option|no step computes)|names dims"):
        emit(replace(plan, graph=replace(plan.graph, operators=operators)))
