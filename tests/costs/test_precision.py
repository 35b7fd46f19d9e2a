"""Costs and memory by type, beside bytes that are counted by hand from shapes and types."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pase import evaluate, load_plan, search
from pase.analysis.differences import difference
from pase.common.documents import DocumentSource
from pase.costs import StepMemory, cost_model, traffic_of, transfer_bytes
from pase.costs.edges import edge_layouts
from pase.costs.memory import keeping
from pase.costs.traffic import LayerTraffic
from pase.errors import GraphError, MachineError, PlanError
from pase.graph import ITEMSIZES, PRECISIONS, Builder, Graph, Precision, precision_of
from pase.graph.operators import attention, batch_norm, conv2d, dense, elementwise, embedding, layer_norm, softmax_loss
from pase.machine import Machine, load_machine
from pase.planning.plan import Plan
from pase.planning.plan_file import plan_document, plan_from_document
from pase.sharding.traffic import edge_bytes, flows
from tests.networks import row_of

MIXED, BF16, FP8 = (PRECISIONS[name] for name in ("bf16-mixed", "bf16", "fp8-mixed"))
B, C, N, K = 8, 16, 32, 4
"""Examples, and the features of what is read, between the layers, and of classes."""


def _network(precision: Precision | str = "float32") -> Graph:
    net = Builder("net", precision=precision)
    x = net.add(dense, "fc1", net.input((B, C)), out=(("n", N),), activation="relu")
    x = net.add(layer_norm, "norm", x, dims=("b", "d"))
    x = net.add(dense, "fc2", x, out=(("n", K),))
    net.add(softmax_loss, "loss", x)
    return net.build()


def _traffic(graph: Graph, name: str, **split: int) -> LayerTraffic:
    operator = graph[name]
    return traffic_of(graph, operator, row_of(operator, split))


def _sent(graph: Graph, name: str, **split: int) -> dict[str, int]:
    return {message.tensor: int(message.size_bytes[0]) for message in _traffic(graph, name, **split).messages}


def test_mixed_policies_type_what_autocast_does() -> None:
    net = Builder("net", precision="bf16-mixed")
    x = net.add(embedding, "tokens", net.input((2, 8)), vocabulary=32, size=16)
    y = net.add(layer_norm, "norm", x)
    q, k, v = (net.add(dense, name, y, out=(("h", 2), ("k", 8)), lead=("b", "s")) for name in "qkv")
    z = net.add(attention, "attention", q, k, v)
    z = net.add(dense, "o", net.reshape(z, (2, 8, 16)), out=(("n", 16),), lead=("b", "s"))
    net.add(elementwise, "add", x, z, dims=("b", "s", "d"))
    types = net.build().types
    written = {name: found.writes[0] for name, found in types.items()}
    low = dict.fromkeys(["q", "k", "v", "attention", "o"], "bfloat16")
    assert written == {**dict.fromkeys(["tokens", "norm", "add"], "float32"), **low}
    # Whole numbers stay what they are; a product takes its operands, and its bias, in the low type.
    assert types["tokens"].reads == ("int32", "float32")
    assert types["q"].reads == ("float32",) * 3
    assert types["q"].operands == ("bfloat16",) * 3
    assert types["add"].operands == types["add"].reads == ("float32", "bfloat16")


def test_batch_norm_and_convolutions_stay_low_between_them() -> None:
    net = Builder("net", precision="fp16-mixed")
    x = net.add(conv2d, "conv1", net.input((2, 3, 8, 8)), out=4, kernel=3, padding=1)
    x = net.add(batch_norm, "norm", x, activation="relu")
    net.add(conv2d, "conv2", x, out=4, kernel=3)
    types = net.build().types
    assert [found.writes for found in types.values()] == [("float16",)] * 3
    assert types["norm"].operands == ("float16", "float32", "float32")
    assert types["norm"].statistics == "float32"


def test_products_by_weights_alone_are_in_fp8() -> None:
    types = _network("fp8-mixed").types
    assert types["fc2"].operands[:2] == ("float8", "float8")
    assert (types["fc2"].product, types["fc2"].writes) == ("float8", ("bfloat16",))
    net = Builder("net", precision="fp8-mixed")
    net.add(attention, "attention", *(net.input((2, 2, 8, 4)) for _ in range(3)))
    assert net.build().types["attention"].product == "bfloat16"


@pytest.mark.parametrize("name", ["float32", "bf16"])
def test_one_type_for_all_is_a_factor(name: str) -> None:
    graph, half = _network(), _network(name)
    size = ITEMSIZES[PRECISIONS[name].parameters]
    for operator in graph.operators:
        for split in ({"b": 2}, {"n": 2}, {"c": 2}):
            row = row_of(operator, split)
            ours, theirs = traffic_of(half, operator, row), traffic_of(graph, operator, row)
            assert [size * m.size_bytes / 4 for m in theirs.messages] == [m.size_bytes for m in ours.messages]
    ours, theirs = (search(each, 1, machine="a100", keep_batch=True).memory.kept_bytes for each in (half, graph))
    labels = 4 * B  # whole numbers
    assert ours - labels == size * (theirs - labels) // 4


def test_sums_have_the_types_of_what_is_summed() -> None:
    graph = _network("bf16-mixed")
    # Data parallelism sums gradients of weights in the policy's type, whatever the products are in.
    assert _sent(graph, "fc1", b=2) == {"gradient of w": 4 * C * N, "gradient of bias": 4 * N}
    # A product's own partial sums are of what it writes; those of what it reads, of that as it came.
    assert _sent(graph, "fc2", c=2)["y"] == 2 * B * K
    assert _sent(graph, "fc2", n=2)["gradient of x"] == 4 * B * N
    assert _sent(graph, "norm", d=2)["moments"] == 4 * 2 * B
    summed_low = graph.in_precision(replace(MIXED, collectives="bfloat16"))
    assert _sent(summed_low, "fc1", b=2) == {"gradient of w": 2 * C * N, "gradient of bias": 2 * N}


def test_edges_carry_what_the_producer_wrote() -> None:
    graph = _network("bf16-mixed")
    for number, size in ((0, 2), (1, 4)):
        edge = graph.edges[number]
        rows = [np.ones((1, len(graph[name].extents)), dtype=np.int32) for name in (edge.producer, edge.consumer)]
        rows[0][0, 0] = 4
        moved = transfer_bytes(graph, edge, *edge_layouts(graph, edge, *rows))
        # The consumer holds a quarter, and fetches the rest.
        assert moved.forward.item() == size * B * N * 3 / 4


def test_work_touches_bytes_by_type_and_counts_casts() -> None:
    graph = _network("bf16-mixed")
    forward, backward = (getattr(_traffic(graph, "fc2"), name) for name in ("forward", "backward"))
    read = B * N + N * K + K
    # What is cast is read in float32 and written in bfloat16, then read in that.
    assert forward.touched_bytes.item() == (4 + 2 + 2) * read + 2 * B * K
    # Read again as it was taken; gradients are written in bfloat16, and cast back.
    assert backward.touched_bytes.item() == 2 * read + 2 * B * K + (2 + 2 + 4) * read
    assert forward.product_flop.item() == 2 * B * N * K
    assert forward.flop.item() == 2 * B * N * K + B * K


def test_products_run_at_the_peak_of_their_type() -> None:
    graph, machine = _network("bf16-mixed"), load_machine("a100")
    model = cost_model("alpha_beta", machine, 8, graph.precision)
    fast = replace(model, memory_bytes_per_s=float("inf"))
    found = fast.work(_traffic(graph, "fc2").forward)
    assert found.item() == pytest.approx(2 * B * N * K / 312e12 + B * K / 19.5e12, rel=1e-12)
    # Under Eq. 1 r is by the same peak.
    slow = min(level.bandwidth_bytes_per_s for level in machine.levels_spanned(8))
    assert cost_model("paper", machine, 8, graph.precision).flop_per_byte == 312e12 / slow


def test_memory_is_counted_by_hand() -> None:
    """One device: every tensor that is kept, by its shape and type, and what is there in the update, its peak."""
    plan = search(_network("bf16-mixed"), 1, machine="a100", optimiser="adamw", keep_batch=True)
    weights = C * N + N + 2 * N + N * K + K
    found = plan.memory
    assert (found.weights_bytes, found.gradients_bytes) == (4 * weights, 4 * weights)
    assert found.optimiser_bytes == 8 * weights
    # The data and the labels; two tensors of the largest weight.
    assert (found.activations_bytes, found.buffers_bytes) == (4 * B * C + 4 * B, 2 * 4 * C * N)
    kept = 2 * (B * C + C * N + N) + 2 * B * N  # fc1: its operands, and what relu makes
    kept += 4 * B * N + 4 * 2 * B  # norm: what it reads, in float32, and its moments
    kept += 2 * (B * N + N * K + K)  # fc2: its operands
    kept += 4 * B * K + 4 * B  # loss: the logits in float32, a number for each row; labels are those of the step
    assert sum(_kept(plan).values()) == kept
    with_masters = replace(BF16, masters="float32", moments="float32")
    assert replace(plan, graph=plan.graph.in_precision(with_masters)).memory.optimiser_bytes == (4 + 8) * weights


def test_a_tensor_that_two_types_need_is_kept_in_both() -> None:
    net = Builder("net", precision="bf16-mixed")
    x = net.add(dense, "fc", net.input((B, C)), out=(("n", N),))
    x = net.add(layer_norm, "norm", x, dims=("b", "d"))
    a, b = (net.add(dense, name, x, out=(("n", K),)) for name in ("left", "right"))
    net.add(elementwise, "add", a, b, dims=("b", "n"))
    plan = search(net.build(), 1, machine="a100", keep_batch=True)
    layers = _kept(plan)
    # Autocast casts an activation anew for each product.
    assert layers["left"] == layers["right"] == 2 * (B * N + N * K + K)
    assert layers["norm"] == 4 * B * N + 4 * 2 * B


def _kept(plan: Plan) -> dict[str, int]:
    """Return what each layer keeps of activations, and of weights in another type, on one device."""
    graph = plan.graph
    whole = [np.ones((1, len(operator.extents)), dtype=np.int32) for operator in graph.operators]
    memory = StepMemory(graph=graph, keeps=keeping(graph), configurations=whole, optimiser="sgd")
    found = {}
    for v, (operator, layer) in enumerate(zip(graph.operators, memory.layers, strict=True)):
        casts = memory.lasting(v, layer, has_casts=True) - memory.lasting(v, layer, has_casts=False)
        found[operator.name] = int((memory.waiting(v, layer) + casts)[0])
    return found


def test_programs_bytes_are_by_type(tmp_path: Path) -> None:
    plan = search(_network(), 4, machine="a100")
    mixed = replace(plan, graph=plan.graph.in_precision("bf16-mixed"))
    edge = plan.graph.edges[0]
    assert [2 * size for size in edge_bytes(mixed, edge)] == [*edge_bytes(plan, edge)]
    own = {(flow.tensor, flow.movement): flow.total_bytes for flow in flows(plan) if flow.tensor.startswith("gradient")}
    for flow in flows(mixed):
        if (flow.tensor, flow.movement) in own and flow.tensor == "gradient of w":
            assert flow.total_bytes == own[flow.tensor, flow.movement]


def test_a_plan_says_its_types_and_is_read_back(tmp_path: Path) -> None:
    plan = search(_network(), 4, machine="h100", precision="fp8-mixed")
    assert plan.precision == FP8
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert document["precision"] == {
        "name": "fp8-mixed",
        "parameters": "float32",
        "products": "float8",
        "results": "bfloat16",
        "gradients": "float32",
        "collectives": "float32",
        "moments": "float32",
    }
    assert load_plan(tmp_path / "plan.json") == plan
    # Costs and memory are of the types: with others they are wrong.
    document["precision"]["results"] = "float32"
    with pytest.raises(PlanError, match=r"precision.name is 'fp8-mixed', whose types are others"):
        _read(document)
    document["precision"]["name"] = "own"
    with pytest.raises(PlanError, match=r"is .*, but the rest of the file makes it"):
        _read(document)
    document["precision"] = {**document["precision"], "parameters": "bfloat16"}
    with pytest.raises(PlanError, match=r"precision.parameters is 'bfloat16', of 2 bytes; the graph .* numbers of 4"):
        _read(document)
    document["precision"]["parameters"] = "bf16"
    with pytest.raises(PlanError, match=r"precision.parameters is 'bf16'; expected one of float64, float32"):
        _read(document)


def _read(document: object) -> Plan:
    return plan_from_document(document, DocumentSource(PlanError, "plan.json"))


def test_plans_of_earlier_versions_are_float32() -> None:
    plan = search(_network(), 4)
    document = plan_document(plan)
    del document["precision"]
    assert _read(document) == plan
    assert plan.precision == PRECISIONS["float32"]


def test_plans_in_bf16_are_read_back() -> None:
    plan = search(_network(), 4, machine="a100", precision="bf16")
    assert _read(plan_document(plan)) == plan


def test_the_models_own_types_stay_where_none_are_asked_for() -> None:
    plan = search(_network("bf16"), 4, machine="a100")
    assert plan.precision == BF16
    assert (
        search(plan.graph, 4, machine="a100", precision="float32").total_cost
        == search(_network(), 4, machine="a100").total_cost
    )
    assert evaluate(_network(), plan, machine="a100").precision == BF16
    other = search(_network(), 4, machine="a100")
    with pytest.raises(PlanError, match=r"not comparable: they are of bf16 and float32; .*--precision"):
        difference(plan, other)


def test_a_type_without_a_peak_is_refused_in_one_line() -> None:
    expected = (
        r"^machine v100: device.peak_flop_per_s has no peak for bfloat16; it is given for float16, float32, "
        r"float64: take another precision or machine, or give that peak in a machine file of your own$"
    )
    for model in ("paper", "alpha_beta"):
        with pytest.raises(MachineError, match=expected):
            search(_network(), 4, machine="v100", precision="bf16-mixed", cost_model=model)
    assert isinstance(load_machine("v100"), Machine)
    assert search(_network(), 4, machine="v100", precision="fp16-mixed").exact


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(GraphError, match=r"precision 'bf16-mix'.*did you mean 'bf16-mixed'"):
        precision_of("bf16-mix")


def test_operators_without_a_body_have_types_by_their_kind() -> None:
    graph = _network("bf16-mixed")
    bare = tuple(replace(operator, body=None) for operator in graph.operators)
    written = {name: types.writes for name, types in replace(graph, operators=bare).types.items()}
    assert written == {name: types.writes for name, types in graph.types.items()}
