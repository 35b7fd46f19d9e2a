"""Attention of long sequences: what ways of splitting it cost, beside closed forms, and which a search chooses."""

from dataclasses import dataclass
from typing import Any

import pytest

import pase
from pase.errors import ConfigurationError, MemoryLimitError
from pase.graph import Builder, Graph
from pase.graph.operators import attention, dense
from pase.graph.operators.products import with_rings
from pase.planning.plan import Plan
from tests.simulation.machines import machine

DEVICES, WIDTH = 8, 64
FLOP_PER_S, BYTES_PER_S = 1e12, 1e9


MACHINE = machine((0, 1e-15, BYTES_PER_S), flop_per_s=FLOP_PER_S)
TOKENS_SPLIT = {"pin": dict.fromkeys(("query", "key", "value", "output"), f"s={DEVICES}")}
"""All layers around the attention have a part of the tokens on each device."""


def block(heads: int, steps: int) -> Graph:
    """One causal attention of one sequence, between its projections."""
    net = Builder("block")
    x = net.input((1, steps, WIDTH))
    wide: dict[str, Any] = {"lead": ("b", "s"), "reduce": ("d",), "out": (("h", heads), ("k", WIDTH)), "bias": False}
    q, k, v = (net.add(dense, name, x, **wide) for name in ("query", "key", "value"))
    y = net.add(attention, "attention", q, k, v, causal=True, is_fused=True)
    net.add(dense, "output", y, lead=("b", "s"), reduce=("h", "k"), out=(("d", WIDTH),), bias=False)
    return net.build()


@dataclass(frozen=True)
class Ways:
    """Seconds in which nothing is computed, of one attention, by the way in which its devices come by what they need.

    gather: each device fetches all keys and values, and the sums of their gradients are shared out (Korthikanti et al.
    2022). ring: parts of them go round, beside the computation; backward again, with their gradients (Liu et al. 2023).
    scatter: queries, keys, values and the result, and their gradients, change from parts of the tokens to parts of the
    heads, or back (DeepSpeed-Ulysses, Jacobs et al. 2023).
    """

    gather: float
    ring: float
    scatter: float

    @classmethod
    def of(cls, heads: int, steps: int) -> "Ways":
        others = (DEVICES - 1) / DEVICES
        tensor_s = 4 * steps * heads * WIDTH / BYTES_PER_S
        scores = steps * steps * heads / DEVICES
        # Two products of WIDTH, scaling and a softmax a score; backward twice the products.
        forward_s, backward_s = (scores * (flop * WIDTH + 5) / FLOP_PER_S for flop in (4, 8))
        return cls(
            gather=(2 + 2) * others * tensor_s,
            ring=waited_in_rounds(2 * tensor_s, forward_s) + waited_in_rounds(4 * tensor_s, backward_s),
            scatter=2 * 4 * others * tensor_s / DEVICES,
        )


def waited_in_rounds(moved_s: float, computed_s: float) -> float:
    """How long a device waits for parts: each is passed on once it is there, and computed with in its turn."""
    arrived = ended = 0.0
    for number in range(DEVICES):
        arrived += moved_s / DEVICES if number else 0.0
        ended = max(arrived, ended) + computed_s / DEVICES
    return ended - computed_s


def waited_s(plan: Plan) -> float:
    """What the attention communicates, and what is moved for it and of it."""
    own, behind = plan["attention"], plan["output"]
    moved = (transfer.cost for layer in (own, behind) for transfer in layer.transfers)
    return own.communication_cost + sum(moved)


def searched(graph: Graph, way: str, splits: str = "") -> Plan:
    pins = {**TOKENS_SPLIT["pin"], **({"attention": splits} if splits else {})}
    return pase.search(
        graph, DEVICES, machine=MACHINE, cost_model="alpha_beta", attention=way, constraints={"pin": pins}
    )


@pytest.mark.parametrize(
    ("heads", "steps", "way"),
    [(8, 256, "scatter"), (8, 65536, "ring"), (1, 65536, "ring"), (1, 256, ""), (2, 8192, "")],
)
def test_ways_cost_their_closed_forms_and_the_cheapest_is_chosen(heads: int, steps: int, way: str) -> None:
    """Where each dim alone is dearer than several together, way is ""."""
    graph, ways = block(heads, steps), Ways.of(heads, steps)
    queries = f"s={DEVICES}"
    assert waited_s(searched(graph, "gather", queries)) == pytest.approx(ways.gather)
    assert waited_s(searched(graph, "ring", queries)) == pytest.approx(ways.ring, abs=1e-12)
    expected = {"gather": ways.gather, "ring": ways.ring}
    if heads >= DEVICES:
        assert waited_s(searched(graph, "gather", f"h={DEVICES}")) == pytest.approx(ways.scatter)
        expected["scatter"] = ways.scatter
    found = searched(graph, "auto")
    assert found.exact
    splits, is_ring = found["attention"].splits, found.graph["attention"].ring is not None
    if way:
        assert min(expected, key=lambda name: expected[name]) == way
        assert waited_s(found) == pytest.approx(expected[way], abs=1e-12)
        assert splits["h" if way == "scatter" else "s"] == DEVICES
        assert is_ring == (way == "ring")
    else:
        assert waited_s(found) < min(expected.values())
        assert sum(k > 1 for k in splits.values()) > 1
        # Heads change places, and keys of each go round or are gathered.
        assert is_ring == (heads > 1)


def test_a_ring_holds_parts_of_keys_and_values() -> None:
    """Kept for backward: of a ring parts of keys and values; where these are gathered, all of them beside the parts."""
    heads, steps = 1, 4096
    gathered, ring = (searched(block(heads, steps), way, f"s={DEVICES}").memory for way in ("gather", "ring"))
    assert gathered is not None
    assert ring is not None
    whole = 4 * steps * heads * WIDTH
    assert gathered.kept_bytes - ring.kept_bytes == 2 * whole - 2 * whole // DEVICES


def test_what_fits_is_a_ring() -> None:
    """Though it costs as many bytes, of which `paper` hides none."""
    pins = {"pin": {**TOKENS_SPLIT["pin"], "attention": f"s={DEVICES}"}}

    def plan(limit: int | None, way: str = "auto") -> Plan:
        return pase.search(
            block(1, 4096), DEVICES, machine=MACHINE, attention=way, device_memory_bytes=limit, constraints=pins
        )

    gathered, ring = (plan(None, way).memory for way in ("gather", "ring"))
    assert gathered is not None
    assert ring is not None
    assert ring.total_bytes < gathered.total_bytes
    found = plan(gathered.total_bytes - 1)
    assert found.exact
    assert found.graph["attention"].ring is not None
    with pytest.raises(MemoryLimitError, match="no strategy of 'block' that keeps to the constraints fits"):
        plan(ring.total_bytes - 1)


def test_attention_that_has_no_ring() -> None:
    """Queries and keys of two lengths, and layers that are none, are as before; an unknown way is told."""
    net = Builder("cross")
    q, k = net.input((1, 8, 2, 4)), net.input((1, 16, 2, 4))
    net.add(attention, "attention", q, k, k)
    graph = net.build()
    assert with_rings(graph) == graph
    ring = with_rings(block(8, 256))
    assert with_rings(ring) == ring
    with pytest.raises(ConfigurationError, match="unknown way of attention 'rings': did you mean 'ring'"):
        pase.search(graph, 2, attention="rings")
    with pytest.raises(ConfigurationError, match="a session keeps tables of one way of attention, and 'auto' is both"):
        pase.Session(graph, 2, attention="auto")
