"""Programs of a forward pass as text: what they say, what they refuse, and that names from outside stay names."""

from dataclasses import replace

import pytest

from pase.errors import EmitError, GraphError
from pase.graph import Graph, Operator
from pase.graph.builder import Builder
from pase.graph.operators.contract import contract
from pase.graph.operators.pointwise import pointwise
from pase.graph.recipe import ATTRIBUTE, Fed, Recipe, Returned, Step, is_before_layout, recipe_of
from pase.targets.mesh_tensorflow.emitter import emit, emit_forward
from tests.runtime.networks import small
from tests.runtime.plans import make_plan

DENSE = Recipe(
    steps=(
        Step(name="t1", function="einsum", of=("x", "w"), dims=("b", "n")),
        Step(name="t2", function="clip", of=("t1", 0.0, 6.0)),
    ),
    inputs=(Fed(read=0, name="pixels", shape=(4, 8)),),
)
SUM = Recipe(
    steps=(Step(name="t1", function="add", of=("x0", 0.5)),),
    outputs=(Returned(name="scores", dims=("b", "n"), shape=(4, 6)),),
)


def network(first: Recipe = DENSE, last: Recipe = SUM, name: str = "fc") -> Graph:
    net = Builder("net")
    x = net.input((4, 8))
    y = net.add(contract, name, x, y=(8, 6), axes=(("b", "c"), ("c", "n")), out=("b", "n"), parameter=1, kind="dense")
    net.add(pointwise, "sum", y, dims=("b", "n"), out=(4, 6), function="add")
    graph = net.build()
    operators = tuple(
        replace(operator, attributes=((ATTRIBUTE, recipe.to_text()),))
        for operator, recipe in zip(graph.operators, (first, last), strict=True)
    )
    return replace(graph, operators=operators)


def test_a_block_says_what_it_reads_and_computes() -> None:
    source = emit_forward(make_plan(network(), 2, {"fc": {"n": 2}, "sum": {"b": 2}}))
    assert 'pixels = program.floats("pixels", [4, 8])' in source
    assert 'mesh = program.mesh("fc", [("n", 2)])' in source
    assert 'w = program.weight(mesh, "fc/w", [c, n])' in source
    assert "fc = arrange(fn.clip(product(x, w, [b, n]), 0, 6), [b, n])" in source
    assert "x0 = reshard(fc, mesh, [b, n])  # 48 B" in source
    assert 'return {"scores": (sum_2, (4, 6))}' in source


def test_names_from_outside_stay_names() -> None:
    evil = '"); import os  # \\'
    outputs = (Returned(name=evil, dims=("b", "n"), shape=(4, 6)),)
    first = replace(DENSE, inputs=(Fed(read=0, name=evil, shape=(4, 8)),))
    source = emit_forward(make_plan(network(first, replace(SUM, outputs=outputs), evil), 1, {}))
    assert "import os" not in {line.strip() for line in source.splitlines()}
    assert source.count('\\"); import os') >= 4


@pytest.mark.parametrize("function", ["system", "__class__", "add(", ""])
def test_a_function_that_is_not_known_is_refused(function: str) -> None:
    recipe = replace(SUM, steps=(Step(name="t1", function=function, of=("x0",)),))
    with pytest.raises(
        EmitError,
        match=r"layer 'sum': a step of its recipe is not known: unknown function .* known functions are abs, ",
    ):
        emit_forward(make_plan(network(last=recipe), 1, {}))


def test_a_layer_that_cannot_be_computed_is_refused_with_the_reason() -> None:
    with pytest.raises(
        EmitError, match=r"layer 'fc' \(dense\) cannot be written as a program: Foo: it is odd; replace"
    ):
        emit_forward(make_plan(network(Recipe(problem="Foo: it is odd")), 1, {}))


def test_a_layer_that_leads_to_no_output_is_left_out() -> None:
    recipe = replace(DENSE, outputs=(Returned(name="hidden", dims=("b", "n"), shape=(4, 6)),))
    last = replace(SUM, outputs=(), problem="never mind")
    source = emit_forward(make_plan(network(recipe, last), 1, {}))
    assert 'program.mesh("fc"' in source
    assert 'program.mesh("sum"' not in source


def test_a_network_that_was_not_imported_is_refused() -> None:
    with pytest.raises(EmitError, match="programs of a forward pass are written for imported models"):
        emit_forward(make_plan(small("mlp"), 1, {}))


def test_a_training_program_of_an_imported_model_is_refused() -> None:
    with pytest.raises(EmitError, match=r"was imported: training programs are .*pase emit PLAN --forward"):
        emit(make_plan(network(), 1, {}))


def test_a_split_that_does_not_divide_is_refused() -> None:
    with pytest.raises(EmitError, match="layer 'fc' splits n = 6 in 4 parts"):
        emit_forward(make_plan(network(), 4, {"fc": {"n": 4}}))


# -- recipes


def operator(text: str) -> Operator:
    return replace(network().operators[0], attributes=((ATTRIBUTE, text),))


def test_a_recipe_is_what_its_text_says() -> None:
    full = replace(DENSE, outputs=SUM.outputs, problem="none")
    assert recipe_of(operator(full.to_text())) == full
    assert recipe_of(replace(network().operators[0], attributes=())) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no recipe"),
        ('{"steps": [["t1", "add"]]}', "is no recipe"),
        ('{"steps": [["t1", "add", [true], []]]}', "operand True is no name and no number"),
        ('{"steps": [["t1", "exp", ["y"], []]]}', "a step of its recipe reads 'y', which nothing makes"),
        ('{"steps": [["t1", "sum", ["x"], ["z"]]]}', r"names dims or inputs that it has not: \['z'\]"),
        ('{"inputs": [[7, "x", [4]]]}', "names dims or inputs that it has not"),
    ],
)
def test_a_text_that_is_no_recipe_is_refused(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        recipe_of(operator(text))


def test_functions_of_points_of_one_tensor_can_come_first() -> None:
    scaled = Step(name="t1", function="multiply", of=("x", 0.5))
    assert is_before_layout([scaled, Step(name="t2", function="add", of=("t1", "x"))], "x")
    assert not is_before_layout([scaled, Step(name="t2", function="add", of=("t1", "w"))], "x")
    assert not is_before_layout([Step(name="t1", function="mean", of=("x",), dims=("b",))], "x")
