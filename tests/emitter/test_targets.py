"""Programs of each target as text: the same blocks, other imports, and what they return."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

from pase.errors import EmitError
from pase.graph import Graph
from pase.graph.body import Body, Constant, ModelOutput, Step
from pase.planning.plan_file import graph_hash, plan_document
from pase.targets.programs import emit
from tests.emitter.test_emit import check_style, plans
from tests.emitter.test_forward import DENSE, SUM, network, with_a_loss
from tests.runtime.networks import small
from tests.runtime.plans import make_plan


def blocks(source: str) -> list[str]:
    """The statements of `build`, without the line that declares it."""
    (build,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return [ast.unparse(node) for node in build.body]


def test_targets_have_the_same_blocks() -> None:
    for plan in plans():
        ours, others = emit(plan, target="torch"), emit(plan, target="mesh_tensorflow")
        assert blocks(ours) == blocks(others)
        assert "mesh_tensorflow" not in ours
        assert "mtf" not in ours
        assert "torch" not in others


def test_programs_for_pytorch_are_formatted_and_lint_clean(tmp_path: Path) -> None:
    found = [*plans(), *(make_plan(graph, 2, {}) for graph in (network(), with_a_loss(), with_logits()))]
    check_style((emit(plan, target="torch") for plan in found), tmp_path)


def test_a_program_for_pytorch_says_how_it_is_run() -> None:
    source = emit(make_plan(small("mlp"), 4, {}), target="torch")
    assert "    torchrun --nproc-per-node 4 FILE --steps 10 " in source
    assert "`python FILE` starts its 4 processes" in source
    assert "from pase.targets.torch.layers import dims, " in source
    assert "def build(program: Program) -> Tensor:" in source
    assert source.endswith('if __name__ == "__main__":\n    main(build, num_devices=4)\n')


def with_logits() -> Graph:
    """A model that returns its loss and what the loss is made of."""
    graph = with_a_loss()
    fc, total, loss = graph.operators
    assert total.body is not None
    outputs = (ModelOutput(name="logits", dims=("n", "b"), shape=(6, 4)),)
    return replace(graph, operators=(fc, replace(total, body=replace(total.body, outputs=outputs)), loss))


def test_a_program_returns_the_outputs_beside_the_loss() -> None:
    plan = make_plan(with_logits(), 2, {"fc": {"n": 2}, "loss": {"b": 2}})
    source = emit(plan, target="torch")
    assert "def build(program: Program) -> tuple[Tensor, Outputs]:" in source
    assert "    logits_out = arrange(sum_2, [n, b])\n" in source
    assert "    loss = mean(x, [b, n])\n" in source
    assert '    outputs: Outputs = {"logits": (logits_out, (6, 4))}\n    return loss, outputs\n' in source


def test_a_program_of_a_model_without_a_loss_returns_its_outputs() -> None:
    plan = make_plan(network(), 2, {"fc": {"n": 2}})
    source = emit(plan, target="torch")
    assert "def build(program: Program) -> Outputs:" in source
    assert '    return {"scores": (sum_2, (4, 6))}\n' in source
    assert 'program.weight(mesh, "fc/w", [c, n], 0.3536)' in source


@pytest.mark.parametrize("graph", [network(), with_a_loss(), replace(small("mlp"), framework="onnx")])
def test_imported_models_have_no_programs_for_mesh_tensorflow(graph: Graph) -> None:
    plan = make_plan(graph, 2, {})
    with pytest.raises(EmitError, match=rf"^'{graph.name}' is an imported model: .* use --target torch, or pase.paral"):
        emit(plan, target="mesh_tensorflow")
    assert emit(plan) == emit(plan, target="torch")


def test_an_output_that_cannot_be_computed_is_left_out_and_told() -> None:
    graph = with_logits()
    fc, total, loss = graph.operators
    assert loss.body is not None
    own = replace(loss.body, outputs=(), problem="Foo: it is odd")
    fc = replace(fc, body=replace(DENSE, outputs=(ModelOutput(name="hidden", dims=("b", "n"), shape=(4, 6)),)))
    odd = replace(loss, name="odd", body=replace(own, outputs=(ModelOutput(name="odd", dims=(), shape=(2,)),)))
    edge = replace(graph.incoming["loss", 0], consumer="odd")
    graph = replace(graph, operators=(fc, total, loss, odd), edges=(*graph.edges, edge))
    source = emit(make_plan(graph, 2, {}), target="torch")
    assert "Its output odd is left out, as layer odd cannot be written: Foo: it is odd." in source
    assert '"hidden": (fc, (4, 6)), "logits"' in source


def test_batch_normalisation_is_a_layer_of_pytorch_that_keeps_its_statistics() -> None:
    options = (("epsilon", 1e-5), ("momentum", 0.1), ("factor", 1.25))
    step = Step(result="y", function="batch_norm", operands=("t1", 1.0, 0.0, "m", "v"), dims=("b",), options=options)
    constants = (Constant(name="m", dims=("n",)), Constant(name="v", dims=("n",)))
    body = Body(steps=(DENSE.steps[0], step), constants=constants, inputs=DENSE.inputs)
    plan = make_plan(network(first=body, last=SUM), 2, {"fc": {"b": 2}})
    source = emit(plan, target="torch")
    assert 'm = program.statistic(mesh, "fc/m", [n])\n' in source
    assert 'v = program.statistic(mesh, "fc/v", [n], initial=1.0)\n' in source
    layer = "batch_norm(program, product(x, weights, [b, n]), 1, 0, [b], kept=[m, v], epsilon=1e-05, momentum=0.1, "
    assert f"{layer}factor=1.25)" in "".join(line.strip() + " " * line.endswith(",") for line in source.splitlines())


def test_constants_are_refused_for_mesh_tensorflow() -> None:
    graph = small("mlp")
    first, *others = graph.operators
    assert first.body is not None
    body = replace(first.body, constants=(Constant(name="m", dims=("n",)),))
    graph = replace(graph, operators=(replace(first, body=body), *others))
    with pytest.raises(
        EmitError, match=r"layer 'fc1' \(dense\) computes with constants, which programs for mesh_tensor"
    ):
        emit(make_plan(graph, 2, {}), target="mesh_tensorflow")


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(EmitError, match="unknown target 'torhc': did you mean 'torch'"):
        emit(make_plan(small("mlp"), 2, {}), target="torhc")


def test_where_a_model_came_from_stands_in_its_plan_and_not_in_its_hash() -> None:
    graph = with_a_loss()
    plan = make_plan(replace(graph, framework="torch"), 2, {})
    assert graph_hash(plan.graph) == graph_hash(graph)
    document = json.loads(json.dumps(plan_document(plan)))
    assert document["graph"]["framework"] == "torch"
    without = json.loads(json.dumps(plan_document(make_plan(graph, 2, {}))))
    assert "framework" not in without["graph"]
