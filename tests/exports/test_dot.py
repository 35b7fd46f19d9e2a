"""DOT: what a reader of its grammar gets, and that no name gets out of its label."""

import shutil
import subprocess
from xml.etree import ElementTree

import pytest

from pase import Plan
from pase.common.words import short, visible
from pase.planning.plan import configuration_text
from pase.views.drawing.plans import split_classes
from pase.views.exports import ExportOptions, export
from pase.views.exports.graph_text import dot
from tests.exports.dot_grammar import Read, read_dot, shown
from tests.hostile import HOSTILE_NAMES, hostile_plan
from tests.networks import small_plan


def read(plan: Plan, *, fold: bool = False) -> Read:
    return read_dot(export(plan, "dot", ExportOptions(fold=fold)).text)


@pytest.mark.parametrize("name", ["alexnet", "transformer_big"])
def test_nodes_and_edges_are_those_of_the_graph(name: str) -> None:
    plan = small_plan(name, 8)
    found = read(plan)
    index = plan.graph.index
    assert [shown(attributes["label"]) for attributes in found.nodes.values()] == [
        [layer.name, configuration_text(layer.splits, 8)] for layer in plan.layers
    ]
    assert sorted((u, v) for u, v, _ in found.edges) == sorted(
        (f"n{index[edge.producer]}", f"n{index[edge.consumer]}") for edge in plan.graph.edges
    )
    classes = split_classes(plan.layers)
    assert [attributes["fillcolor"] for attributes in found.nodes.values()] == [
        classes.classes[i].light for i in classes.of_layer
    ]
    assert found.clusters == {}
    assert shown(found.graph["label"])[0] == f"{plan.graph.name} on 8 × {plan.machine.device.name}"


def test_edges_are_wide_where_bytes_move() -> None:
    plan = small_plan("alexnet", 8)
    moved = {
        (transfer.producer, layer.name): transfer.forward_bytes + transfer.backward_bytes
        for layer in plan.layers
        for transfer in layer.transfers
    }
    assert any(moved.values())
    edges = [(u, v, attributes) for u, v, attributes in read(plan).edges]
    drawn = [(moved[plan.layers[int(u[1:])].name, plan.layers[int(v[1:])].name], a) for u, v, a in edges]
    widths = [float(attributes["penwidth"]) for _, attributes in sorted(drawn, key=lambda one: one[0])]
    assert widths == sorted(widths)
    for total, attributes in drawn:
        assert (float(attributes["penwidth"]) > 1) == (total > 0) == ("label" in attributes)


def test_blocks_that_repeat_are_drawn_once() -> None:
    plan = small_plan("gpt", 4)
    found = read(plan, fold=True)
    ((attributes, nodes),) = found.clusters.values()
    assert attributes["label"] == "×2"
    assert len(found.nodes) == len(plan.layers) - len(nodes)
    backs = [(u, v) for u, v, attributes in found.edges if attributes.get("constraint") == "false"]
    assert backs
    assert {end for edge in backs for end in edge} <= set(nodes)


@pytest.mark.parametrize("everywhere", [False, True])
def test_hostile_names_stay_in_their_labels(everywhere: bool) -> None:
    plan = hostile_plan(everywhere=everywhere)
    found = read(plan)
    assert list(found.nodes) == [f"n{i}" for i in range(len(plan.layers))]
    assert [(u, v) for u, v, _ in found.edges] == [(f"n{i}", f"n{i + 1}") for i in range(len(plan.layers) - 1)]
    for layer, attributes in zip(plan.layers, found.nodes.values(), strict=True):
        assert set(attributes) == {"label", "fillcolor", "tooltip"}
        assert shown(attributes["label"]) == [short(layer.name), short(configuration_text(layer.splits, 4))]
        assert shown(attributes["tooltip"])[0].startswith(short(layer.kind))


@pytest.mark.parametrize("name", [*HOSTILE_NAMES[:-1], "\\n", "\\", '\\"', '"', "&quot;", "\\\\N"])
def test_a_label_shows_a_name_as_it_is(name: str) -> None:
    found = read_dot(dot('digraph plan { n0 [label="{}"]; }', name))
    (line,) = shown(found.nodes["n0"]["label"])
    assert line == visible(name)


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_reads_it_so_too() -> None:
    plan = hostile_plan(everywhere=True)
    drawn = subprocess.run(
        ["dot", "-Tsvg"], input=export(plan, "dot").text.encode(), capture_output=True, check=True, timeout=60
    )
    svg = ElementTree.fromstring(drawn.stdout)
    space = "{http://www.w3.org/2000/svg}"
    assert {element.tag.removeprefix(space) for element in svg.iter()} <= {
        *("svg", "g", "title", "path", "polygon", "polyline", "text", "a")
    }
    nodes = [group for group in svg.iter(f"{space}g") if group.get("class") == "node"]
    assert len(nodes) == len(plan.layers)
    texts = {text.text for group in nodes for text in group.iter(f"{space}text")}
    for layer in plan.layers:
        assert short(layer.name).strip() in {(text or "").strip() for text in texts} or not layer.name.strip()
