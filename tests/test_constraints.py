"""Searches that keep to constraints, beside all strategies one by one; what is said of those that make no sense."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf, prod
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest

import pase
from pase.errors import ConfigurationError, MemoryLimitError, PlanError
from pase.graph import Builder, Graph, Operator
from pase.graph.operators import dense, elementwise, softmax_loss, with_fan_outs
from pase.planning.constraints import (
    ConstraintsDocument,
    Forbid,
    Pin,
    allowed,
    constraint_texts,
    constraints_of,
    constraints_schema,
    load_constraints,
)
from pase.planning.plan import configuration_text
from pase.planning.problems import problem_of
from pase.solver import solve
from pase.tables.cost_tables import CostTables
from tests.networks import slow_machine, small_graph
from tests.plain_memory import plain_memory

Splits = Mapping[str, int]
Document = dict[str, Any]


# -- all strategies, one by one


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What constraints mean, in the words of docs/constraints.md: of one layer, and of those that are alike."""

    holds: Callable[[str, Splits], bool]
    alike: tuple[tuple[str, ...], ...] = ()


def _net(random: Random) -> Graph:
    """A chain of products, with a sum across some of them."""
    net = Builder("net")
    batch, width = random.choice([4, 6, 12]), random.choice([4, 6, 8])
    x = before = net.input((batch, width))
    for number in range(random.randint(2, 4)):
        is_even = random.random() < 0.6
        x = net.add(dense, f"fc{number}", x, out=(("n", width if is_even else random.choice([2, 4, 12])),))
        if x.shape == before.shape and number and random.random() < 0.5:
            x = net.add(elementwise, f"sum{number}", x, before, dims=("b", "c"))
        before, width = x, x.shape[1]
    net.add(softmax_loss, "loss", x)
    return net.build()


def _ways(operator: Operator, p: int) -> list[dict[str, int]]:
    """Every split of a layer's dims into equal parts, on a number of devices that divides p."""
    factors = [[k for k in range(1, p + 1) if dim.extent % k == 0] for dim in operator.dims]
    factors = [[1] if d.name in operator.unsplittable else ks for d, ks in zip(operator.dims, factors, strict=True)]
    names = [dim.name for dim in operator.dims]
    return [dict(zip(names, way, strict=True)) for way in product(*factors) if p % prod(way) == 0]


def _fits_mesh(splits: Splits, axes: Sequence[int]) -> bool:
    """Whether axes can be dealt out to dims (or to none) so that each dim's split is the product of its axes."""
    dims = list(splits)
    for dealt in product([None, *dims], repeat=len(axes)):
        sizes = {dim: prod(size for size, to in zip(axes, dealt, strict=True) if to == dim) for dim in dims}
        if sizes == dict(splits):
            return True
    return False


def _constrained(random: Random, graph: Graph, p: int) -> tuple[Document, Meaning]:
    """Some constraints, as a document and in words."""
    document: Document = {}
    tests: list[Callable[[str, Splits], bool]] = []
    alike = []
    products = [op.name for op in graph.operators if op.name.startswith("fc")]
    for kind in random.sample(["pin", "forbid", "tie", "mesh"], random.randint(1, 3)):
        name = random.choice([op.name for op in graph.operators])
        if kind == "pin":
            way = random.choice(_ways(graph[name], p))
            named = {dim: k for dim, k in way.items() if k > 1 or random.random() < 0.3}
            is_partial = random.random() < 0.4
            text = " ".join([*(f"{dim}={k}" for dim, k in named.items()), *["*"] * is_partial]) or "not split"
            document["pin"] = {name: text}
            if is_partial:
                tests.append(lambda n, s, name=name, d=named: n != name or d.items() <= s.items())  # type: ignore[misc]
            else:
                tests.append(lambda n, s, name=name, way=way: n != name or s == way)  # type: ignore[misc]
        elif kind == "forbid":
            pattern = random.choice(["*", "fc*", "fc0"])
            document["forbid"] = {pattern: random.choice(["b", "n", "c", "n b"])}
            dims = document["forbid"][pattern].split()
            if pattern == "fc0":
                tests.append(lambda n, s, d=dims: n != "fc0" or all(s.get(i, 1) == 1 for i in d))  # type: ignore[misc]
            else:
                start = pattern[:-1]
                tests.append(
                    lambda n, s, d=dims, start=start: not n.startswith(start) or all(s.get(i, 1) == 1 for i in d)  # type: ignore[misc]
                )
        elif kind == "tie":
            group = tuple(random.sample(products, 2))
            document["tie"] = [", ".join(group)]
            alike.append(group)
        else:
            axes = random.choice(
                [sizes for sizes in product(range(2, p + 1), repeat=2) if p % prod(sizes) == 0] or [(p,)]
            )
            document["mesh"] = {f"axis{i}": size for i, size in enumerate(axes)}
            tests.append(lambda _, s, axes=axes: _fits_mesh(s, axes))  # type: ignore[misc]
    return document, Meaning(holds=lambda n, s: all(test(n, s) for test in tests), alike=tuple(alike))


def _least(tables: CostTables, graph: Graph, configurations: Sequence[Any], meaning: Meaning) -> float:
    """The least cost of all strategies that constraints allow; +inf if there are none."""
    count = tables.num_vertices
    rows = []
    for v, operator in enumerate(graph.operators):
        ways = [dict(zip(operator.extents, row, strict=True)) for row in configurations[v].tolist()]
        rows.append([i for i, way in enumerate(ways) if meaning.holds(operator.name, way)])
        if not rows[-1]:
            return inf
    total = np.zeros([len(own) for own in rows])
    for v, own in enumerate(rows):
        total = total + tables.layer_costs(v)[own].reshape([-1 if w == v else 1 for w in range(count)])
    for number, (u, v) in enumerate(tables.edges):
        cost = tables.edge(number).dense()[np.ix_(rows[u], rows[v])]
        total = total + cost.reshape([len(rows[w]) if w in (u, v) else 1 for w in range(count)])
    for group in meaning.alike:
        u, v = sorted(graph.index[name] for name in group)
        mine, theirs = configurations[u][rows[u]], configurations[v][rows[v]]
        differ = (mine[:, None] != theirs[None]).any(axis=2)
        shape = [len(rows[w]) if w in (u, v) else 1 for w in range(count)]
        total = np.where(differ.reshape(shape), inf, total)
    return float(total.min())


@pytest.mark.parametrize("problems", [75, pytest.param(1000, marks=pytest.mark.full)])
def test_searches_with_constraints_find_what_trying_all_finds(problems: int) -> None:
    random = Random(19)
    machine, solved, refused, raised = slow_machine(), 0, 0, 0
    while solved < problems:
        p = random.choice([2, 4, 6, 8])
        graph = with_fan_outs(_net(random))
        free = problem_of(graph, p, machine, "paper")
        if prod(free.tables.domain_sizes) > 1_000_000:
            continue
        document, meaning = _constrained(random, graph, p)
        expected = _least(free.tables, graph, free.configurations, meaning)
        constraints = constraints_of(document)
        if expected == inf:
            refused += 1
            with pytest.raises(ConfigurationError, match="no configuration"):
                problem_of(graph, p, machine, "paper", constraints=constraints)
            continue
        solution = solve(problem_of(graph, p, machine, "paper", constraints=constraints).tables)
        assert solution.exact
        assert solution.cost == pytest.approx(expected, rel=1e-12), (document, graph)
        least = solve(free.tables).cost
        assert solution.cost >= least * (1 - 1e-12)
        solved, raised = solved + 1, raised + (solution.cost > least * (1 + 1e-9))
    assert raised > problems / 5, "constraints hardly bind"
    assert refused > problems / 100


def test_without_time_for_tables_constraints_are_kept_to_all_the_same() -> None:
    random, machine, kinds = Random(4), slow_machine(), set[str]()
    for _ in range(20):
        p, graph = random.choice([2, 4, 6, 8]), with_fan_outs(_net(random))
        document, meaning = _constrained(random, graph, p)
        problem = problem_of(graph, p, machine, "paper")
        expected = _least(problem.tables, graph, problem.configurations, meaning)
        search = partial(pase.search, graph, p, machine=machine, constraints=document, time_limit_s=1e-9)
        if expected == inf:
            with pytest.raises(ConfigurationError, match="no configuration"):
                search()
            continue
        for limit in (None, 10**9):
            plan = search(device_memory_bytes=limit)
            assert not plan.exact
            assert plan.constraints == constraints_of(document)
            assert all(meaning.holds(layer.name, layer.splits) for layer in plan), document
            assert all(plan[one].splits == plan[other].splits for one, other in meaning.alike)
            assert plan.lower_bound <= expected * (1 + 1e-9)
            assert plan.total_cost >= expected * (1 - 1e-9)
        kinds |= {"partial" for text in document.get("pin", {}).values() if "*" in text} | {*document}
    assert kinds == {"partial", "pin", "forbid", "tie", "mesh"}


def test_the_cheapest_strategy_that_keeps_to_constraints_and_fits() -> None:
    machine = slow_machine()
    graph = with_fan_outs(_net(Random(3)))
    problem = problem_of(graph, 4, machine, "paper")
    document = {"pin": {"fc0": "n=2 *"}, "tie": ["fc0, fc1"]}
    found = []
    for choice in product(*map(range, problem.tables.domain_sizes)):
        splits = [problem.splits(v, c) for v, c in enumerate(choice)]
        own = dict(zip(graph.index, splits, strict=True))
        if own["fc0"] == own["fc1"] and own["fc0"]["n"] == 2:
            found.append((plain_memory(graph, splits, "sgd").peak().bytes, problem.tables.evaluate(choice)))
    sizes = sorted({size for size, _ in found})
    for limit in sizes[:: max(1, len(sizes) // 4)]:
        plan = pase.search(graph, 4, machine=machine, constraints=document, device_memory_bytes=limit)
        assert plan.exact
        assert plan.total_cost == pytest.approx(min(cost for size, cost in found if size <= limit), rel=1e-12)
    with pytest.raises(MemoryLimitError, match="no strategy of 'net' that keeps to the constraints fits"):
        pase.search(graph, 4, machine=machine, constraints=document, device_memory_bytes=sizes[0] - 1)


@pytest.mark.parametrize("name", ["alexnet", "gpt", "rnnlm"])
def test_a_pin_to_what_is_cheapest_changes_nothing(name: str) -> None:
    plan = pase.search(small_graph(name), 8, machine=slow_machine())
    middle = plan.layers[len(plan.layers) // 2]
    words = " ".join(f"{dim}={k}" for dim, k in middle.splits.items() if k > 1) or "not split"
    pinned = pase.search(small_graph(name), 8, machine=slow_machine(), constraints={"pin": {middle.name: words}})
    assert pinned.total_cost == plan.total_cost
    assert pinned.exact


@pytest.mark.parametrize("sign", ["×", "x"])
def test_configurations_are_taken_as_they_are_printed(sign: str, tmp_path: Path) -> None:
    plan = pase.search("alexnet", 8)
    printed = {layer.name: configuration_text(layer.splits, 8).replace("×", sign) for layer in plan}
    assert any(f" {sign}" in text for text in printed.values())
    pinned = pase.search("alexnet", 8, constraints={"pin": printed})
    assert [layer.splits for layer in pinned] == [layer.splits for layer in plan]
    assert pinned.total_cost == plan.total_cost
    pinned.save(tmp_path / "plan.json")
    assert pase.load_plan(tmp_path / "plan.json") == pinned
    texts = constraint_texts(pinned.constraints)
    assert texts == tuple(f"pin {layer.name}: {configuration_text(layer.splits, 8)}" for layer in plan)
    alone = pase.search("alexnet", 8, constraints={"pin": {"*": f"not split {sign}8"}})
    assert all(layer.num_parts == 1 for layer in alone)
    assert constraint_texts(alone.constraints) == ("pin *: not split ×8",)


# -- what plans say of them


ALL = {
    "pin": {"fc1": "n=4 c=2", "conv1": "b=2 *"},
    "forbid": {"conv*": "h w"},
    "tie": ["fc1, fc2"],
    "mesh": {"data": 2, "model": 4},
    "devices": {"fc1": [7, 6, 5, 4, 3, 2, 1, 0]},
}


@pytest.fixture(scope="module")
def plan() -> pase.Plan:
    return pase.search("alexnet", 8, constraints=ALL)


def test_a_plan_keeps_to_its_constraints_and_is_read_back(plan: pase.Plan, tmp_path: Path) -> None:
    assert plan.exact
    assert plan["fc1"].splits == plan["fc2"].splits == {"b": 1, "n": 4, "c": 2}
    assert plan["conv1"].splits["b"] == 2
    assert all(layer.splits[dim] == 1 for layer in plan if layer.name.startswith("conv") for dim in "hw")
    assert plan["fc1"].devices == (7, 6, 5, 4, 3, 2, 1, 0)
    assert sorted(plan["fc2"].devices) == list(range(8))
    plan.save(tmp_path / "plan.json")
    assert pase.load_plan(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["constraints"] == ALL


def test_other_layers_stay_as_near_to_one_that_is_placed_by_hand(plan: pase.Plan) -> None:
    # All devices have other numbers: what moves between them is the same.
    free = pase.search("alexnet", 8, constraints={key: value for key, value in ALL.items() if key != "devices"})
    renamed = dict(zip(free["fc1"].devices, plan["fc1"].devices, strict=True))
    assert [layer.devices for layer in plan] == [tuple(renamed[d] for d in layer.devices) for layer in free]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d["constraints"]["pin"].update(fc3="n=8"),
            r"layers\[10\]\.splits is none that the plan's constraints",
        ),
        (
            lambda d: d.update(constraints={"tie": ["fc1, fc3"]}),
            r"constraints tie fc1, fc3, whose configurations differ",
        ),
        (
            lambda d: d["constraints"]["pin"].update(fc3="n=5"),
            r"constraints cannot be kept to: .*pin\.fc3: that leaves",
        ),
        (lambda d: d["constraints"].update(colour={}), r"constraints\.colour is not a key here; known here are pin"),
    ],
)
def test_a_plan_that_does_not_keep_to_its_constraints_is_refused(
    plan: pase.Plan, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    change(document)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises((PlanError, ConfigurationError), match=message):
        pase.load_plan(tmp_path / "plan.json")


def test_an_explanation_keeps_to_the_constraints(plan: pase.Plan) -> None:
    explanation = pase.explain(plan, ["fc1", "conv1"])
    assert explanation.is_optimal
    pinned, free = explanation.layers
    assert pinned.runner_up is None
    assert free.runner_up is not None
    assert free.runner_up.choice.splits["b"] == 2
    assert free.runner_up.choice.splits["h"] == free.runner_up.choice.splits["w"] == 1


# -- files


FILE = """\
tie = ["fc1, fc2"]

[pin]
fc1 = "n=4 c=2"
conv1 = "b=2 *"

[forbid]
"conv*" = "h w"

[mesh]
data = 2
model = 4

[devices]
fc1 = [7, 6, 5, 4, 3, 2, 1, 0]
"""


def test_a_file_says_what_a_dict_says(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(FILE)
    assert ConstraintsDocument.of(load_constraints(path)).builtins() == ALL
    schema = json.loads(constraints_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(ALL, schema)
    for wrong in (
        {"pins": {}},
        {"pin": {"fc1": 4}},
        {"tie": "a, b"},
        {"mesh": {"data": 0}},
        {"devices": {"fc1": [0, 0]}},
    ):
        with pytest.raises(jsonschema.ValidationError, match=r"."):
            jsonschema.validate(wrong, schema)
        with pytest.raises(ConfigurationError, match=r"expected|did you mean pin"):
            pase.search("alexnet", 8, constraints=wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pin]\nfc9 = 'n=4'", r": pin\.fc9: no layer of 'alexnet' is 'fc9'; there are fc\d, fc\d, fc\d, …"),
        ("[pin]\nfc1 = 'q=4'", r": pin\.fc1: layer 'fc1' has no dim 'q'; it has b=128, n=4096, c=9216"),
        ("[pin]\nfc1 = 'n=3'", r": pin\.fc1: that leaves layer 'fc1' no configuration; it has not split; c=2"),
        ("[pin]\nfc1 = 'n4'", r": pin\.fc1 has 'n4'; expected splits such as 'n=4 c=2'"),
        ("[pin]\nfc1 = 'n=4 n=2'", r": pin\.fc1 names dim 'n' twice; expected splits such as"),
        ("[pin]\nfc1 = ''", r": pin\.fc1 is empty; expected splits such as 'n=4 c=2', or 'not split'"),
        ("[pin]\nfc1 = 'n=2 ×2'", r": pin\.fc1: 2 parts ×2 are for 4 devices; there are 8: leave ×2 out"),
        ("[pin]\nfc1 = 'n=2 * ×4'", r": pin\.fc1 has '\*'; expected splits such as 'n=4 c=2'"),
        ("[pin]\nfc1 = '×8'", r": pin\.fc1 has '×8'; expected splits such as 'n=4 c=2'"),
        ("[pin]\nfc1 = 4", r": pin\.fc1 is 4; expected text"),
        ("[forbid]\n'fc*' = 'h'", r": forbid\.fc\*: no such layer has a dim 'h'; they have b, n, c$"),
        ("[forbid]\n'fc*' = ''", r": forbid\.fc\* names no dim; expected those that are not split"),
        ("tie = ['fc1']", r": tie\[0\]: 'fc1' alone is such a layer; a tie needs two"),
        ("tie = ['']", r": tie\[0\] names no layer; expected patterns"),
        ("tie = ['fc1, conv1']", r": tie\[0\]: layer 'fc1' has the dims b, n, c, 'conv1' has b, n, h, w"),
        ("[mesh]\ndata = 3", r": mesh: a mesh of data=3 has 3 devices; expected a number that divides 8"),
        ("[mesh]", r": mesh has no axis; expected sizes by name"),
        ("[mesh]\ndata = 'all'", r": mesh\.data is 'all'; expected a whole number of 1 or more"),
        ("[devices]\nfc1 = [0, 1]", r": devices\.fc1: expected each device 0 to 7 once"),
        ("[pins]\nfc1 = 'n=4'", r": pins is not a key here; did you mean pin?"),
        ("tie = ['fc1, fc2']\n[pin]\nfc1 = 'n=4'\nfc2 = 'n=8'", r": tie\[0\]: that leaves layer 'fc1' no conf"),
        ("[forbid]\nfc1 = 'n c'\n[pin]\nfc1 = 'n=4'", r"forbid\.fc1: that leaves .* with the constraints before it"),
        ("[pin", r"c\.toml is not TOML: "),
    ],
)
def test_what_makes_no_sense_is_told_with_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message) as found:
        pase.search("alexnet", 8, constraints=path)
    assert str(found.value).startswith(f"constraints file {path}")
    assert "\n" not in str(found.value)


def test_constraints_in_words_are_those_of_the_command_line() -> None:
    assert constraint_texts(constraints_of(ALL)) == (
        "pin fc1: n=4 c=2",
        "pin conv1: b=2 *",
        "forbid conv*: h w",
        "tie fc1, fc2",
        "mesh data=2, model=4",
        "devices of fc1: 7 6 5 4 3 2 1 0",
    )


def test_what_is_given_twice_is_refused() -> None:
    both = [*constraints_of({"pin": {"fc1": "n=4"}}), *constraints_of({"pin": {"fc1": "n=2"}})]
    with pytest.raises(ConfigurationError, match=r"pin\.fc1 speaks of what .*pin\.fc1 does, too; give one of them"):
        pase.search("alexnet", 8, constraints=both)
    with pytest.raises(ConfigurationError, match=r"constraints are 5; expected the path of a file, a dict with pin"):
        pase.search("alexnet", 8, constraints=5)


def test_names_with_brackets_are_taken_as_they_are() -> None:
    net = Builder("net")
    x = net.add(dense, "blocks[0]", net.input((4, 8)), out=(("n", 8),))
    net.add(dense, "blocks[1]", x, out=(("n", 8),))
    left = allowed(constraints_of({"forbid": {"blocks[*]": "b"}}), net.build(), 2)
    assert {len(of) for of in left.of.values()} == {1}


def test_states_and_modes_are_words_beside_dims() -> None:
    given = {
        "pin": {"a": "zero2", "b": "n=4 zero1 *", "c": "not split replicated", "d": "n=4 c=2 zero3"},
        "forbid": {"*": "zero3 recompute", "e": "h w zero1"},
    }
    found = constraints_of(given)
    assert constraints_of(ConstraintsDocument.of(found).builtins()) == found
    states = {
        each.layers[0]: (each.state, dict(each.splits), each.is_partial) for each in found if isinstance(each, Pin)
    }
    assert states == {
        "a": ("zero2", {}, True),
        "b": ("zero1", {"n": 4}, True),
        "c": ("replicated", {}, False),
        "d": ("zero3", {"n": 4, "c": 2}, False),
    }
    forbidden = {each.layers[0]: (each.dims, each.modes) for each in found if isinstance(each, Forbid)}
    assert forbidden == {"*": ((), ("zero3", "recompute")), "e": (("h", "w"), ("zero1",))}
    with pytest.raises(ConfigurationError, match="names the states zero1 and zero2; a layer has one of them"):
        constraints_of({"pin": {"a": "zero1 zero2"}})
