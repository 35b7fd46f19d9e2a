"""The public interface: its names, the example of its documentation, and what an import costs."""

import doctest
import json
import pickle
from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest

import pase
from pase import Builder, LayerPlan, Machine, PaseError, Plan, SearchOptions, errors, load, load_machine, search
from pase.graph.operators import dense, softmax_loss
from pase.planning.plan_file import read_plan, write_plan
from tests.networks import small_plan

PUBLIC = (
    "Builder",
    "Graph",
    "LayerPlan",
    "Machine",
    "PaseError",
    "Plan",
    "SearchOptions",
    "Session",
    "__version__",
    "check",
    "compare",
    "emit",
    "evaluate",
    "explain",
    "export",
    "load",
    "load_machine",
    "load_plan",
    "machines",
    "parallelize",
    "report",
    "search",
    "simulate",
)


def test_the_public_names_are_these() -> None:
    assert tuple(sorted(pase.__all__)) == tuple(sorted(PUBLIC))
    assert all(hasattr(pase, name) for name in PUBLIC)


def test_the_example_of_the_documentation_holds() -> None:
    results = doctest.testmod(pase)
    assert results.attempted >= 4
    assert results.failed == 0


def test_a_network_of_ones_own_is_planned_in_a_few_lines(tmp_path: Path) -> None:
    net = Builder("classifier")
    x = net.add(dense, "hidden", net.input((256, 784)), out=(("n", 4096),), activation="relu")
    x = net.add(dense, "logits", x, out=(("n", 16),))
    net.add(softmax_loss, "loss", x, dims=("b", "n"))
    machine = load_machine("2080ti")
    plan = search(net.build(), devices=8, machine=machine, options=SearchOptions(ordering="generate_seq"))
    assert isinstance(plan, Plan)
    assert isinstance(plan["hidden"], LayerPlan)
    assert isinstance(plan.machine, Machine)
    assert plan.exact
    assert plan.total_cost < plan.baselines["data_parallel"]
    # A wide layer with a small batch: what pays is to split its weights.
    assert plan["hidden"].splits["n"] > 1
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def test_a_layer_is_found_by_its_name() -> None:
    plan = small_plan("lenet5", 4)
    assert plan["conv2"] is plan.layers[2]
    assert plan["conv2"].name == "conv2"
    with pytest.raises(KeyError, match="conv9"):
        plan["conv9"]


def test_a_graph_can_be_asked_for_its_size() -> None:
    graph = load("lenet5", batch=1)
    assert graph.num_parameters == 61_706
    assert graph["fc1"].extents == {"b": 1, "n": 120, "c": 400}
    with pytest.raises(KeyError, match="fc9"):
        graph["fc9"]


def test_every_error_is_a_pase_error() -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(found) > 8
    assert all(issubclass(error, PaseError) for error in found)
    with pytest.raises(PaseError, match="unknown model 'alexnett': did you mean 'alexnet'"):
        load("alexnett")


def test_results_cannot_be_changed_by_accident() -> None:
    plan = small_plan("mlp", 4)
    for value, field in (
        (plan, "total_cost"),
        (plan.layers[0], "splits"),
        (plan.graph, "edges"),
        (plan.machine, "levels"),
        (plan.search, "time_s"),
    ):
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{field}'"):
            setattr(value, field, None)


def _members(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield all that a value holds, at any depth: its fields, what it works out of them, and members of these."""
    yield path, value
    if is_dataclass(value):
        kept = {name for name, found in vars(type(value)).items() if isinstance(found, cached_property)}
        # An operator without its name is an operator again.
        for name in (*(field.name for field in fields(value)), *sorted(kept - {"unnamed"})):
            yield from _members(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _members(member, f"{path}[{key!r}]")
    elif isinstance(value, tuple):
        for i, member in enumerate(value[:3]):
            yield from _members(member, f"{path}[{i}]")


PLAIN = str | int | float | bool | None | tuple | frozenset


def test_nothing_in_a_plan_can_be_changed() -> None:
    plan = small_plan("rnnlm", 4)
    mappings = 0
    for path, value in _members(plan, "plan"):
        if is_dataclass(value) or isinstance(value, PLAIN):
            continue
        assert isinstance(value, Mapping), f"{path} is a {type(value).__name__}, which can be changed"
        mappings += 1
        before, key = dict(value), next(iter(value), "")
        changes: list[tuple[str, tuple[object, ...]]] = [
            ("update", ({key: 0},)),
            ("__setitem__", (key, 0)),
            ("__delitem__", (key,)),
            ("__ior__", ({key: 0},)),
            ("setdefault", ("new", 0)),
            ("pop", (key,)),
            ("popitem", ()),
            ("clear", ()),
        ]
        for change, arguments in changes:
            with pytest.raises(TypeError, match="part of a value that cannot be changed; make a dict of it"):
                getattr(value, change)(*arguments)
        assert dict(value) == before
    assert mappings > 20
    with pytest.raises(TypeError, match="cannot be changed"):
        plan["embedding"].splits.update(b=2)  # type: ignore[attr-defined]


def test_a_plan_is_copied_pickled_compared_and_written_as_ever(tmp_path: Path) -> None:
    plan = small_plan("lenet5", 4)
    splits = plan["fc1"].splits
    for twin in (copy(plan), deepcopy(plan), pickle.loads(pickle.dumps(plan)), replace(plan)):
        assert twin == plan
        with pytest.raises(TypeError, match="cannot be changed"):
            twin["fc1"].splits.clear()
    assert splits == dict(splits)
    assert splits | {"b": 4} == {**splits, "b": 4}
    assert repr(splits) == repr(dict(splits))
    assert json.dumps(splits) == json.dumps(dict(splits))
    assert asdict(plan["fc1"])["splits"] == splits
    # A dict that a plan is made of stays its owner's, and is not the plan's.
    own = dict(splits)
    layer = replace(plan["fc1"], splits=own)
    own["b"] = 99
    assert layer.splits == splits


# -- from a model to everything else, as a user's script has it


def test_a_model_is_searched_by_its_name() -> None:
    plan = search("lenet5", devices=4)
    assert plan == replace(search(load("lenet5"), 4), search=plan.search)
    with pytest.raises(PaseError, match="unknown model 'lenet6': did you mean 'lenet5'"):
        search("lenet6", devices=4)
    with pytest.raises(PaseError, match=r"float"):
        search(3.0, devices=4)


def test_options_are_keywords() -> None:
    given = {"cost_model": "alpha_beta", "ordering": "generate_seq", "time_limit_s": 60.0, "keep_batch": True}
    expected = search(load("lenet5"), 4, options=SearchOptions(**given))  # type: ignore[arg-type]
    for plan in (
        search("lenet5", 4, **given),  # type: ignore[arg-type]
        search("lenet5", 4, options=given),
        search("lenet5", 4, options=SearchOptions(time_limit_s=60.0), **(given | {"time_limit_s": 50.0})),  # type: ignore[arg-type]
    ):
        assert plan == replace(expected, search=plan.search)
    assert search("lenet5", 4, device_memory_bytes=2**30).device_memory_bytes == 2**30
    with pytest.raises(PaseError, match="unknown option of a search 'costmodel': did you mean 'cost_model'"):
        search("lenet5", 4, costmodel="paper")  # type: ignore[call-arg]
    with pytest.raises(PaseError, match="unknown option of a search 'time_limit'"):
        search("lenet5", 4, options={"time_limit": 3})
    with pytest.raises(PaseError, match="options are a list; expected SearchOptions, or a dict"):
        search("lenet5", 4, options=[])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_are_text_or_paths(tmp_path: Path, kind: type) -> None:
    plan = small_plan("lenet5", 4)
    path = kind(tmp_path / "plan.json")
    plan.save(path)
    assert pase.load_plan(path) == plan
    write_plan(plan, path)
    assert read_plan(path) == plan
    exported = pase.export(plan, "csv")
    exported.save(kind(tmp_path / "plan.csv"))
    assert (tmp_path / "plan.csv").read_bytes().decode() == exported.text
    assert pase.report(plan, kind(tmp_path / "page.html"), explains=False) == (tmp_path / "page.html").read_text()
    from pase.machine import machine_text

    (tmp_path / "here.toml").write_text(machine_text(load_machine("h100")), encoding="utf-8")
    machine = kind(tmp_path / "here.toml")
    assert load_machine(machine) == load_machine("h100")
    assert search("mlp", 4, machine=machine).machine == load_machine("h100")
    assert pase.simulate(plan, machine=machine).machine == load_machine("h100")
    for write in (plan.save, exported.save, lambda path: pase.report(plan, path, explains=False)):
        with pytest.raises(PaseError, match="cannot be written: No such file"):
            write(kind(tmp_path / "nowhere" / "file"))


def test_a_plan_is_a_collection_of_layers() -> None:
    plan = small_plan("lenet5", 4)
    assert [layer.name for layer in plan] == [operator.name for operator in plan.graph.operators]
    assert len(plan) == len(plan.layers)
    assert "fc1" in plan
    assert "fc9" not in plan
    assert list(plan) == list(plan.layers)


def test_what_a_plan_is_asked() -> None:
    plan = small_plan("lenet5", 4)
    why = pase.explain(plan, ["fc1"])
    assert why["fc1"].choice.splits == plan["fc1"].splits
    assert pase.simulate(plan, machine="h100").step_time_s > 0
    comparison = pase.compare("lenet5", 4, machine="1080ti")
    assert comparison.contenders[0].plan.total_cost == search("lenet5", 4).total_cost
    page = pase.report({"ours": plan, "again": plan}, explains=False)
    assert page.count("<html") == 1
    names = [machine.name for machine in pase.machines()]
    assert len(names) > 5
    assert pase.machines() == tuple(map(load_machine, names))
