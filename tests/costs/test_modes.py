"""What modes of layers cost and hold, beside the closed forms of ZeRO's states and of recomputation."""

from typing import Any

import numpy as np
import pytest

import pase
from pase.costs import AlphaBetaCostModel, StepMemory, cost_model
from pase.costs.choice_tables import KnownChoices, choice_tables
from pase.costs.choices import Held, LayerChoices
from pase.costs.memory import keeping
from pase.costs.states import STATES, ModeSpace
from pase.graph import Builder, Graph
from pase.graph.operators import dense, softmax_loss
from pase.graph.parts import cuts, stage, with_cuts
from tests.simulation.machines import machine

BYTES_PER_S, FLOP_PER_S = 1e9, 1e12
MACHINE = machine((0, 0.0, BYTES_PER_S), flop_per_s=FLOP_PER_S)
B, C, N = 8, 16, 24
WEIGHTS = 4 * C * N


def _graph() -> Graph:
    net = Builder("two")
    x = net.add(dense, "fc1", net.input((B, C)), out=(("n", N),), bias=False)
    x = net.add(dense, "fc2", x, out=(("n", 10),), bias=False)
    net.add(softmax_loss, "loss", x)
    return with_cuts(net.build())


def _first_layer(devices: int, splits: tuple[int, ...], optimiser: str = "adam", **more: Any) -> LayerChoices:
    graph = _graph()
    model = cost_model("alpha_beta", MACHINE, devices)
    only = {"fc1": np.array([splits], dtype=np.int32)}
    space = ModeSpace(states=STATES, recompute=True)
    tables = choice_tables(
        more.get("graph", graph), devices, model, space, known=KnownChoices(), only=only, is_whole=True,
        links=more.get("links", (None, None)),
    )  # fmt: skip
    memory = StepMemory(
        graph=tables.graph, keeps=keeping(graph), configurations=tables.configurations, optimiser=optimiser,
        modes=tables.layers, micro_batches=2,
    )  # fmt: skip
    layer = tables.layers[0]
    lasting, waiting = memory.lasting(0, layer, has_casts=True), memory.waiting(0, layer)
    return layer.holding(lasting.astype(np.float64), waiting.astype(np.float64))


def _held(modes: LayerChoices) -> Held:
    """What is there of one of two micro-batches, beside the gradients of another: data are those of both."""
    assert modes.held is not None
    return modes.held


def _of(modes: LayerChoices, state: str, *, again: bool = False) -> int:
    return int(np.flatnonzero((modes.state == STATES.index(state)) & (modes.again == again))[0])


@pytest.mark.parametrize("k", [2, 4, 8])
def test_states_send_and_hold_what_the_table_says(k: int) -> None:
    """Split by the batch over k devices, all of which hold the weights: n bytes each."""
    graph = _graph()
    assert list(graph["fc1"].extents) == ["b", "n", "c"]
    modes = _first_layer(k, (k, 1, 1))
    figures, held = modes.figures, _held(modes)
    gather = (k - 1) / k * WEIGHTS / BYTES_PER_S  # of n bytes over k, and a reduce-scatter likewise
    work = 2 * 2 * B * C * N / k / FLOP_PER_S  # forward, and the gradient of the weights: that of data is none
    expected = {
        "replicated": (work, 2 * gather, 1.0, 1.0, 1.0),
        "zero1": (work, 2 * gather, 1.0, 1.0, 1 / k),
        "zero2": (work + gather, gather, 1.0, 1 / k, 1 / k),
        # What it reads is data: its backward pass needs no weight.
        "zero3": (work + 2 * gather, 0.0, 1 / k, 1 / k, 1 / k),
    }
    for state, (repeated, once, weights, gradients, moments) in expected.items():
        c = _of(modes, state)
        assert figures.repeated[c] == pytest.approx(repeated, rel=1e-12)
        assert figures.once[c] == pytest.approx(once, rel=1e-12, abs=1e-18)
        given = 2 * 4 * B * C / k
        assert held.static[c] == pytest.approx(WEIGHTS * (weights + gradients + 2 * moments) + given, rel=1e-12)


def test_weights_in_pieces_are_gathered_for_every_pass_that_needs_them() -> None:
    k, size = 4, 4 * N * 10
    graph = _graph()
    model = cost_model("alpha_beta", MACHINE, k)
    only = {"fc2": np.array([(k, 1, 1)], dtype=np.int32)}
    tables = choice_tables(
        graph, k, model, ModeSpace(states=STATES, recompute=True), known=KnownChoices(), only=only, is_whole=True
    )
    modes = tables.layers[1]
    gather = (k - 1) / k * size / BYTES_PER_S
    repeated, (kept, again, whole) = modes.figures.repeated, (
        _of(modes, "zero3"), _of(modes, "zero3", again=True), _of(modes, "replicated")
    )  # fmt: skip
    # Forward, backward, and the gradient's reduce-scatter; once more where the layer is computed again.
    assert repeated[kept] - repeated[whole] == pytest.approx(3 * gather, rel=1e-9)
    forward = 2 * B * N * 10 / k / FLOP_PER_S
    assert repeated[again] - repeated[kept] == pytest.approx(gather + forward, rel=1e-9)


def test_what_no_dim_of_its_part_can_share_stays_whole() -> None:
    """Of a part of 16 x 8 the first dim can be shared by 2; with 3 parts of n, 24 / 3 = 8 can, too; by 5 none can."""
    assert set(_first_layer(4, (2, 2, 1)).state.tolist()) == {0, 1, 2, 3}
    # One device for each part: nobody to share with.
    assert set(_first_layer(4, (1, 4, 1)).state.tolist()) == {0}


def test_a_recomputed_layer_keeps_nothing_and_works_forward_once_more() -> None:
    modes = _first_layer(2, (1, 1, 2))
    kept, again = _of(modes, "replicated"), _of(modes, "replicated", again=True)
    figures, held = modes.figures, _held(modes)
    forward = 2 * B * C * N / 2 / FLOP_PER_S
    # Parts of sums over c: an all-reduce, or its half where it ends on the edge to one reader, as here.
    scatter = 1 / 2 * 4 * B * N / BYTES_PER_S
    assert figures.repeated[again] - figures.repeated[kept] == pytest.approx(forward + scatter, rel=1e-12)
    # Each micro-batch has its own data, which it keeps; of what fc1 writes fc2 keeps its part.
    assert held.kept[kept] == held.kept[again] == 4 * B * C / 2


def test_a_stage_pays_for_what_it_is_handed_and_hands_over() -> None:
    graph = _graph()
    first, second = stage(graph, 0, 1), stage(graph, 1, 3)
    link = AlphaBetaCostModel.of(MACHINE, 2).links[0]
    alone, behind = (_first_layer(2, (2, 1, 1), graph=first, links=links) for links in ((None, None), (None, link)))
    # The gradient of what it wrote comes back in one message; what it gave away stays there.
    handed = 4 * B * N / 2
    c = _of(alone, "replicated")
    assert behind.figures.repeated[c] - alone.figures.repeated[c] == pytest.approx(handed / BYTES_PER_S, rel=1e-12)
    within = _first_layer(2, (2, 1, 1))
    assert _held(behind).kept[c] - _held(within).kept[_of(within, "replicated")] == handed
    assert [edge.consumer for edge in second.received] == ["fc2"]
    assert second.has_gradient(second["fc2"], 0)


def test_a_weight_of_two_stages_is_added_up_once_a_step() -> None:
    graph = with_cuts(pase.load("gpt", batch=4, arguments={"layers": 2, "model_width": 32, "heads": 4, "steps": 8}))
    link = AlphaBetaCostModel.of(MACHINE, 2).links[0]
    model = cost_model("alpha_beta", MACHINE, 1)
    at = cuts(graph)[2]
    tables = (
        choice_tables(part, 1, model, ModeSpace(), known=KnownChoices(), links=(link, link))
        for part in (stage(graph, 0, at), stage(graph, at, len(graph.operators)))
    )
    size = 4 * 50257 * 32
    for stage_tables, name in zip(tables, ("tokens", "fc"), strict=True):
        once = [float(layer.figures.once[0]) for layer in stage_tables.layers]
        own = stage_tables.graph.index[name]
        assert once[own] == pytest.approx(size / BYTES_PER_S, rel=1e-12)
        assert sum(once) == once[own]


@pytest.mark.parametrize("micro_batches", [1, 64])
def test_what_is_sent_most_in_a_step_stays_within_nodes(micro_batches: int) -> None:
    """Sums over c go with each micro-batch, those of the weights' gradient once a step: 4 devices, 2 a node.

    Two devices add up n bytes by sending n, and half of that where a part is all that each needs (the loss makes the
    rest); two of a node share the link to the other node.
    """
    where = machine((2, 0.0, 1e9), (0, 0.0, 1e8), flop_per_s=FLOP_PER_S)
    graph = _graph()
    tables = choice_tables(
        graph, 4, cost_model("alpha_beta", where, 4), ModeSpace(), known=KnownChoices(), is_whole=True,
        only={"fc2": np.array([[2, 1, 2]], dtype=np.int32)}, micro_batches=micro_batches,
    )  # fmt: skip
    figures = tables.layers[graph.index["fc2"]].figures
    results, weights = 4 * B // 2 * 10, 4 * (N // 2) * 10
    assert weights > results
    work = 3 * 2 * B * N * 10 / 4 / FLOP_PER_S
    per_byte = {"node": 1 / 1e9, "network": 2 / 1e8}
    of_results, of_weights = ("network", "node") if micro_batches == 1 else ("node", "network")
    assert figures.repeated[0] - work == pytest.approx(0.5 * results * per_byte[of_results], rel=1e-9)
    assert figures.once[0] == pytest.approx(weights * per_byte[of_weights], rel=1e-9)
