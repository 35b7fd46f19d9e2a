"""Tables that are made again for another machine from what is known, beside those that are made from the start."""

from dataclasses import replace

import numpy as np
import pytest

from pase.costs import build_problem, cost_model
from pase.costs.choice_tables import KnownChoices
from pase.costs.edges import KnownTransfers
from pase.machine import Machine, override_machine
from pase.sharding import overlap
from pase.sharding.overlap import Redistribution
from tests.networks import slow_machine, small_graph

SPEEDS = (None, 2e9, 3e8, 2e9)
MODELS = ("alpha_beta", "paper", "program", "ring")


def _machine(bandwidth: float | None) -> Machine:
    return override_machine(slow_machine(), flop_per_s=None, bandwidth_bytes_per_s=bandwidth)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *(("gpt", model) for model in MODELS),
        ("rnnlm", "alpha_beta"),
        *(pytest.param("transformer", model, marks=pytest.mark.full) for model in MODELS),
    ],
)
def test_tables_for_another_machine_are_those_that_are_made_from_the_start(name: str, model: str) -> None:
    graph, known = small_graph(name), KnownChoices(transfers=KnownTransfers())
    for speed in SPEEDS:
        costs = cost_model(model, _machine(speed), 8)
        known = known.for_another_model()
        found = build_problem(graph, 8, costs, known=known).tables
        fresh = build_problem(graph, 8, costs).tables
        assert (found.vertex_table, found.edge_table) == (fresh.vertex_table, fresh.edge_table)
        for own, other in zip(found.vertex_costs, fresh.vertex_costs, strict=True):
            assert np.array_equal(own, other)
        for table, expected in zip(found.edge_tables, fresh.edge_tables, strict=True):
            if model == "paper":  # what was there, times a factor
                np.testing.assert_allclose(table.dense(), expected.dense(), rtol=1e-14)
            else:
                assert np.array_equal(table.dense(), expected.dense())


def test_levels_that_become_one_tell_other_layouts_apart() -> None:
    graph, known, fanouts = small_graph("transformer"), KnownChoices(transfers=KnownTransfers()), set()
    machine = slow_machine()
    inner, outer = machine.levels[:2]
    apart = replace(outer, latency_s=inner.latency_s)
    as_one = replace(apart, bandwidth_bytes_per_s=inner.bandwidth_bytes_per_s * inner.num_devices)
    for level in (apart, replace(apart, bandwidth_bytes_per_s=3e9), as_one, apart):
        costs = cost_model("alpha_beta", replace(machine, levels=(inner, level)), 16)
        fanouts.add(costs.fanouts)
        known = known.for_another_model()
        found, fresh = (build_problem(graph, 16, costs, known=own).tables for own in (known, None))
        for table, expected in zip(found.edge_tables, fresh.edge_tables, strict=True):
            assert np.array_equal(table.dense(), expected.dense())
    assert len(fanouts) == 2


@pytest.mark.parametrize("mixer", [None, 0], ids=["numbers that differ", "one number for all"])
def test_fetches_that_differ_stand_for_all(mixer: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if mixer is not None:
        monkeypatch.setattr(overlap, "_MIXER", np.uint64(mixer))
    rng = np.random.default_rng(1)
    needed, kept, held, messages = (rng.integers(0, 3, (20, 30)).astype(np.float64) for _ in range(4))
    for shape in ((1, 1, 0), (20, 1, 2), (1, 30, 2)):
        members = rng.integers(1, 3, shape)
        fetches = Redistribution(
            needed_bytes=needed, kept_bytes=kept, held_bytes=held, messages=messages, sum_members=members
        )
        distinct, number = fetches.distinct()
        every = np.broadcast_to(members, (20, 30, shape[-1]))
        columns = needed.flat, kept.flat, held.flat, messages.flat, every.reshape(600, -1).tolist()
        rows = {(*figures, *more) for *figures, more in zip(*columns, strict=True)}
        assert distinct.needed_bytes.shape == (1, len(rows))
        assert np.array_equal(distinct.needed_bytes[0][number], needed)
        assert np.array_equal(distinct.kept_bytes[0][number], kept)
        assert np.array_equal(distinct.held_bytes[0][number], held)
        assert np.array_equal(distinct.messages[0][number], messages)
        assert np.array_equal(
            np.broadcast_to(distinct.sum_members, (1, len(rows), members.shape[-1]))[0][number], every
        )
