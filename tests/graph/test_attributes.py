"""Attributes of operators: each kind has its own, typed; whatever else a file holds is refused where it is read."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import pase
from pase.common.documents import DocumentSource
from pase.errors import GraphError, PlanError
from pase.graph import Builder, Graph, Operator, graph_document, graph_from_document, operators, verify_operator
from pase.graph.operators import dense
from pase.graph.verify import ATTRIBUTES, IMPORTED
from tests.hostile import HOSTILE_NAMES

CODE = "(__import__('os').system('touch PWNED'), relu)[1]"

TEXTS = (*HOSTILE_NAMES, CODE, "relu)(x", "relu\n", "relu#", "exit", "mtf.einsum", "</script>", "=cmd", "\u2028relu")
"""The last are words that a program might hold, but none of a vocabulary."""

PAIRS = sorted(
    {
        # What is checked the same way is checked for one kind.
        (name, id(found)): (kind, name)
        for kind, attributes in ATTRIBUTES.items()
        if kind != "fan_out"  # which no other layer can be said to be
        for name, found in (attributes | IMPORTED).items()
    }.values()
)
FREE = {"function": {"opaque"}, "scanned": set(ATTRIBUTES)}
"""Attributes that are for people: of them no program is made."""

LISTS = {"function": {"pointwise", "reduction"}, "epilogue": set(ATTRIBUTES)}
"""Attributes that are names of functions, perhaps none."""


def with_attribute(kind: str, name: str, value: object) -> Any:
    """Return the document of a dense layer of dims b, n, c that is said to be of that kind, with that attribute."""
    net = Builder("net")
    net.add(dense, "fc", net.input((4, 8)), out=(("n", 6),))
    document = graph_document(net.build())
    document["operators"][0] |= {"kind": kind, "attributes": {name: value}}
    return json.loads(json.dumps(document))


def read(document: Any) -> Graph:
    return graph_from_document(document, DocumentSource(PlanError, "plan.json"))


def refusal(document: Any) -> str:
    """Return why a document is refused, "" where it is read."""
    try:
        read(document)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_hostile_texts_are_no_attributes(kind: str, name: str) -> None:
    """Only what is for people may be any text, and is one short line then; all else is of its vocabulary."""
    for text in TEXTS:
        found = refusal(with_attribute(kind, name, text))
        if kind in FREE.get(name, ()):
            fits = text.isprintable() and len(text) <= 60
        else:
            fits = text == "" and (name in ("activation", "cell") or kind in LISTS.get(name, ()))
        assert (not found) == fits, (text, found)
        if found:
            assert found.startswith("plan.json: the document is not a valid graph: layer 'fc'")
            assert len(found) < 1500
            assert found.isprintable()


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("dense", "activation", CODE, r"attribute 'activation' is .*__import__.*; expected one of '', 'relu', 'ge"),
        ("pool2d", "reduction", "prod", r"layer 'fc' \(pool2d\): attribute 'reduction' is 'prod'; expected one of"),
        ("pool2d", "count_padding", 1, r"attribute 'count_padding' is 1; expected true or false"),
        ("conv2d", "groups", True, r"attribute 'groups' is True; expected a whole number of 1 or more"),
        ("conv2d", "groups", 0, r"attribute 'groups' is 0; expected a whole number of 1 or more"),
        ("lstm", "layers", 2.0, r"attribute 'layers' is 2.0; expected a whole number"),
        ("dropout", "rate", 1.0, r"attribute 'rate' is 1.0; expected a number from 0.0 to below 1.0"),
        ("dropout", "rate", 0, r"attribute 'rate' is 0; expected a number from 0.0"),
        ("layer_norm", "epsilon", "1e-5", r"attribute 'epsilon' is '1e-5'; expected a number with a decimal point"),
        ("concat", "along", "z", r"attribute 'along' is 'z'; expected one of its dims"),
        ("attention", "casual", True, r"attribute 'casual' is not an attribute of its kind; expected causal"),
        ("embedding", "causal", True, r"attribute 'causal' is not an attribute of its kind; expected none"),
        ("dense", "epilogue", "relu,", r"attribute 'epilogue' is 'relu,'; expected names of functions"),
    ],
)  # fmt: skip
def test_what_an_attribute_may_not_hold_is_named(kind: str, name: str, value: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read(with_attribute(kind, name, value))


def test_operators_in_memory_are_checked_too() -> None:
    layer = dense("fc", (4, 8), out=(("n", 6),))
    changed = Operator(
        **{field: getattr(layer, field) for field in ("name", "kind", "dims", "reads", "writes")},
        attributes=(("activation", "Relu"),),
    )
    with pytest.raises(GraphError, match=r"layer 'fc' \(dense\): attribute 'activation' is 'Relu'; expected one of"):
        verify_operator(changed)


def test_every_kind_that_is_made_or_written_says_what_its_attributes_are() -> None:
    made = {
        value.value
        for folder in ("graph/operators", "importers/lower")
        for path in (Path(pase.__file__).parent / folder).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.keyword) and node.arg == "kind"
        for value in ast.walk(node.value)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    } - {"conv", "pool", "d", "_norm"}  # pieces of names that are put together
    assert len(made) > 20
    assert made | (set(operators.__all__) - {"with_fan_outs"}) <= set(ATTRIBUTES)


def test_of_kinds_that_are_not_known_attributes_are_not_known_either() -> None:
    """An operator of a user's own may say what it likes: no program is written of it."""
    graph = read(with_attribute("bilinear", "taste", CODE))
    assert dict(graph.operators[0].attributes) == {"taste": CODE}
