"""Kernels: what docs/kernels.md says of a layer's, worked out by hand and by loops, beside the cost model's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import pase
from pase.costs import cost_model, traffic_of
from pase.errors import MachineError
from pase.graph import Graph
from pase.machine import Kernels, KernelSample, Machine, Overlap, load_machine, machine_text, parse_machine
from tests.networks import row_of, small_graph, tiny_graph
from tests.simulation.machines import machine

FIGURES = Kernels(
    dtype="float32", launch_s=1e-6, products=0.8, convolutions=0.5, attention=0.4, half_extent=30.0, half_depth=20.0,
    least=0.01, memory=0.9, norms=0.6, functions=0.3, source="a test",
)  # fmt: skip
PEAK, BANDWIDTH = 1e9, 1e8


def place(**figures: float) -> Machine:
    """Return eight devices of 1 GFLOP/s and 100 MB/s."""
    found = machine((0, 1e-6, 1e8), flop_per_s=PEAK)
    device = replace(found.device, memory_bandwidth_bytes_per_s=BANDWIDTH)
    overlap = Overlap(share=0.8, source="a test")
    return replace(found, device=device, overlap=overlap, kernels=replace(FIGURES, **figures))  # type: ignore[arg-type]


def times(graph: Graph, name: str, where: Machine, **splits: int) -> tuple[float, float]:
    """Return the seconds of a layer's forward and of its backward pass."""
    operator, model = graph[name], cost_model("step", where, 8)
    row = row_of(operator, splits)
    traffic = traffic_of(graph, operator, row)
    return float(model.work(traffic.forward)[0]), float(model.work(traffic.backward)[0])


def rate(*, rows: float, columns: float, depth: float, share: float = FIGURES.products) -> float:
    """Return the FLOP/s of a product, as docs/kernels.md has it."""
    return PEAK * share * rows / (rows + 30) * columns / (columns + 30) * depth / (depth + 20)


def test_a_product_by_hand() -> None:
    """Two dense layers of 64 examples, the second one of 32 × 48 weights, on two parts of the batch."""
    graph = pase.load("mlp", arguments={"batch": 64, "inputs": 16, "hidden": 32, "classes": 48, "layers": 2})
    # Bytes go so fast here that only products count, with the sum of a bias' gradient.
    where = place(memory=1e9, norms=1e9, functions=1e9)
    flop = 2 * 32 * 32 * 48
    forward, backward = times(graph, "fc2", where, b=2)
    bias_flop = 32 * 48
    there = flop / rate(rows=32, columns=48, depth=32) + bias_flop / PEAK
    assert forward == pytest.approx(there + 1e-6, rel=1e-9)
    both = flop / rate(rows=32, columns=32, depth=48) + flop / rate(rows=32, columns=48, depth=32)
    # The gradient of the bias is a copy summed: no FLOP, and a launch.
    assert backward == pytest.approx(both + 3e-6, rel=1e-3)


def test_bytes_by_hand() -> None:
    """Where computing takes no time: what a dense layer touches, then its ReLU, which reads and writes its result."""
    graph = pase.load("mlp", arguments={"batch": 64, "inputs": 16, "hidden": 32, "classes": 48, "layers": 2})
    where = place(products=1e9, least=1e9, launch_s=0.0)
    where = replace(where, device=replace(where.device, peak_flop_per_s={"float32": 1e18}))
    forward, _ = times(graph, "fc1", where)
    touched = 4 * (64 * 16 + 16 * 32 + 32 + 64 * 32)
    assert forward == pytest.approx((touched + 2 * 4 * 64 * 32) / (0.9 * BANDWIDTH), rel=1e-9)
    beyond = replace(where, kernels=replace(where.kernels, beyond=0.5, cache_bytes=touched - 1000.0))
    more = times(graph, "fc1", beyond)[0] - forward
    relu = max(2 * 4 * 64 * 32 - (touched - 1000), 0)
    assert more == pytest.approx((1000 + relu) / (0.5 * BANDWIDTH), rel=1e-9)


def test_no_product_goes_below_the_least() -> None:
    graph = pase.load("mlp", arguments={"batch": 1, "inputs": 16, "hidden": 32, "classes": 48, "layers": 2})
    where = place(memory=1e9, functions=1e9, least=0.25, launch_s=0.0)
    assert rate(rows=1, columns=48, depth=32) < 0.25 * PEAK
    assert times(graph, "fc2", where)[0] == pytest.approx((2 * 32 * 48) / (0.25 * PEAK) + 48 / PEAK, rel=1e-9)


def test_extents_of_slower_types_are_smaller() -> None:
    """On units of a quarter of the speed, a quarter of the rows has half of the share."""
    graph = pase.load("mlp", arguments={"batch": 64, "inputs": 16, "hidden": 32, "classes": 48, "layers": 2})
    where = place(memory=1e9, functions=1e9, launch_s=0.0)
    fast = replace(where, device=replace(where.device, peak_flop_per_s={"float32": PEAK, "bfloat16": 4 * PEAK}))
    fast = replace(fast, kernels=replace(fast.kernels, dtype="bfloat16", half_extent=120.0, half_depth=80.0))
    assert times(graph, "fc2", fast) == pytest.approx(times(graph, "fc2", where), rel=1e-12)
    low = graph.in_precision("bf16")
    model = cost_model("step", fast, 8, low.precision)
    traffic = traffic_of(low, low["fc2"], np.array([[1] * len(low["fc2"].extents)], dtype=np.int32))
    share = 64 / (64 + 120) * 48 / (48 + 120) * 32 / (32 + 80)
    expected = 2 * 64 * 32 * 48 / (4 * PEAK * 0.8 * share) + 64 * 48 / PEAK
    assert float(model.work(traffic.forward)[0]) == pytest.approx(expected, rel=1e-9)


def test_recurrent_products_follow_one_another() -> None:
    """Of a stack of LSTMs each layer and each step is a product of its own, of the batch's rows."""
    graph = small_graph("rnnlm")
    operator = graph["lstm"]
    where = place(memory=1e9, norms=1e9, functions=1e9, launch_s=0.0)
    steps = operator.extents["l"] * operator.extents["s"]
    with_launches = replace(where, kernels=replace(where.kernels, launch_s=1.0))
    launches = times(graph, "lstm", with_launches)[0] - times(graph, "lstm", where)[0]
    # Each layer's product with what it reads and with the step before; what it keeps of them is written besides.
    assert launches == pytest.approx(2 * steps + len(operator.intermediates), abs=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_one_kernel_computes_its_scores_again(causal: bool) -> None:
    torch = pytest.importorskip("torch")

    class Attends(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.of = torch.nn.Linear(8, 24)

        def forward(self, x: object) -> object:
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.of(x).chunk(3, -1))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).sum()

    graph = pase.load((Attends(), {"x": torch.zeros(3, 16, 8)}))
    (name,) = (operator.name for operator in graph.operators if operator.kind == "attention")
    where = place(memory=1e12, norms=1e12, functions=1e12, launch_s=0.0)
    forward, backward = times(graph, name, where)
    # Query i of 16 attends to i keys.
    pairs = sum(range(1, 17)) if causal else 16 * 16
    product = 2 * 3 * 2 * pairs * 4 / (PEAK * 0.4 * (16 / 46) ** 2)
    softmax = (1 + 4) * 3 * 2 * 16 * 16 / PEAK
    assert forward == pytest.approx(2 * product + softmax, rel=1e-9)
    assert backward == pytest.approx(5 * product + softmax, rel=1e-9)
    split, _ = times(graph, name, where, s=2)
    # Half of the queries, each with all keys: a mask is computed with.
    assert split == pytest.approx(
        (2 * 2 * 3 * 2 * 8 * 16 * 4) / (PEAK * 0.4 * (8 / 38) * (16 / 46)) + softmax / 2, rel=1e-9
    )


def test_thin_parts_cost_more_than_their_work() -> None:
    """Each device's time is more than an eighth of what one device would take, and without kernels it is an eighth."""
    graph = pase.load("mlp", arguments={"batch": 64, "inputs": 16, "hidden": 32, "classes": 48, "layers": 2})
    for where, is_more in ((place(launch_s=0.0), True), (replace(place(), kernels=None), False)):
        device = replace(where.device, memory_bandwidth_bytes_per_s=None)
        where = replace(where, device=device)
        parts, whole = times(graph, "fc2", where, b=8)[0], times(graph, "fc2", where)[0]
        assert (parts > 1.2 * whole / 8) == is_more


def test_other_cost_models_do_not_look_at_it() -> None:
    graph = tiny_graph()
    for name in ("paper", "alpha_beta", "program", "ring"):
        with_kernels, without = (
            pase.search(graph, 8, machine=where, cost_model=name) for where in (place(), replace(place(), kernels=None))
        )
        assert with_kernels.total_cost == without.total_cost
        assert with_kernels.layers == without.layers


def test_files_have_them(tmp_path: Path) -> None:
    sample = KernelSample(
        what="products", dtype="float32", extents=(2, 3, 4, 1), flop=48.0, touched_bytes=104.0, time_s=1e-6,
        predicted_s=2e-6,
    )  # fmt: skip
    where = place(error=0.5, beyond=0.2, cache_bytes=1e6)
    where = replace(where, kernels=replace(where.kernels, samples=(sample,)))
    again = parse_machine(machine_text(where), source="a text")
    assert again == where
    assert again.kernels is not None
    assert again.kernels.samples == (sample,)
    plan = pase.search(tiny_graph(), 8, machine=where, cost_model="step")
    plan.save(tmp_path / "plan.json")
    assert pase.load_plan(tmp_path / "plan.json") == plan
    assert "samples" not in (tmp_path / "plan.json").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'dtype = "float32"',
            'dtype = "bfloat16"',
            "kernels.dtype is bfloat16, for which device.peak_flop_per_s has no",
        ),
        ("products = 0.8", "products = 0.0", "kernels.products is 0.0; expected a number above 0"),
        ("launch_s = 1e-06", 'launch_s = "1 us"', "kernels.launch_s is '1 us'; expected a number of 0 or more"),
        ("memory = 0.9", "memory = 0.9\nmemry = 1", "kernels.memry is not a key of a machine file; did you mean m"),
    ],
)
def test_what_is_wrong_is_told(old: str, new: str, message: str) -> None:
    text = machine_text(place())
    assert old in text
    with pytest.raises(MachineError, match=message):
        parse_machine(text.replace(old, new), source="a text")


def test_presets_that_have_figures_say_where_they_are_from() -> None:
    known = {name: load_machine(name).kernels for name in pase.machine.preset_names()}
    assert {name for name, figures in known.items() if figures} == {"a100", "h100", "h200", "v100"}
    for figures in known.values():
        if figures:
            assert "estimate" in figures.source
            assert all(0 < getattr(figures, what) <= 1 for what in ("products", "convolutions", "attention", "memory"))
