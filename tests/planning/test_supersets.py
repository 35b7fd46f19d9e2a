"""More to choose from never makes a step dearer, whichever search it goes through; and every search has one limit."""

from dataclasses import replace
from typing import Any

import pytest

import pase
from pase.costs import STATES
from pase.graph import Builder, Graph
from pase.graph.operators import dense, elementwise, softmax_loss
from tests.simulation.machines import machine


def _sum_with_itself() -> Graph:
    net = Builder("sum")
    x = net.add(dense, "L0", net.input((8, 8)), out=(("n", 3),))
    net.add(softmax_loss, "loss", net.add(elementwise, "L1", x, x, dims=("b", "n")))
    return net.build()


@pytest.mark.parametrize("more", [{"modes": ["recompute"]}, {"modes": ["zero1"]}, {"stages": "auto"}])
def test_more_modes_and_stages_cost_no_more_where_a_tensor_has_several_readers(more: dict[str, Any]) -> None:
    settings: dict[str, Any] = {
        "devices": 4,
        "machine": machine((0, 1e-7, 10e9), flop_per_s=1e9),
        "cost_model": "alpha_beta",
    }
    plain = pase.search(_sum_with_itself(), **settings)
    assert pase.search(_sum_with_itself(), **settings, **more).total_cost <= plain.total_cost * (1 + 1e-9)


@pytest.mark.parametrize("limit", [3_800_000, 4_000_000, 4_500_000])
def test_recomputation_costs_no_more_and_is_not_refused_within_a_limit_on_memory(limit: int) -> None:
    settings: dict[str, Any] = {"devices": 4, "cost_model": "alpha_beta", "device_memory_bytes": limit}
    graph = pase.load("lenet5")
    plain = pase.search(graph, **settings)
    assert plain.exact
    assert pase.search(graph, modes=["recompute"], **settings).total_cost <= plain.total_cost * (1 + 1e-9)


@pytest.mark.parametrize("modes", [["zero1"], ["zero2"], ["zero1", "zero2", "zero3", "recompute"]])
@pytest.mark.parametrize("share", [0.97, 0.8])
def test_modes_cost_no_more_where_a_gap_is_left(share: float, modes: list[str]) -> None:
    """Buckets of gradients, which are no sum, leave a gap; sharded weights may need more for them than they spare."""
    arguments = {"inputs": 16, "hidden": 512, "layers": 6, "classes": 16}
    graph = pase.load("mlp", batch=64, arguments=arguments)
    settings: dict[str, Any] = {"devices": 8, "machine": "h100", "cost_model": "step"}
    limit = int(share * pase.search(graph, **settings).peak.bytes)
    plain = pase.search(graph, device_memory_bytes=limit, **settings)
    more = pase.search(graph, device_memory_bytes=limit, modes=modes, **settings)
    assert more.total_cost <= plain.total_cost * (1 + 1e-9)


def test_of_modes_that_nearly_cost_the_same_the_best_is_found_in_time() -> None:
    """Between the best bound of sums and the optimum there are many strategies of repeated layers."""
    settings: dict[str, Any] = {"devices": 8, "machine": "a100", "cost_model": "step"}
    settings |= {"device_memory_bytes": 10_300_000_000, "time_limit_s": 10.0}
    graph = pase.load("gpt")
    few, more = (pase.search(graph, modes=own, **settings) for own in (["recompute"], [*STATES[1:], "recompute"]))
    assert few.exact
    assert more.gap < 2.5e-3
    assert more.total_cost <= few.total_cost * (1 + 1e-9)


@pytest.mark.parametrize("share", [1.0, 0.85])
def test_stages_cost_no_more_within_a_limit_on_memory(share: float) -> None:
    """A step of one stage is among those of any number of stages; what fits alone is not refused beside others."""
    arguments = {"inputs": 16, "hidden": 32, "layers": 5, "classes": 16}
    graph = pase.load("mlp", batch=32, arguments=arguments)
    settings: dict[str, Any] = {"devices": 4, "machine": "v100", "cost_model": "step", "micro_batches": 4}
    for stages in (1, 2):
        free = pase.search(graph, stages=stages, **settings)
        limit = int(share * free.peak.bytes)
        asked = {**settings, "modes": ["zero3", "recompute"], "device_memory_bytes": limit}
        alone = pase.search(graph, stages=stages, **asked)
        assert alone.peak.bytes <= limit
        # Within its own peak the free plan fits.
        assert share < 1 or alone.total_cost <= free.total_cost * (1 + 1e-9)
        assert pase.search(graph, stages="auto", **asked).total_cost <= alone.total_cost * (1 + 1e-9)


@pytest.mark.full
def test_modes_cost_no_more_for_a_transformer_within_a_limit_on_memory() -> None:
    settings: dict[str, Any] = {
        "devices": 8,
        "machine": "a100",
        "cost_model": "alpha_beta",
        "device_memory_bytes": 19 * 10**9,
    }
    graph = pase.load("gpt")
    plain = pase.search(graph, **settings)
    more = pase.search(graph, modes=["zero1", "zero2", "zero3", "recompute"], **settings)
    assert more.total_cost <= plain.total_cost * (1 + 1e-9)
    assert more.gap <= plain.gap


def test_a_session_keeps_to_the_memory_of_the_machine_as_a_search_does() -> None:
    free = machine((0, 1e-5, 10e9), flop_per_s=1e12)
    small = replace(free, device=replace(free.device, memory_bytes=46_000))
    graph = pase.load("mlp", batch=16, arguments={"layers": 2, "inputs": 32, "hidden": 64, "classes": 32})
    settings: dict[str, Any] = {"devices": 2, "machine": small, "cost_model": "step"}
    found = pase.search(graph, **settings)
    answer = pase.Session(graph, **settings).plan
    assert found.peak.bytes <= 46_000
    assert answer.total_cost == pytest.approx(found.total_cost, rel=1e-9)
