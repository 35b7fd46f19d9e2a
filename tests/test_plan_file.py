"""Plan files: an exact round trip, the published schema, and what is said of a file that is not as it was written."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pase import Plan, SearchOptions, search
from pase.common.documents import DocumentSource
from pase.costs import cost_model
from pase.errors import PlanError
from pase.machine import load_machine, override_machine
from pase.models import MODELS
from pase.planning.plan_file import graph_hash, plan_document, plan_from_document, plan_schema, read_plan, write_plan
from pase.planning.steps import plan_layers, total_cost
from tests.networks import small_graph, small_plan, tiny_plan
from tests.plain_memory import plain_memory

Where = tuple[str | int, ...]
DELETED = object()
NOT_VERIFIABLE = ("machine", "search", "tool_version")
"""Members of a plan that nothing in it contradicts when they change: figures that no cost depends on, and records."""


@cache
def _schema() -> Draft202012Validator:
    schema = json.loads(plan_schema())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@cache
def _tiny_text() -> str:
    return json.dumps(plan_document(tiny_plan()))


def _tiny() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_tiny_text())
    return document


def _read(document: object) -> Plan:
    return plan_from_document(document, DocumentSource(PlanError, "plan.json"))


def _paths(value: object, path: Where = ()) -> Iterator[Where]:
    """Yield the path of every value in a document, the document itself left out."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, member in value.items():
            yield from _paths(member, (*path, key))
    if isinstance(value, list):
        for position, item in enumerate(value):
            yield from _paths(item, (*path, position))


def _at(document: Any, path: Where) -> Any:
    for key in path:
        document = document[key]
    return document


def _changed(document: Any, path: Where, value: object) -> Any:
    document = deepcopy(document)
    parent = _at(document, path[:-1])
    if value is DELETED:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return document


def _name(path: Where) -> str:
    """Return a path as messages write it: layers[0].splits.b."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


# ------------------------------------------------------------------------------------------------------ round trip


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        *[("alexnet", 1), ("rnnlm", 6), ("gpt", 4), ("densenet121", 4)],
        *(pytest.param(name, 4, marks=pytest.mark.full) for name in MODELS),
    ],
)
def test_every_network_comes_back_exactly_and_fits_the_schema(name: str, num_devices: int, tmp_path: Path) -> None:
    plan = small_plan(name, num_devices)
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    document = json.loads(path.read_text(encoding="utf-8"))
    again = read_plan(path)
    assert again == plan
    assert plan_document(again) == document
    assert [error.message for error in _schema().iter_errors(document)] == []


def test_a_plan_with_a_gap_comes_back_exactly() -> None:
    plan = replace(tiny_plan(), exact=False, lower_bound=tiny_plan().total_cost * 0.75)
    document = json.loads(json.dumps(plan_document(plan)))
    assert document["gap"] == 0.25
    assert _read(document) == plan
    assert _schema().is_valid(document)


def test_a_plan_of_another_machine_comes_back_exactly() -> None:
    machine = override_machine(load_machine("2080ti"), flop_per_s=1.25e12, bandwidth_bytes_per_s=3e9)
    plan = search(small_graph("lenet5"), 12, machine=machine, keep_batch=True)
    assert _read(json.loads(json.dumps(plan_document(plan)))) == plan


def test_a_plan_within_a_limit_comes_back_exactly() -> None:
    options = SearchOptions(device_memory_bytes=26_000, optimiser="adam")
    plan = search(small_graph("mlp"), 8, options=options)
    document = json.loads(json.dumps(plan_document(plan)))
    assert document["memory_limit_bytes_per_device"] == 26_000 >= document["memory"]["total_bytes"]
    assert document["memory"]["optimiser"] == "adam"
    assert document["baselines"]["without_memory_limit"] <= document["total_cost"]
    assert _read(document) == plan
    assert [error.message for error in _schema().iter_errors(document)] == []


def test_a_plan_of_an_earlier_version_has_its_memory_all_the_same() -> None:
    document = _tiny()
    memory = document.pop("memory")
    assert _schema().is_valid(document)
    plan = _read(document)
    assert plan == tiny_plan()
    assert plan.memory.total_bytes == memory["total_bytes"] > 0


def test_members_that_a_later_version_may_add_are_passed_over() -> None:
    document = _tiny()
    for value in (document, document["search"], document["layers"][0], document["layers"][1]["transfers"][0]):
        value["added"] = {"x": [1]}
    assert _schema().is_valid(document)
    assert _read(document) == tiny_plan()


def test_the_hash_is_that_of_the_canonical_text_of_the_graph() -> None:
    # The recipe of the schema, so that other programs can check it.
    text = json.dumps(_tiny()["graph"], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert graph_hash(tiny_plan().graph) == hashlib.sha256(text.encode("ascii")).hexdigest()
    assert graph_hash(small_graph("lenet5")) != graph_hash(small_graph("mlp"))


# ---------------------------------------------------------------------------------------------------------- schema


def _subschemas(schema: object, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema of a value within the schema, with where it stands."""
    if isinstance(schema, dict):
        if {"type", "$ref", "const", "enum", "anyOf", "oneOf"} & schema.keys():
            yield path, schema
        for key, member in schema.items():
            if key in ("properties", "$defs"):
                for name, inner in member.items():
                    yield from _subschemas(inner, f"{path}/{key}/{name}")
            elif key in ("items", "additionalProperties", "anyOf", "oneOf", "prefixItems"):
                yield from _subschemas(member, f"{path}/{key}")
    if isinstance(schema, list):
        for position, inner in enumerate(schema):
            yield from _subschemas(inner, f"{path}/{position}")


def test_the_schema_describes_every_value_with_its_unit() -> None:
    units = {"_bytes": "bytes", "_s": "seconds", "_cost": "cost_unit", "_flop": "FLOP"}
    found = dict(_subschemas(_schema().schema))
    assert len(found) > 100
    for path, schema in found.items():
        # What stands within an array or a table is described with it.
        if path.rpartition("/")[0].endswith(("/properties", "/$defs")):
            assert schema.get("description"), path
        for suffix, unit in units.items():
            if path.endswith(suffix):
                expected = "bytes per second" if path.endswith("_per_s") else unit
                assert re.search(f"{expected}|in FLOP/s", schema["description"], re.IGNORECASE), path


def test_the_schema_is_strict_about_what_it_names_and_open_to_more() -> None:
    for path, schema in _subschemas(_schema().schema):
        if schema.get("type") == "object" and "properties" in schema:
            assert set(schema["required"]) <= set(schema["properties"]), path
            # A constraint that is passed over would not be kept to.
            if not path.endswith("ConstraintsDocument"):
                assert schema.get("additionalProperties") is not False, path
        if schema.get("type") in ("integer", "number"):
            assert {"minimum", "exclusiveMinimum", "const", "enum"} & schema.keys(), path


# --------------------------------------------------------------------------------------------- one thing is changed

MAPS = ("dims", "splits", "arguments", "attributes", "options", "peak_flop_per_s")
"""Objects whose keys are no fields but names."""


def _verifiable_paths() -> list[Where]:
    return [path for path in _paths(_tiny()) if path[0] not in NOT_VERIFIABLE]


def test_every_field_that_is_missing_is_named() -> None:
    document = _tiny()
    optional = {
        *("work", "unsplittable", "exchanges", "pipeline", "intermediates", "attributes", "body", "partial_over"),
        *("shared", "memory", "memory_bandwidth_bytes_per_s", "precision", "overlap"),
    }
    checked = 0
    for path in _paths(document):
        of_step = path[-3:-2] == ("steps",) and path[-1] in ("dims", "options")
        is_field = isinstance(path[-1], str) and path[-1] not in optional and not of_step
        if is_field and not (len(path) > 1 and path[-2] in MAPS):
            with pytest.raises(PlanError, match=f"^plan.json: {re.escape(_name(path))} is missing$"):
                _read(_changed(document, path, DELETED))
            checked += 1
    assert checked > 150


def test_whatever_else_is_missing_is_noticed() -> None:
    document = _tiny()
    for path in _verifiable_paths():
        if isinstance(path[-1], int) or path[-2:-1] in [(name,) for name in MAPS]:
            with pytest.raises(PlanError, match=r"^plan\.json: "):
                _read(_changed(document, path, DELETED))


@pytest.mark.parametrize("wrong", [None, True, -1, 1.5, "x", [], [[]], {}, {"x": 1}], ids=repr)
def test_every_value_of_a_wrong_kind_is_noticed(wrong: object) -> None:
    document = _tiny()
    for path in _verifiable_paths():
        if type(_at(document, path)) is type(wrong):
            continue
        # Named is the value itself, or what holds it, or the hash that shows a change of the graph.
        named = [_name(path[:length]) for length in range(1, len(path) + 1)] + ["model.hash"]
        if wrong == _at(document, path):
            continue
        with pytest.raises(PlanError, match="^plan.json: ({})".format("|".join(map(re.escape, named)))):
            _read(_changed(document, path, wrong))


def _set(*path: str | int, to: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        _at(document, path[:-1])[path[-1]] = to

    return change


def _scaled(*path: str | int, by: float) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        _at(document, path[:-1])[path[-1]] *= by

    return change


def _repeat_layer(document: Any) -> None:
    document["layers"].insert(1, document["layers"][0])


def _replace_layer(document: Any) -> None:
    document["layers"][1] = document["layers"][0]


def _reverse_splits(document: Any) -> None:
    layer = document["layers"][0]
    layer["splits"] = dict(reversed(layer["splits"].items()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("schema_version", to=4), r"schema_version is 4; this version of PaSE reads 3: update PaSE"),
        (_set("schema_version", to=1), r"schema_version is 1; this version of PaSE reads 3: search again"),
        (_set("schema_version", to=10**30), r"schema_version is 1000.*; this version of PaSE reads 3: update PaSE"),
        (_set("schema_version", to=0), r"schema_version is 0; this version of PaSE reads 3: search again"),
        (_set("schema_version", to="1"), r"schema_version is '1'; this version of PaSE reads 3"),
        (_set("schema_version", to=1.0), r"schema_version is 1.0; this version of PaSE reads 3"),
        (_set("schema_version", to=True), r"schema_version is True; this version of PaSE reads 3"),
        (_set("num_devices", to=0), r"num_devices is 0; expected a whole number of 1 or more"),
        (_set("num_devices", to=8), r"layers\[0\].devices must name each device 0 … 7 once"),
        (_set("num_devices", to=3), r"layers\[0\]\.splits makes \d parts, which do not divide 3 devices"),
        (_set("num_devices", to=10**9 * 4), r"layers\[0\].devices must name each device 0 … 3999999999 once"),
        (_set("total_cost", to=float("nan")), r"total_cost is nan; expected a number of 0 or more"),
        (_set("total_cost", to=float("inf")), r"total_cost is inf; expected a number of 0 or more"),
        (_set("total_cost", to=10**400), r"total_cost is .*; expected a number of 0 or more"),
        (_set("total_cost", to=-1.0), r"total_cost is -1.0; expected a number of 0 or more"),
        (_scaled("total_cost", by=1.000001), r"total_cost is .*, but the rest .* it .*: search again"),
        (
            _scaled("layers", 1, "layer_cost", by=0.5),
            r"layers\[1\].layer_cost is .*, but the rest",
        ),
        (
            _scaled("layers", 1, "communication_cost", by=2),
            r"layers\[1\].communication_cost is .*, but the rest",
        ),
        (
            _scaled("layers", 1, "memory_bytes", by=2),
            r"layers\[1\].memory_bytes is .*, but the rest",
        ),
        (
            _set("layers", 1, "transfers", 0, "cost", to=1.0),
            r"layers\[1\].transfers\[0\].cost is 1.0, but the rest",
        ),
        (
            _set("layers", 1, "transfers", 0, "producer", to="fc2"),
            r"layers\[1\].transfers\[0\].producer is 'fc2', but the rest .* it 'fc1'",
        ),
        (
            _set("layers", 1, "transfers", 0, "input", to=1),
            r"layers\[1\].transfers\[0\].input is 1, but the rest .* it 0",
        ),
        (
            _set("layers", 1, "transfers", to=[]),
            r"layers\[1\].transfers has 0 entries, but the rest .* it 1",
        ),
        (_scaled("lower_bound", by=1.1), r"lower_bound is .*, above the total cost"),
        (_scaled("lower_bound", by=0.9), r"exact is true, but the lower bound .* is below"),
        (_set("exact", to=False), r"exact is false, but the lower bound is the total cost"),
        (_set("exact", to=1), r"exact is 1; expected true or false"),
        (_set("gap", to=0.1), r"gap is 0.1, but the rest .* it 0.0"),
        (
            _scaled("baselines", "data_parallel", by=10),
            r"baselines.data_parallel is .*, but the rest",
        ),
        (_set("baselines", to={}), r"baselines.data_parallel is missing"),
        (
            _set("cost_model", to="papre"),
            r"cost_model cannot be used: unknown cost model 'papre': did you mean 'paper'",
        ),
        (_set("cost_unit", to="s"), r"cost_unit is 's', but the rest .* it 'FLOP'"),
        (_set("model", "hash", to="0" * 64), r"model.hash is not the hash of the graph in this file"),
        (_set("model", "name", to="alexnet"), r"model.name is 'alexnet', but the rest .* it 'mlp'"),
        (
            _set("model", "arguments", "batch", to=16),
            r"model.arguments.batch is 16, but the rest .* it 8",
        ),
        (_set("graph", "operators", 0, "dims", "b", to=16), r"graph is not a valid graph: layer 'fc1'"),
        (_set("graph", "word_bytes", to=2), r"model.hash is not the hash of the graph"),
        (_set("machine", "device", "peak_flop_per_s", "float32", to=1e12), r"layers\[1\].layer_cost is .*, but"),
        (
            _set("machine", "device", "peak_flop_per_s", to={"float16": 1e12}),
            r"cost_model cannot be used: .* has no peak for fl",
        ),
        (_set("machine", "schema_version", to=2), r"machine.schema_version is 2; this version of PaSE reads 1"),
        (_set("machine", "levels", to=[]), r"machine.levels is empty; expected one"),
        (_repeat_layer, r"layers has 4 layers; the graph has 3"),
        (_replace_layer, r"layers\[1\].name is 'fc1', but the rest .* it 'fc2'"),
        (
            _set("layers", 0, "kind", to="conv2d"),
            r"layers\[0\].kind is 'conv2d', but the rest .* it 'dense'",
        ),
        (_set("layers", 0, "dims", "n", to=16), r"layers\[0\].dims.n is 16, but the rest .* it 8"),
        (_set("layers", 0, "splits", "b", to=9), r"layers\[0\].splits.b is 9, more than the dim's extent 8"),
        (_set("layers", 0, "splits", "b", to=8), r"layers\[0\].splits makes \d+ parts, which do not divide 4 devices"),
        (_set("layers", 0, "splits", "b", to=0), r"layers\[0\].splits.b is 0; expected a whole number of 1 or more"),
        (_set("layers", 0, "splits", to={"b": 4}), r"layers\[0\].splits names dims b; expected b, n, c, in this order"),
        (_set("layers", 0, "splits", to={}), r"layers\[0\].splits is empty; expected an object of 1 or more"),
        (_reverse_splits, r"layers\[0\].splits names dims c, n, b; expected b, n, c, in this order"),
        (_set("layers", 0, "devices", to=[0, 1, 2, 2]), r"layers\[0\].devices must name each device 0 … 3 once"),
        (_set("layers", 0, "devices", to=[0, 1, 2]), r"layers\[0\].devices must name each device 0 … 3 once"),
        (_set("layers", 0, "devices", to=[1, 2, 3, 4]), r"layers\[0\].devices must name each device 0 … 3 once"),
        (_set("layers", 0, "devices", 0, to=-1), r"layers\[0\].devices\[0\] is -1; expected a whole number of 0"),
        (
            _set("memory", "optimiser", to="adam"),
            r"memory.optimiser_bytes is 0, but the rest .* it \d+: search again",
        ),
        (
            _set("memory", "optimiser", to="adem"),
            r"memory.optimiser is 'adem'; expected one of sgd, momentum, adam, adamw",
        ),
        (
            _set("memory", "weights_bytes", to=1),
            r"memory.weights_bytes is 1, but the rest .* it \d+: search again",
        ),
        (
            _set("memory", "total_bytes", to=1),
            r"memory.total_bytes is 1, but the rest .* it \d+: search again",
        ),
        (_set("memory", "buffers_bytes", to=0.5), r"memory.buffers_bytes is 0.5; expected a whole number"),
        (_set("memory", to={}), r"memory.optimiser is missing"),
        (_set("memory", to=None), r"memory is None; expected an object"),
        (
            _set("memory_limit_bytes_per_device", to=9),
            r"memory_limit_bytes_per_device is 9, but the strategy needs \d+",
        ),
        (
            _set("memory_limit_bytes_per_device", to=0),
            r"memory_limit_bytes_per_device is 0; expected a whole number of 1",
        ),
        (_set("search", "peak_memory_bytes", to=0.5), r"search.peak_memory_bytes is 0.5; expected a whole number"),
        (_set("search", "time_s", to=float("nan")), r"search.time_s is nan; expected a number of 0 or more"),
    ],
)
def test_what_is_wrong_with_an_edited_plan_is_said(change: Callable[[Any], None], message: str) -> None:
    document = _tiny()
    change(document)
    with pytest.raises(PlanError, match=rf"^plan\.json: {message}"):
        _read(document)


def test_a_plan_of_a_newer_version_is_recognised_before_anything_else_is_read() -> None:
    with pytest.raises(PlanError, match="schema_version is 7; this version of PaSE reads 3: update PaSE"):
        _read({"schema_version": 7, "everything": "is different"})


def test_another_strategy_with_its_own_costs_is_accepted() -> None:
    """The check is of consistency: a strategy that costs more than the optimum is one that a gap can describe."""
    plan = tiny_plan()
    model = cost_model(plan.cost_model, plan.machine, plan.num_devices)
    unsplit = [dict.fromkeys(layer.dims, 1) for layer in plan.layers]
    kept = plain_memory(plan.graph, unsplit, plan.optimiser).peak().kept_by_layer
    layers = plan_layers(plan.graph, plan.num_devices, model, unsplit, kept_bytes=kept)
    other = replace(plan, layers=layers, total_cost=total_cost(layers), exact=False)
    assert other.total_cost > plan.total_cost
    assert _read(json.loads(json.dumps(plan_document(other)))) == other


_anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.sampled_from([2**31, 2**62, 2**63, 10**30, 10**400, 1e308, -0.0, 1e-320]),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["fc1", "b", "c", "paper", "activation", "parameter", "index", "\ud800", "\x1b[31m"]),
    st.recursive(
        st.integers(0, 4) | st.text(max_size=2),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
        max_leaves=4,
    ),
    st.just(DELETED),
)


def _as_floats(document: object) -> object:
    return json.loads(json.dumps(document), parse_int=float)


def _three_plans() -> list[Plan]:
    return [tiny_plan(), small_plan("lenet5", 6), small_plan("rnnlm", 8)]


@settings(max_examples=100)
@given(st.data())
def test_a_plan_with_one_change_is_refused_or_means_what_it_says(data: st.DataObject) -> None:
    """No change leads to any other exception, is read as something else than what is written, or forges a strategy."""
    plan = _three_plans()[data.draw(st.integers(0, 2))]
    original = json.loads(json.dumps(plan_document(plan)))
    path = data.draw(st.sampled_from(list(_paths(original))))
    value = data.draw(st.sampled_from([_at(original, p) for p in _paths(original)]) | _anything)
    document = _changed(original, path, value)
    try:
        found = _read(document)
    except PlanError:
        return
    assert _schema().is_valid(document)
    assert found == plan or path[0] in NOT_VERIFIABLE or path == ("precision", "name")
    if path == ("precision", "name"):
        # A name that a user gives a policy; the types are the graph's.
        found = replace(found, graph=replace(found.graph, precision=plan.graph.precision))
    for name in ("graph", "num_devices", "cost_model", "cost_unit", "layers", "total_cost", "lower_bound", "exact"):
        assert getattr(found, name) == getattr(plan, name)
    # What a machine may lack may be null, too.
    is_left_out = value is DELETED or value is None
    assert found == plan or _as_floats(plan_document(found)) == _as_floats(document) or is_left_out


def test_a_plan_of_version_2_is_read_with_its_memory_worked_out_anew() -> None:
    plan = small_plan("mlp", 4)
    document = json.loads(json.dumps(plan_document(plan)))
    document["schema_version"] = 2
    for layer in document["layers"]:
        layer["memory_bytes"] *= 2
    document["memory"]["total_bytes"] += 1000
    assert _read(document) == plan
    assert _read(document).memory == plan.memory


def test_any_permutation_of_the_devices_is_a_placement() -> None:
    document = json.loads(json.dumps(plan_document(small_plan("mlp", 4))))
    document["layers"][0]["devices"] = [3, 1, 0, 2]
    assert _read(document).layers[0].devices == (3, 1, 0, 2)


def _hash_anew(document: Any) -> None:
    text = json.dumps(document["graph"], sort_keys=True, separators=(",", ":"))
    document["model"]["hash"] = hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("key", ["across", "partial_over"])
def test_a_dim_that_a_forged_graph_invents_is_refused(key: str) -> None:
    document = json.loads(json.dumps(plan_document(small_plan("rnnlm", 8))))
    path = next(path for path in _paths(document) if path[-1] == key)
    document = _changed(document, path, "x" if key == "across" else ["x"])
    _hash_anew(document)
    with pytest.raises(PlanError, match=r"graph is not a valid graph: layer .* names dim 'x'"):
        _read(document)


@settings(max_examples=80)
@given(st.data())
def test_a_forged_graph_is_refused_or_consistent(data: st.DataObject) -> None:
    """Whoever changes the graph can compute its hash anew; that must not lead to any other exception either."""
    plan = _three_plans()[data.draw(st.integers(0, 2))]
    original = json.loads(json.dumps(plan_document(plan)))
    inside = list(_paths(original["graph"]))
    document = _changed(original, ("graph", *data.draw(st.sampled_from(inside))), data.draw(_anything))
    _hash_anew(document)
    try:
        found = _read(document)
    except PlanError:
        return
    assert graph_hash(found.graph) == document["model"]["hash"] or found.graph == plan.graph
    assert found.layers == plan.layers


# ----------------------------------------------------------------------------------------------------------- files


def test_a_file_that_was_cut_off_is_said_to_be_truncated(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(tiny_plan(), path)
    whole = path.read_bytes()
    cut = tmp_path / "cut.json"
    for size in {*range(0, len(whole) - 2, 61), *range(40), len(whole) - 2, len(whole) - 3}:
        cut.write_bytes(whole[:size])
        with pytest.raises(PlanError, match=r"cut\.json is not complete JSON .*; it may be truncated: search again"):
            read_plan(cut)
    cut.write_bytes(whole[:-1])
    assert read_plan(cut) == tiny_plan()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "is not complete JSON"),
        (b"null", "the document is None; expected an object"),
        (b"[]", "the document is an array; expected an object"),
        (b"{}", "schema_version is missing"),
        (b'"plan"', "the document is 'plan'; expected an object"),
        (b"[" * 100_000, "is not complete JSON"),
        (b'{"a":' * 100_000, "is not complete JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "is not complete JSON .*recursion"),
        (b'{"schema_version": ' + b"9" * 5000 + b"}", "is not complete JSON"),
        (b'{"schema_version": NaN}', "schema_version is nan; this version of PaSE reads 3"),
        (b'{"schema_version": 1e999}', "schema_version is inf; this version of PaSE reads 3"),
        (b'{"schema_version": 1,}', "is not complete JSON"),
        (b"\xff\xfe\x00", "cannot be read: it is not UTF-8 text"),
        (b"PK\x03\x04\x00\x00", "is no plan: it is not JSON"),
        (b"\xef\xbb\xbf{}", "is no plan: it is not JSON"),
        (b"{\x00}\x00", "is not complete JSON"),
        (b"\x00" * 64, "is no plan: it is not JSON"),
        (b"layer,cost\nfc1,3\n", "is no plan: it is not JSON; a plan is what 'pase search"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_a_file_that_is_no_plan_is_refused(contents: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(contents)
    with pytest.raises(PlanError, match=rf"plan\.json:? {message}"):
        read_plan(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json cannot be read: No such file or directory"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(PlanError, match=r"cannot be read: Is a directory"):
        read_plan(tmp_path)


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"missing/plan\.json cannot be written: No such file or directory"):
        write_plan(tiny_plan(), tmp_path / "missing" / "plan.json")
    with pytest.raises(PlanError, match=r"cannot be written: Is a directory"):
        write_plan(tiny_plan(), tmp_path)
    assert list(tmp_path.iterdir()) == []
