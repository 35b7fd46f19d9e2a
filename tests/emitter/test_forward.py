"""Programs of imported models as text: what they say, what they refuse, and that names from outside stay names."""

import json
from dataclasses import replace
from typing import Any

import pytest

from pase.common.documents import DocumentSource
from pase.errors import EmitError, PlanError
from pase.graph import Edge, Graph, graph_document, graph_from_document
from pase.graph.body import Body, Constant, ModelInput, ModelOutput, Step, elementary, is_before_layout
from pase.graph.operators import contract, pointwise, reduction
from pase.graph.verify import Builder
from pase.targets.programs import emit
from tests.runtime.plans import make_plan

DENSE = Body(
    steps=(
        Step(result="t1", function="einsum", operands=("x", "w"), dims=("b", "n")),
        Step(result="t2", function="clip", operands=("t1", 0.0, 6.0)),
    ),
    inputs=(ModelInput(read=0, name="pixels", shape=(4, 8)),),
)
SUM = Body(
    steps=(Step(result="t1", function="add", operands=("x0", 0.5)),),
    outputs=(ModelOutput(name="scores", dims=("b", "n"), shape=(4, 6)),),
)


def network(first: Body = DENSE, last: Body = SUM, name: str = "fc") -> Graph:
    net = Builder("net")
    x = net.input((4, 8))
    y = net.add(contract, name, x, y=(8, 6), axes=(("b", "c"), ("c", "n")), out=("b", "n"), parameter=1, kind="dense")
    net.add(pointwise, "sum", y, dims=("b", "n"), out=(4, 6), function="add")
    graph = net.build()
    operators = tuple(
        replace(operator, body=body) for operator, body in zip(graph.operators, (first, last), strict=True)
    )
    return replace(graph, operators=operators)


def test_a_block_says_what_it_reads_and_computes() -> None:
    source = emit(make_plan(network(), 2, {"fc": {"n": 2}, "sum": {"b": 2}}))
    assert 'pixels = program.floats("pixels", [4, 8])' in source
    assert 'mesh = program.mesh("fc", [("n", 2)])' in source
    assert 'weights = program.weight(mesh, "fc/w", [c, n], 0.3536)' in source
    assert "fc = fn.clip(product(x, weights, [b, n]), 0, 6)" in source
    assert "x0 = reshard(fc, mesh, [b, n])  # 48 B forward + 48 B backward" in source
    assert 'return {"scores": (sum_2, (4, 6))}' in source


def test_names_from_outside_stay_names() -> None:
    evil = '"); import os  # \\'
    outputs = (ModelOutput(name=evil, dims=("b", "n"), shape=(4, 6)),)
    first = replace(DENSE, inputs=(ModelInput(read=0, name=evil, shape=(4, 8)),))
    source = emit(make_plan(network(first, replace(SUM, outputs=outputs), evil), 1, {}))
    assert "import os" not in {line.strip() for line in source.splitlines()}
    assert source.count('\\"); import os') >= 4


def test_a_layer_that_leads_to_no_output_is_left_out() -> None:
    body = replace(DENSE, outputs=(ModelOutput(name="hidden", dims=("b", "n"), shape=(4, 6)),))
    last = replace(SUM, outputs=(), problem="never mind")
    source = emit(make_plan(network(body, last), 1, {}))
    assert 'program.mesh("fc"' in source
    assert 'program.mesh("sum"' not in source


def with_a_loss(first: Body = DENSE) -> Graph:
    """Return the network with the mean of what it computes as its loss."""
    graph = network(first, replace(SUM, outputs=()))
    total = Step(result="t1", function="mean", operands=("x",), dims=("b", "n"))
    loss = replace(
        reduction("loss", (4, 6), dims=("b", "n"), over=("b", "n"), function="mean"),
        body=Body(steps=(total,), outputs=(ModelOutput(name="loss", dims=(), shape=()),)),
    )
    edge = Edge(producer="sum", output=0, consumer="loss", input=0)
    return replace(graph, operators=(*graph.operators, loss), edges=(*graph.edges, edge))


def test_a_training_program_returns_the_loss() -> None:
    source = emit(make_plan(with_a_loss(), 2, {"fc": {"n": 2}, "loss": {"b": 2}}))
    assert "def build(program: Program) -> Tensor:" in source
    assert 'weights = program.weight(mesh, "fc/w", [c, n], 0.3536)' in source
    assert "x = reshard(sum_2, mesh, [b, n])  # 0 B forward + 96 B backward" in source
    assert "    return mean(x, [b, n])\n" in source


NUMBERS = tuple(ModelOutput(name=name, dims=("b", "n"), shape=(1,)) for name in ("first", "second"))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        *(
            (network(last=replace(SUM, steps=(Step(result="t1", function=name, operands=("x0",)),))),
             r"layer 'sum': a step of its body is not known: unknown function .* known functions are abs, ")
            for name in ("system", "__class__", "add(", "")
        ),
        (network(Body(problem="Foo: it is odd")), r"'fc' \(dense\) cannot .*: Foo: it is odd; replace"),
        (with_a_loss(Body(problem="aten.foo (model.py:7): odd")), r"'fc' .*: aten.foo \(model.py:7\): odd"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_with_the_reason(graph: Graph, message: str) -> None:
    with pytest.raises(EmitError, match=message):
        emit(make_plan(graph, 1, {}))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (network(), r"'net' has no loss that is known: none of its outputs is a single number; to"),
        (network(last=replace(SUM, outputs=NUMBERS)), "2 of its outputs are single numbers: first, second"),
    ],
)
def test_a_loss_that_is_not_known_is_told(graph: Graph, message: str) -> None:
    with pytest.raises(EmitError, match=message):
        _ = graph.loss_layer


def test_normalisations_of_a_program_that_trains_are_by_the_moments_of_the_batch() -> None:
    operands, epsilon = ("x", 1.0, 0.0, "c1", "c2"), (("epsilon", 0.5),)
    norm = Step(result="t1", function="batch_norm", operands=operands, dims=("b",), options=epsilon)
    kept = Constant(name="c1", dims=("n",)), Constant(name="c2", dims=("n",))
    body = Body(steps=(norm, Step(result="t2", function="relu", operands=("t1",))), constants=kept)
    told = [(step.function, step.operands, step.dims) for step in elementary(body, trains=False).steps]
    assert told == [
        ("subtract", ("x", "c1"), ()), ("add", ("c2", 0.5), ()), ("rsqrt", ("t1_2",), ()),
        ("multiply", ("t1_1", "t1_3"), ()), ("relu", ("t1",), ()),
    ]  # fmt: skip
    told = [(step.function, step.operands, step.dims) for step in elementary(body, trains=True).steps]
    assert told == [
        ("mean", ("x",), ("b",)), ("subtract", ("x", "t1_1"), ()), ("square", ("t1_2",), ()),
        ("mean", ("t1_3",), ("b",)), ("add", ("t1_4", 0.5), ()), ("rsqrt", ("t1_5",), ()),
        ("multiply", ("t1_2", "t1_6"), ()), ("relu", ("t1",), ()),
    ]  # fmt: skip


def test_a_kernel_normalises_by_the_moments_that_are_kept() -> None:
    """In training alone, and where there is a scale and a shift: its gradient is that of a tensor's own moments."""
    operands, options = ("x", "w", "v", "c1", "c2"), (("epsilon", 0.5), ("momentum", 0.1), ("factor", 2.0))
    norm = Step(result="t1", function="batch_norm", operands=operands, dims=("b",), options=options)
    trained, evaluated = (elementary(Body(steps=(norm,)), trains=t, kernels={"normalise"}).steps for t in (True, False))
    assert [step.function for step in trained[:4]] == ["mean", "subtract", "square", "mean"]
    assert [(step.function, step.operands) for step in trained[4:]] == [
        ("multiply", ("t1_4", 2.0)), ("keep", ("c1", "t1_1")), ("keep", ("c2", "t1_5")),
        ("normalise", ("x", "w", "v", "t1_1", "t1_4")),
    ]  # fmt: skip
    assert [(step.function, step.operands[1:]) for step in evaluated] == [
        ("subtract", ("c1",)), ("add", (0.5,)), ("rsqrt", ()), ("multiply", ("t1_3",)), ("multiply", ("w",)),
        ("add", ("v",)),
    ]  # fmt: skip
    without = elementary(
        Body(steps=(replace(norm, operands=("x", "w", 0.0, "c1", "c2")),)), trains=True, kernels={"normalise"}
    )
    assert "normalise" not in [step.function for step in without.steps]


# -- bodies in documents


def document(body: object) -> dict[str, Any]:
    """Return the document of the network, the body of its first layer in place of the right one."""
    found = graph_document(network())
    found["operators"][0]["body"] = body
    return found


def test_a_body_is_what_its_document_says() -> None:
    infinite = Step(result="t3", function="maximum", operands=("t2", float("-inf")))
    pooled = Step(result="t4", function="pool", operands=("t3",), options=(("reduction", "max"),))
    full = replace(DENSE, steps=(*DENSE.steps, infinite, pooled), outputs=SUM.outputs, problem="none")
    graph = network(full, replace(SUM, constants=(Constant(name="c1", dims=("n",)),)))
    text = json.dumps(graph_document(graph), allow_nan=False)
    assert graph_from_document(json.loads(text), DocumentSource(PlanError, "plan.json")) == graph


STEP = {"result": "t1", "function": "exp", "operands": ["x"]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", r"body is '\{'; expected an object"),
        ({"steps": [{"result": "t1", "function": "add"}]}, r"steps\[0\].operands is missing"),
        (
            {"steps": [{**STEP, "operands": [True]}]},
            r"operands\[0\] is True; expected the name of a tensor",
        ),
        (
            {"steps": [{**STEP, "operands": [{"number": "1"}]}]},
            r"number is '1'; expected one of -inf, inf",
        ),
        ({"steps": [{**STEP, "operands": ["y"]}]}, "a step of its body reads 'y', which no step computes"),
        ({"steps": [{**STEP, "function": "system"}]}, "a step of its body is not known: unknown function 'system'"),
        ({"steps": [{**STEP, "operands": ["x", "x"]}]}, "'exp', has 2 operands; expected 1 to 1"),
        ({"steps": [{**STEP, "result": "x"}]}, "two steps of its body compute 'x'"),
        ({"steps": [{**STEP, "options": {"along": "b"}}]}, "'exp', has option along = 'b'; it has none"),
        (
            {"steps": [{**STEP, "function": "pool", "options": {"reduction": "prod"}}]},
            "'pool', has option reduction = 'prod'; it has reduction, count_padding",
        ),
        (
            {"steps": [{**STEP, "function": "concat", "options": {"along": "z"}}]},
            "'concat', has option along = 'z'",
        ),
        (
            {"steps": [{**STEP, "function": "sum", "dims": ["z"]}]},
            r"names dims or inputs that it lacks: \['z'\]",
        ),
        ({"steps": [], "inputs": [{"read": 7, "name": "x", "shape": [4]}]}, "names dims or inputs that it lacks"),
    ],
)
def test_a_document_that_is_no_body_is_refused(body: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        graph_from_document(document(body), DocumentSource(PlanError, "plan.json"))


def test_plans_that_told_what_layers_compute_as_text_are_refused() -> None:
    found = graph_document(network())
    found["operators"][0]["attributes"] = {"forward": '{"steps": []}'}
    with pytest.raises(
        PlanError, match=r"operators\[0\] has the attribute 'forward': the plan is an older .* search again"
    ):
        graph_from_document(found, DocumentSource(PlanError, "plan.json"))


def test_functions_of_points_of_one_tensor_can_come_first() -> None:
    scaled = Step(result="t1", function="multiply", operands=("x", 0.5))
    assert is_before_layout([scaled, Step(result="t2", function="add", operands=("t1", "x"))], "x")
    assert not is_before_layout([scaled, Step(result="t2", function="add", operands=("t1", "w"))], "x")
    assert not is_before_layout([Step(result="t1", function="mean", operands=("x",), dims=("b",))], "x")
